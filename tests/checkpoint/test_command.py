"""`titanlite checkpoint`: list, inspect, verify, diff, rm."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import RUN, flip, train
from tests.pool import Pools
from titanlite import exit_codes
from titanlite.checkpoint import command
from titanlite.checkpoint.manifest import REASON, find, parse_manifest, steps_in
from titanlite.cli import main
from titanlite.tools.tensors import Contents, compare
from titanlite.utils import human_bytes


@pytest.fixture(scope="module")
def written(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints of steps 2 and 4, written by 2 ranks, and of another model beside it."""
    run = tmp_path_factory.mktemp("written")
    pool(2).run(train, RUN, str(run / "checkpoint"), 1, 4, every=2)
    deeper = replace(RUN, args=replace(RUN.args, n_layers=3, ffn_dim=96))
    pool(1).run(train, deeper, str(run / "other"), 1, 1)
    return run


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "run")


def _lines(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> list[str]:
    """What the command prints, all of it to one stream: standard output, or standard error when it fails."""
    assert main(["checkpoint", *map(str, words)]) == code
    said = capsys.readouterr()
    assert bool(said.out) != bool(said.err)
    return (said.out or said.err).splitlines()


def test_ls_shows_every_state(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoint"
    (root / "step-2" / "KEEP").touch()
    shutil.copytree(root / "step-4", root / "step-6")  # renamed: its manifest says 4
    shutil.copytree(root / "step-4", root / "step-6.invalid-0")
    (root / "step-6.invalid-0" / REASON).write_text("a bit has flipped\n")
    (root / ".partial-step-8-abc").mkdir()
    (root / ".deleted-step-1").mkdir()
    (root / "notes").mkdir()
    lines = _lines(capsys, "ls", run)
    assert lines[0].split() == ["checkpoint", "state", "size", "ranks", "age"]
    assert [line.split()[0] for line in lines[1:7]] == [
        ".deleted-step-1", "step-2", "step-4", "step-6", "step-6.invalid-0", ".partial-step-8-abc",
    ]  # fmt: skip
    for line, state in zip(
        lines[1:7], ["being deleted", "valid, pinned", "valid", "invalid", "set aside", "partial"], strict=True
    ):
        assert f"  {state}  " in line, line
    assert lines[7].startswith("note: ") and "was renamed: its manifest is of step 4" in lines[7]
    assert lines[8] == "note: step-6.invalid-0: a bit has flipped"
    assert lines[9].startswith(f"{root}: ") and lines[9].endswith("newest valid: step-4")
    size = sum(path.stat().st_size for path in (root / "step-4").iterdir())
    assert f" {human_bytes(size)} " in lines[3] and lines[3].split()[-3] == "2"
    listed = json.loads("\n".join(_lines(capsys, "ls", root, "--json")))
    assert [(entry["step"], entry["state"], entry["pinned"]) for entry in listed][1:3] == [
        (2, "valid", True), (4, "valid", False),
    ]  # fmt: skip
    assert listed[2]["bytes"] == size and listed[2]["ranks"] == 2


def test_ls_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (said,) = _lines(capsys, "ls", tmp_path, code=exit_codes.CHECKPOINT)
    assert "holds no checkpoints" in said
    (said,) = _lines(capsys, "ls", tmp_path / "none", code=exit_codes.CHECKPOINT)
    assert "no such folder" in said
    said = _lines(capsys, "ls", tmp_path, "--training.steps=3", code=exit_codes.CONFIG)
    assert said[1:] == ["  command line: --training.steps=3: is a config key; this command takes none"]


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines(capsys, "inspect", run)
    assert lines[0] == str(run / "checkpoint" / "step-4")
    facts = dict(line.strip().split(maxsplit=1) for line in lines[1 : lines.index("")])
    manifest, _ = find(run / "checkpoint")
    assert manifest is not None
    assert facts["state"] == "valid" and facts["step"] == "4" and facts["train"] == '{"next_sequence": 32}'
    parameters = sum(torch.Size(shape).numel() for name, (_, shape) in manifest.tensors.items() if name[:6] == "model.")
    assert facts["model"].endswith(f"{parameters:,} parameters") and facts["tokenizer"] == "t"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["__1_0.distcp"] == [f"{manifest.files['__1_0.distcp']:,}", manifest.hashes["__1_0.distcp"]]
    assert rows["model.layers.0.attention.wk.weight"] == ["float32", "32", "x", "64"]
    assert rows["optimizer.state.output.weight.step"] == ["float32", "scalar"]
    raw = json.loads("\n".join(_lines(capsys, "inspect", run / "checkpoint" / "step-2", "--json")))
    assert raw["step"] == 2 and raw["digest"]
    assert "no config" in _lines(capsys, "inspect", run, "--config", code=exit_codes.CHECKPOINT)[0]


def test_inspect_shows_what_is_left_of_a_damaged_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoint" / "step-4" / "__0_0.distcp").unlink()
    lines = _lines(capsys, "inspect", run / "checkpoint" / "step-4")
    assert any("state" in line and "invalid: " in line and "__0_0.distcp is missing" in line for line in lines)


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoint"
    (root / "step-2" / "notes.txt").write_text("mine")
    lines = _lines(capsys, "verify", run)
    assert lines[0].startswith(f"{root / 'step-2'}: hashes are right (3 files, ")
    assert lines[1] == "  not of the checkpoint: notes.txt" and lines[2].startswith(f"{root / 'step-4'}: hashes are")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        flip(root / "step-4" / name)
    lines = _lines(capsys, "verify", root, code=exit_codes.CHECKPOINT)
    assert lines[2] == f"{root / 'step-4'}: DAMAGED" and lines[-1].startswith("1 of 2 damaged: ")
    assert [name in line for name, line in zip(("__0_0.distcp", "__1_0.distcp"), lines[3:5], strict=True)] == [True] * 2
    assert _lines(capsys, "verify", root / "step-2")[0].startswith(f"{root / 'step-2'}: hashes are right")
    assert "DAMAGED" in _lines(capsys, "verify", root / "step-4", code=exit_codes.CHECKPOINT)[0]
    (root / "step-2" / "manifest.json").unlink()
    assert "never finished" in _lines(capsys, "verify", root / "step-2", code=exit_codes.CHECKPOINT)[1]


def test_verify_says_how_far_it_has_come(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_TELL_SECONDS", 0.0)
    assert main(["checkpoint", "verify", str(run)]) == exit_codes.DONE
    said = capsys.readouterr().err.splitlines()
    for step in (2, 4):
        folder = run / "checkpoint" / f"step-{step}"
        lines = [line for line in said if line.startswith(f"{folder}: ")]
        size = human_bytes(sum(parse_manifest(folder).files.values()))
        assert len(lines) == 3 and lines[-1] == f"{folder}: {size} of {size}", "one for each file: they are small"


def test_verify_of_an_old_one_says_what_it_cannot_know(capsys: pytest.CaptureFixture[str]) -> None:
    golden = Path(__file__).parent / "golden" / "format-1"
    (line,) = _lines(capsys, "verify", golden)
    assert "sizes are right; it is of a time without hashes" in line


def test_diff_measures_what_training_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoint"
    assert _lines(capsys, "diff", root / "step-4", root / "step-4")[-1].startswith("all ")
    lines = _lines(capsys, "diff", root / "step-2", root / "step-4", code=1)
    assert lines[:2] == [f"--- {root / 'step-2'}", f"+++ {root / 'step-4'}"]
    left, right = Contents(root / "step-2"), Contents(root / "step-4")
    name = "model.layers.1.feed_forward.w2.weight"
    a, b = left.read(name).double(), right.read(name).double()
    row = next(line for line in lines if line.startswith(name)).split()
    assert row[-3] == f"{int((a != b).sum()):,}"
    assert row[-2] == f"{(a - b).abs().max().item():.3g}"
    gap = (a - b).abs() / torch.maximum(a.abs(), b.abs())
    assert row[-1] == f"{gap.nan_to_num(0).max().item():.3g}"
    step = next(line for line in lines if line.startswith("optimizer.state.norm.weight.step ")).split()
    assert step[-2:] == ["2", "0.5"]


def test_diff_of_other_models_names_tensors_and_shapes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines(capsys, "diff", run, run / "other", code=1)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[3:]}
    assert rows["model.layers.2.attention_norm.weight"] == "only in +++: float32[64]"
    assert rows["model.layers.0.feed_forward.w1.weight"] == "float32[192, 64] and float32[96, 64]"
    assert rows["model.norm.weight"].startswith("float32[64] ")


def test_diff_counts_what_is_not_finite(run: Path) -> None:
    found = _measured(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([1.0, float("nan"), 3.5]))
    assert found == (1, 0.5, pytest.approx(0.5 / 3.5))
    assert _measured(torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])) == (1, float("inf"), float("inf"))
    assert _measured(torch.tensor([float("inf")]), torch.tensor([float("inf")])) == (0, 0.0, 0.0)
    assert _measured(torch.tensor([0.0]), torch.tensor([-0.0])) == (0, 0.0, 0.0)
    assert _measured(torch.tensor([5], dtype=torch.uint8), torch.tensor([250], dtype=torch.uint8)) == (1, 245.0, 0.98)
    a, b = Contents(run / "checkpoint" / "step-2"), Contents(run / "checkpoint" / "step-2")
    assert all(not one.elements for one in compare(a, b))


