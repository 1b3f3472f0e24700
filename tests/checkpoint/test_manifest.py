"""What a folder must hold to be a checkpoint, and which one is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import edit, sign, write
from titanlite.checkpoint.manifest import FORMAT, CheckpointError, fault_of, find, steps_in
from titanlite.checkpoint.retention import begin
from titanlite.cli.checkpoint_folders import list_checkpoints


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "manifest.json").unlink(), "never finished"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "manifest.json").write_text("[]"), "not a titanlite manifest"),
        (lambda f: (f / "shard").write_bytes(b"123"), "has 3 bytes, the manifest says 4"),
        (lambda f: (f / "shard").unlink(), "shard is missing"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "maximum recursion depth"),
        (lambda f: edit(f, train={"next_sequence": 41}), "is damaged"),
        (lambda f: edit(f, digest=None), "is damaged"),
        (lambda f: edit(f, format=1), "is damaged"),
        (lambda f: sign(f, files=None), "files"),
        (lambda f: sign(f, step=6.0), "step"),
        (lambda f: sign(f, validation_loss=float("nan")), "validation_loss = nan"),
        (lambda f: sign(f, created=1e300), "created = 1e+300"),
        (lambda f: sign(f, tensors={"w": ["float32", [2.5]]}), "`int`"),
        (lambda f: sign(f, files={"../shard": 4}), "'../shard'"),
        (lambda f: sign(f, hashes={}), "not every file has a hash"),
        (lambda f: sign(f, hashes={"shard": "crc32:1234"}), "is no digest"),
        (lambda f: sign(f, surprise=1), "damaged"),
        (lambda f: sign(f, step=4), "renamed"),
    ],
)
def test_damaged_newest_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage, reason: str
) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path, 5, 6)
    damage(tmp_path / "step-6")
    manifest, passed = find(tmp_path)
    assert manifest is not None
    assert manifest.step == 5
    assert len(passed) == 1
    assert reason in passed[0]
    assert "step-6" in passed[0]


def test_newer_format_is_neither_passed_over_nor_moved(tmp_path: Path) -> None:
    """Otherwise its run would lose steps without a word."""
    write(tmp_path, 5, 6)
    edit(tmp_path / "step-6", format=FORMAT + 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-6").iterdir()}
    for use in (
        lambda: find(tmp_path),
        lambda: find(tmp_path, 6),
        lambda: fault_of(tmp_path / "step-6"),
        lambda: begin(tmp_path, 6),
    ):
        with pytest.raises(
            CheckpointError,
            match=f"step-6/manifest.json has format {FORMAT + 1}.* upgrade titanlite",
        ):
            use()
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-6").iterdir()} == before
    assert steps_in(tmp_path) == [5, 6]
    assert find(tmp_path, 5)[0] is not None
    assert [entry.state for entry in list_checkpoints(tmp_path)] == ["valid", "newer format"]


def test_newest_is_found_by_number_and_a_demanded_step_by_name(tmp_path: Path) -> None:
    write(tmp_path, 9, 10, 100)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-999").write_text("a file, not a folder")
    assert steps_in(tmp_path) == [9, 10, 100]
    assert [
        manifest.step for manifest in (find(tmp_path)[0], find(tmp_path, 10)[0]) if manifest
    ] == [100, 10]
    with pytest.raises(CheckpointError, match=r"no step-7 \(steps there: 9, 10, 100\)"):
        find(tmp_path, 7)
    assert find(tmp_path / "nowhere") == (None, [])


def test_known_damage_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 4, 5)
    manifest, passed = find(tmp_path, known_bad={5: "a hash differs"})
    assert manifest is not None
    assert manifest.step == 4
    assert passed == ["a hash differs"]
    with pytest.raises(CheckpointError, match="a hash differs"):
        find(tmp_path, 5, known_bad={5: "a hash differs"})
