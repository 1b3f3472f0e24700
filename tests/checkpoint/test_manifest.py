"""What counts as a checkpoint, and how one is published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from titanlite.checkpoint.manifest import CheckpointError, Manifest, find, publish, read_manifest, steps_in

MANIFEST = Manifest(
    step=5,
    fingerprints={"model": "m"},
    tensors={"model.w": ["float32", [2]]},
    files={"shard": 4},
    train={"next_sequence": 40},
    versions={"titanlite": "0"},
    world_size=2,
    created=0.0,
)


def _write(root: Path, step: int) -> Path:
    partial = root / f".partial-{step}"
    partial.mkdir(parents=True)
    (partial / "shard").write_bytes(b"1234")
    return publish(partial, root, replace(MANIFEST, step=step))


def test_published_folder_is_found_and_reads_back(tmp_path: Path) -> None:
    folder = _write(tmp_path, 5)
    assert folder == tmp_path / "step-5" and read_manifest(folder) == MANIFEST
    assert find(tmp_path) == (MANIFEST, [])
    assert not list(tmp_path.glob(".partial*"))


def test_newest_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        _write(tmp_path, step)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-999").write_text("a file, not a folder")
    assert steps_in(tmp_path) == [9, 10, 100]
    manifest, _ = find(tmp_path)
    assert manifest is not None and manifest.step == 100


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "manifest.json").unlink(), "never finished"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "manifest.json").write_text("[]"), "not a titanlite manifest"),
        (lambda f: (f / "shard").write_bytes(b"123"), "has 3 bytes, the manifest says 4"),
        (lambda f: (f / "shard").unlink(), "shard is missing"),
        (lambda f: _edit(f, format=99), "format 99"),
        (lambda f: _edit(f, files=None), "damaged"),
        (lambda f: _edit(f, surprise=1), "damaged"),
        (lambda f: _edit(f, step=4), "renamed"),
    ],
)
def test_damaged_newest_is_named_and_the_one_before_is_used(tmp_path: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    _write(tmp_path, 5)
    damage(_write(tmp_path, 6))
    manifest, passed = find(tmp_path)
    assert manifest is not None and manifest.step == 5
    assert len(passed) == 1 and reason in passed[0] and "step-6" in passed[0]


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_valid_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    folder = _write(tmp_path, 5)
    (folder / "marker").write_text("first")
    with pytest.raises(CheckpointError, match="not overwritten"):
        _write(tmp_path, 5)
    assert (folder / "marker").read_text() == "first"


def test_invalid_one_is_moved_aside_not_deleted(tmp_path: Path) -> None:
    folder = _write(tmp_path, 5)
    (folder / "shard").write_bytes(b"12")
    _write(tmp_path, 5)
    assert read_manifest(tmp_path / "step-5") == MANIFEST
    assert (tmp_path / "step-5.invalid-0" / "shard").read_bytes() == b"12"
    assert steps_in(tmp_path) == [5]


def test_demanded_step(tmp_path: Path) -> None:
    _write(tmp_path, 5)
    _write(tmp_path, 6)
    manifest, _ = find(tmp_path, 5)
    assert manifest is not None and manifest.step == 5
    with pytest.raises(CheckpointError, match=r"no step-7 \(steps there: 5, 6\)"):
        find(tmp_path, 7)
    assert find(tmp_path / "nowhere") == (None, [])
