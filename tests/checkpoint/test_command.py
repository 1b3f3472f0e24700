"""`titanlite checkpoint`: list, verify, diff, rm; of folders and of URLs."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.checkpoint.golden import HERE
from tests.support.checkpoints import RUN, SHARD, flip, train
from tests.support.pool import Pools
from titanlite import exit_codes
from titanlite.checkpoint.manifest import REASON
from titanlite.checkpoint.retention import begin
from titanlite.cli.hub.compare_checkpoints import Contents, compare
from titanlite.cli.main import main
from titanlite.runs import ATTEMPTS
from titanlite.utils import human_bytes

NAN = math.nan


@pytest.fixture(scope="module")
def written(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints of steps 2 and 4, written by 2 ranks, and of another model
    beside it.
    """
    run = tmp_path_factory.mktemp("written")
    pool(2).run(train, RUN, run / "checkpoint", 1, 4, every=2)
    other = replace(RUN, args=replace(RUN.args, n_layers=3, ffn_dim=96))
    pool(1).run(train, other, run / "other", 1, 1)
    return run


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(written, tmp_path / "run")


def _lines(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> list[str]:
    """Lines of the command's output, all of it to one stream: standard output, or standard error
    when it fails.
    """
    assert main(["checkpoint", *map(str, words)]) == code
    printed = capsys.readouterr()
    assert bool(printed.out) != bool(printed.err)
    return (printed.out or printed.err).splitlines()


def test_ls_shows_every_state(run, written, capsys):
    root = run / "checkpoint"
    (root / "step-2" / "KEEP").touch()
    newest = written / "checkpoint" / "step-4"
    shutil.copytree(newest, root / "step-6")  # renamed: its manifest says 4
    shutil.copytree(newest, root / "step-6.invalid-0")
    (root / "step-6.invalid-0" / REASON).write_bytes(b"a bit has flipped\n")
    (begin(root, 8) / "shard").write_bytes(SHARD)
    (root / ".deleted-step-1-01234567").touch()
    # Of a checkpoint: the deletion has not begun.
    (root / ".deleted-step-4-01234567").touch()
    (root / "notes").touch()
    lines = _lines(capsys, "ls", run)
    states = ["being deleted", "valid, pinned", "valid", "invalid", "set aside", "partial"]
    assert all(f"  {state}  " in line for line, state in zip(lines[1:7], states, strict=True))
    assert lines[7].startswith("note: ")
    assert "was renamed: its manifest is of step 4" in lines[7]
    assert lines[8] == "note: step-6.invalid-0: a bit has flipped"
    assert lines[9].startswith(f"{root}: ")
    assert lines[9].endswith("newest valid: step-4")
    size = sum(file.stat().st_size for file in newest.iterdir())
    assert f" {human_bytes(size)} " in lines[3]
    assert lines[3].split()[-3] == "2"
    assert lines[6].split()[-1] == "–"
    assert " 4 B " in lines[6]


def test_ls_of_no_run(tmp_path, capsys):
    assert "holds no checkpoints" in _lines(capsys, "ls", tmp_path, code=exit_codes.CHECKPOINT)[0]
    (tmp_path / ATTEMPTS).touch()
    (told,) = _lines(capsys, "ls", tmp_path, code=exit_codes.CHECKPOINT)
    assert "train it with --checkpoint.enable_checkpoint" in told


def test_verify(run, capsys):
    root = run / "checkpoint"
    lines = _lines(capsys, "verify", run)
    assert [line.partition(" (")[0] for line in lines] == [
        f"{root}/step-{n}: hashes are right" for n in (2, 4)
    ]
    for name in ("__0_0.distcp", "__1_0.distcp"):
        flip(root / "step-4" / name)
    lines = _lines(capsys, "verify", root, code=exit_codes.CHECKPOINT)
    assert lines[1] == f"{root / 'step-4'}: DAMAGED"
    assert lines[-1].startswith("1 of 2 damaged: ")
    assert "__0_0.distcp" in lines[2]
    assert "__1_0.distcp" in lines[3]
    (root / "step-2" / "manifest.json").unlink()
    lines = _lines(capsys, "verify", root / "step-2", code=exit_codes.CHECKPOINT)
    assert "never finished" in lines[1]
    lines = _lines(capsys, "verify", HERE / "format-1")
    assert "sizes are right; it was written without hashes" in lines[0]


@pytest.mark.slow
def test_diff_measures_each_tensor(run, capsys):
    root = run / "checkpoint"
    assert _lines(capsys, "diff", root / "step-4", root / "step-4")[-1].startswith("all ")
    lines = _lines(capsys, "diff", root / "step-2", root / "step-4", code=1)
    assert lines[:2] == [f"--- {root / 'step-2'}", f"+++ {root / 'step-4'}"]
    name = "model.layers.1.feed_forward.w2.weight"
    a, b = (Contents(root / f"step-{step}").read(name) for step in (2, 4))
    row = next(line for line in lines if line.startswith(name)).split()
    assert row[-2:] == [f"{int((a != b).sum()):,}", f"{(a - b).abs().max():.3g}"]
    lines = _lines(capsys, "diff", run, run / "other", code=1)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[3:]}
    assert rows["model.layers.2.attention_norm.weight"] == "– float32[64]"
    assert rows["model.layers.0.feed_forward.w1.weight"] == "float32[192, 64] float32[96, 64]"
    shard = root / "step-4" / "__0_0.distcp"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    (line,) = _lines(capsys, "diff", root / "step-2", root / "step-4", code=exit_codes.CHECKPOINT)
    assert "cannot be read from" in line and "titanlite checkpoint verify" in line


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ([1.0, NAN, 3.0], [1.0, NAN, 3.5], (1, 0.5)),
        ([1.0, 2.0], [1.0, NAN], (1, NAN)),
        ([5], [250], (1, 245.0)),
    ],
)
def test_compare_counts_elements_and_their_largest_difference(a, b, found):
    # Random generators are saved as bytes.
    kind = torch.uint8 if isinstance(a[0], int) else torch.float32
    sides = [torch.tensor(values, dtype=kind) for values in (a, b)]
    manifest = SimpleNamespace(tensors={"x": [str(kind), [len(a)]]})
    contents = [SimpleNamespace(manifest=manifest, read=lambda _, x=x: x) for x in sides]
    (one,) = compare(*contents)
    assert (one.elements, one.largest) == pytest.approx(found, nan_ok=True)
