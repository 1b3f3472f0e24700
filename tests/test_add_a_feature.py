"""docs/add-a-feature.md: its files and lines, added to a copy of the library, train."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, TORCHRUN, python

PAGE = (ROOT / "docs" / "add-a-feature.md").read_text(encoding="utf-8")
NOISE = "--optimizer.gradient_noise=0.01"
FLAGS = (
    "--job.config_file=debug_model.toml",
    "--training.steps=3",
    "--training.seq_len=64",
    "--training.global_batch_size=4",
    "--training.batch_size=2",
    "--model.overrides.n_layers=1",
    "--validation.enable=false",
    "--metrics.log_freq=1",
    "--metrics.enable_tensorboard=false",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the library to which the page's feature is added."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "titanlite", folder / "titanlite", ignore=ignored)
    named = ""
    for text, language, block in re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", PAGE, re.S | re.M):
        paths = re.findall(r"`(titanlite/[\w/]+\.py)`", text)
        named = paths[-1] if paths else named
        if language == "python":
            (folder / named).parent.mkdir(exist_ok=True)
            (folder / named).write_text(block, encoding="utf-8")
        else:
            change(folder / named, block)
    return folder


def change(file: Path, diff: str) -> None:
    """Apply a change of one place; its lines must stand in the file once."""
    before = "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in " -")
    after = "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in " +")
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{file.name} has not once: {before}"
    file.write_text(text.replace(before, after), encoding="utf-8")


def run(copy: Path, dump: Path, *flags: str, ranks: int = 1) -> Any:
    words = [*TORCHRUN, "-m", "titanlite.main"] if ranks == 2 else ["-m", "titanlite.main"]
    flags = (*FLAGS, f"--job.dump_folder={dump}", *flags)
    return python(*words, *flags, cwd=copy, env={"PYTHONPATH": str(copy)})


def losses(copy: Path, dump: Path, *flags: str, ranks: int = 1) -> tuple[list[float], str]:
    """Train; return the losses and the output."""
    done = run(copy, dump, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (dump / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], done.stdout


@pytest.mark.slow
def test_the_feature_of_the_page_trains_and_is_not_there_when_it_is_off(
    copy: Path, tmp_path: Path
) -> None:
    plain, _ = losses(ROOT, tmp_path / "plain")
    off, _ = losses(copy, tmp_path / "off")
    one, report = losses(copy, tmp_path / "one", NOISE)
    two, _ = losses(copy, tmp_path / "two", NOISE, ranks=2)
    assert off == plain
    # The noise comes with the first update, so the first loss is without it.
    assert one[0] == plain[0]
    assert one[1:] != pytest.approx(plain[1:], abs=1e-3)
    assert two == pytest.approx(one, abs=2e-5)
    assert "gradient noise  variance 0.01 at step 1" in re.sub("  +", "  ", report)


@pytest.mark.slow
def test_the_variance_is_that_of_the_paper(copy: Path) -> None:
    program = """
import types, torch
from titanlite.features.gradient_noise.noise import AddNoise
model = torch.nn.Linear(512, 512, bias=False)
trainer = types.SimpleNamespace(step=9, parts=types.SimpleNamespace(model=model))
for seed in 0, 0, 1:
    model.weight.grad = torch.zeros(512, 512)
    AddNoise(0.04, seed).before_update(trainer)
    print(model.weight.grad.var().item(), model.weight.grad.sum().item())
"""
    done = python("-c", program, cwd=copy, env={"PYTHONPATH": str(copy)})
    first, again, other = done.stdout.splitlines()
    assert float(first.split()[0]) == pytest.approx(0.04 / 9**0.55, rel=0.01)
    assert first == again != other


def test_what_it_excludes_is_refused(copy: Path, tmp_path: Path) -> None:
    early = ["--optimizer.early_step_in_backward", "--training.max_norm=1e9"]
    done = run(copy, tmp_path, NOISE, *early)
    assert done.returncode == 2
    assert "excludes optimizer.early_step_in_backward" in done.stderr
