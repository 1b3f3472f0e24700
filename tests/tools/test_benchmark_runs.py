"""Benchmarks of real training runs on CPU ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pools
from tests.tiny import TWO_LAYERS, size
from titanlite.build import build
from titanlite.config.fit import check_config
from titanlite.config.load import load_file
from titanlite.parallel.dist_env import DistEnv
from titanlite.tools import benchmark as room
from titanlite.tools.benchmark import LEVELS, SWITCHES
from titanlite.tools.cli import main
from titanlite.trainer import Trainer

ROOT = Path(__file__).parents[2]
TINY = [
    *TWO_LAYERS,
    "--training.batch_size=2",
    "--compile.backend=aot_eager",
]
NO_FLOAT8 = ["--skip", "float8", "--skip", "float8-all-gather"]


def benchmark(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own, from `folder`."""
    command = [sys.executable, "-m", "titanlite.tools.cli", "ladder", str(ROOT / "train_configs" / "debug_model.toml")]
    found = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables = {**found, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *TINY, *words], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "benchmark.json").read_text())


@pytest.mark.slow
def test_one_level_trains_for_real(tmp_path: Path) -> None:
    words = ["--skip", "compile", *NO_FLOAT8, "--steps", "3", "--warmup", "1", "--repeats", "1", "--ranks", "1"]
    done = benchmark(tmp_path, *words)
    (run,) = record(tmp_path / "outputs" / "benchmark" / "debug_model")["runs"]
    rows = (tmp_path / "outputs/benchmark/debug_model/runs/default-1/metrics.jsonl").read_text().splitlines()
    losses = {str(row["step"]): row["loss"] for row in map(json.loads, rows)}
    assert run["losses"] == losses and len(losses) == 3 and 7.5 < losses["1"] < 8.5
    assert run["tokens_per_second"] > 0
    assert re.search(r"^default +[\d,]+ +1 +– ", done.stdout, re.MULTILINE)


@pytest.mark.soak
def test_levels_start_from_the_same_weights_and_read_the_same_text(tmp_path: Path) -> None:
    """Exact where the arithmetic is the same; within rounding where a compiler orders it anew."""
    (tmp_path / "full.toml").write_text('[activation_checkpoint]\nmode = "full"\n')
    (tmp_path / "seed.toml").write_text("[data]\nseed = 1\n")
    overlays = ["--overlay", "full=full.toml", "--overlay", "seed=seed.toml"]
    done = benchmark(tmp_path, *NO_FLOAT8, *overlays, "--steps", "4", "--warmup", "1", "--repeats", "1", "--out", "out")
    found = record(tmp_path / "out")
    losses = {run["level"]: run["losses"] for run in found["runs"]}
    assert list(losses) == ["default", "compile", "full", "seed"]
    assert losses["full"] == losses["default"] and len(losses["full"]) == 4
    assert losses["compile"]["1"] == pytest.approx(losses["default"]["1"], abs=1e-5)
    assert losses["compile"]["4"] == pytest.approx(losses["default"]["4"], abs=1e-4)
    assert abs(losses["seed"]["1"] - losses["default"]["1"]) > 1e-4  # other text: the comparison can fail
    levels = {level["level"]: level for level in found["levels"]}
    assert levels["full"]["loss_difference"] == 0 and levels["seed"]["loss_difference"] is None
    assert "seed differs from default in data.seed: losses not compared" in done.stdout
    for level in levels:
        run = tmp_path / "out" / "runs" / f"{level}-1"
        assert f"compile = {'true' if level == 'compile' else 'false'}" in (run / "config.toml").read_text()
        assert ("torch.compile made" in (run / "console.log").read_text()) == (level == "compile")


def _train(world: DistEnv, arguments: list[str]) -> None:
    """One run of a benchmark, on ranks that exist already."""
    _, run = check_config(arguments, world.size)
    try:
        Trainer(build(run, world)).train()
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
def test_all_four_levels_train_in_the_pool(
    pool: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command without torchrun: every level's own file, trained by real ranks."""

    def run(command: list[str], console: Path, device_type: str) -> int:
        pool(1).run(_train, command[command.index("train") + 1 :], timeout=600)
        return 0

    monkeypatch.setattr(room, "run", run)
    monkeypatch.setattr(room, "probe", lambda: room.Machine("CPU (made up)"))
    words = [*TINY, *size(64, 1, 4, 16), "--compile.backend=eager", "--out", str(tmp_path)]
    words += ["--ranks", "1", "--steps", "3", "--warmup", "1", "--repeats", "1"]
    assert main(["benchmark", str(ROOT / "train_configs" / "debug_model.toml"), *words]) == 0
    _check_four(record(tmp_path), capsys.readouterr().out)
    on: list[str] = []
    for level in LEVELS:
        config = load_file(tmp_path / "runs" / f"{level.name}-1" / "config.toml")
        on += level.adds
        assert [key for key in SWITCHES if config.value(key)] == on
        assert config.value("float8.emulate") == config.value("float8.enable_float8_linear")


@pytest.mark.soak
def test_all_four_levels_run_on_a_cpu_with_float8_emulated(tmp_path: Path) -> None:
    done = benchmark(tmp_path, "--steps", "3", "--warmup", "1", "--repeats", "1", "--out", "out")
    _check_four(record(tmp_path / "out"), done.stdout)


def _check_four(found: dict[str, Any], said: str) -> None:
    losses = {run["level"]: run["losses"] for run in found["runs"]}
    assert list(losses) == ["default", "compile", "float8", "float8-all-gather"]
    for level in ("float8", "float8-all-gather"):
        assert losses[level]["1"] == pytest.approx(losses["default"]["1"], abs=0.02)  # the same weights and text
        assert losses[level]["3"] == pytest.approx(losses["default"]["3"], abs=0.05)
        # And yet other products; by then, as the first step of a small model may show none.
        assert losses[level]["3"] != losses["compile"]["3"]
    assert "float8 is emulated in float8, float8-all-gather: compare their losses, not their speed" in said


@pytest.mark.soak
def test_a_run_that_fails_shows_what_its_ranks_said(tmp_path: Path) -> None:
    """A learning rate that overflows: the guard stops the second level, the first one's figures stay."""
    (tmp_path / "wild.toml").write_text("[optimizer]\nlr = 1e30\n")
    words = ["--skip", "compile", *NO_FLOAT8, "--overlay", "wild=wild.toml", "--out", "out"]
    done = benchmark(tmp_path, *words, "--steps", "6", "--warmup", "1", "--repeats", "1", code=1)
    assert "wild, repeat 1 failed with exit code 3. Its last lines:" in done.stderr
    assert re.search(r"^    error: stopped: .*not finite", done.stderr, re.MULTILINE)
    assert "torch/distributed/elastic" not in done.stderr and "ChildFailedError" not in done.stderr
    assert [run["level"] for run in record(tmp_path / "out")["runs"]] == ["default"]