def _measured(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float]:
    from titanlite.tools.tensors import _measure

    return _measure(a, b)


def test_diff_of_a_damaged_one_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoint"
    shard = root / "step-4" / "__0_0.distcp"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    (said,) = _lines(capsys, "diff", root / "step-2", root / "step-4", code=exit_codes.CHECKPOINT)
    assert "cannot be read from" in said and "titanlite checkpoint verify" in said


def test_rm(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoint"
    size = sum(path.stat().st_size for path in (root / "step-2").iterdir())
    lines = _lines(capsys, "rm", root / "step-2", "--dry-run")
    assert lines == [
        f"would delete {root / 'step-2'}: valid, {human_bytes(size)}",
        f"{human_bytes(size)} would be freed",
    ]
    assert steps_in(root) == [2, 4]
    assert _lines(capsys, "rm", root / "step-2")[-1] == f"{human_bytes(size)} freed"
    assert sorted(path.name for path in root.iterdir()) == ["step-4"]


def test_rm_refuses_the_last_good_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoint"
    for words in ([root / "step-2", root / "step-4"],):
        said = _lines(capsys, "rm", *words, code=exit_codes.CHECKPOINT)
        assert "would be left without a good checkpoint" in said[0] and "--force" in said[-1]
    flip(root / "step-4" / "__1_0.distcp")  # valid by its sizes, but not good
    said = _lines(capsys, "rm", root / "step-2", code=exit_codes.CHECKPOINT)
    assert "without a good checkpoint" in said[0] and "step-4/__1_0.distcp" in said[1]
    assert steps_in(root) == [2, 4]
    _lines(capsys, "rm", root / "step-4")  # the damaged one may go: 2 is good
    assert steps_in(root) == [2]
    _lines(capsys, "rm", root / "step-2", "--force")
    assert list(root.iterdir()) == []


def test_rm_refuses_pinned_ones_and_saves_under_way(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoint"
    (root / "step-2" / "KEEP").touch()
    (root / ".partial-step-6-abc").mkdir()
    assert "is pinned" in _lines(capsys, "rm", root / "step-2", code=exit_codes.CHECKPOINT)[0]
    assert "under way" in _lines(capsys, "rm", root / ".partial-step-6-abc", code=exit_codes.CHECKPOINT)[0]
    assert "no folder of a checkpoint" in _lines(capsys, "rm", root, code=exit_codes.CHECKPOINT)[0]
    assert root.is_dir() and steps_in(root) == [2, 4]
    _lines(capsys, "rm", "--force", root / "step-2", root / ".partial-step-6-abc")
    assert sorted(path.name for path in root.iterdir()) == ["step-4"]


def test_only_diff_needs_torch(run: Path) -> None:
    code = (
        "import sys\nfrom titanlite.cli import main\n"
        "for name in ('ls', 'inspect', 'verify'):\n    assert main(['checkpoint', name, sys.argv[1]]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["ls", "inspect", "verify", "diff", "rm"])
def test_help_says_what_it_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "Exit status" in said and "FOLDER" in said
