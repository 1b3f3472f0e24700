"""What counts as a checkpoint, and how one is published."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from titanlite.checkpoint.integrity import digest_of
from titanlite.checkpoint.manifest import (
    FORMAT,
    REASON,
    CheckpointError,
    Manifest,
    find,
    is_valid,
    publish,
    read_manifest,
    steps_in,
)
from titanlite.checkpoint.shelf import remove, shelf

MANIFEST = Manifest(
    step=5,
    fingerprints={"model": "m"},
    tensors={"model.w": ["float32", [2]]},
    files={"shard": 4},
    hashes={"shard": digest_of(b"1234")},
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
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "cannot be read: maximum recursion depth"),
        (lambda f: _edit(f, config=functools.reduce(lambda x, _: [x], range(400), [])), "not a titanlite manifest"),
        (lambda f: _edit(f, train={"next_sequence": 41}), "is damaged: its contents have the hash"),
        (lambda f: _edit(f, digest=None), "is damaged: its contents have the hash"),
        (lambda f: _edit(f, format=1), "it cannot be of format 1"),
        (lambda f: _edit(f, format=0), "it cannot be of format 0"),
        (lambda f: sign(f, files=None), "files is not dict[str, int]"),
        (lambda f: sign(f, fingerprints=[]), "fingerprints is not dict[str, str]"),
        (lambda f: sign(f, fingerprints={"model": 1}), "fingerprints is not dict[str, str]"),
        (lambda f: sign(f, train=[]), "train is not dict[str, Any]"),
        (lambda f: sign(f, step=6.0), "step is not int"),
        (lambda f: sign(f, world_size=True), "world_size is not int"),
        (lambda f: sign(f, weights_only="no"), "weights_only is not bool"),
        (lambda f: sign(f, validation_loss=float("nan")), "validation_loss is not float | None"),
        (lambda f: sign(f, created=1e300), "created = 1e+300 is no time"),
        (lambda f: sign(f, created=10**400), "is damaged"),
        (lambda f: sign(f, tensors={"w": ["float32", [2.5]]}), "the tensor w has no type and shape"),
        (lambda f: sign(f, tensors={"w": ["float32"]}), "the tensor w has no type and shape"),
        (lambda f: sign(f, files={"../shard": 4}), "is no file of it"),
        (lambda f: sign(f, hashes={}), "not every file has a hash"),
        (lambda f: sign(f, hashes={"shard": "crc32:1234"}), "unknown hash 'crc32'"),
        (lambda f: sign(f, hashes={"shard": "sha256:1234"}), "is no digest"),
        (lambda f: sign(f, hashes={"shard": "xxh3:" + 64 * "0"}), "is no digest"),
        (lambda f: sign(f, surprise=1), "damaged"),
        (lambda f: sign(f, step=4), "renamed"),
    ],
)
def test_damaged_newest_is_named_and_the_one_before_is_used(tmp_path: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    _write(tmp_path, 5)
    damage(_write(tmp_path, 6))
    manifest, passed = find(tmp_path)
    assert manifest is not None and manifest.step == 5
    assert len(passed) == 1 and reason in passed[0] and "step-6" in passed[0]


def test_one_of_a_newer_format_is_neither_passed_over_nor_moved(tmp_path: Path) -> None:
    """Its run would lose steps in silence, and the checkpoint its name."""
    _write(tmp_path, 5)
    _edit(_write(tmp_path, 6), format=FORMAT + 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-6").iterdir()}
    for use in (
        lambda: find(tmp_path),
        lambda: find(tmp_path, 6),
        lambda: is_valid(tmp_path / "step-6"),
        lambda: _write(tmp_path, 6),
        lambda: remove([tmp_path / "step-6"]),
    ):
        with pytest.raises(CheckpointError, match=f"step-6/manifest.json has format {FORMAT + 1}.* upgrade titanlite"):
            use()
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-6").iterdir()} == before
    assert steps_in(tmp_path) == [5, 6] and not list(tmp_path.glob("*.invalid*"))
    assert find(tmp_path, 5)[0] is not None
    states = {entry.folder.name: entry.state for entry in shelf(tmp_path)}
    assert (states["step-5"], states["step-6"]) == ("valid", "newer format")


def _edit(folder: Path, **changes: object) -> None:
    """Change a manifest as a bad disk would."""
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def sign(folder: Path, **changes: object) -> None:
    """Change a manifest as a wrong program would: its hash is right."""
    _edit(folder, **changes)
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("digest")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "digest": digest_of(text.encode())}))


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
    aside = tmp_path / "step-5.invalid-0"
    assert (aside / "shard").read_bytes() == b"12"
    assert (aside / REASON).read_text() == f"{folder / 'shard'} has 2 bytes, the manifest says 4\n"
    assert steps_in(tmp_path) == [5]


def test_demanded_step(tmp_path: Path) -> None:
    _write(tmp_path, 5)
    _write(tmp_path, 6)
    manifest, _ = find(tmp_path, 5)
    assert manifest is not None and manifest.step == 5
    with pytest.raises(CheckpointError, match=r"no step-7 \(steps there: 5, 6\)"):
        find(tmp_path, 7)
    assert find(tmp_path / "nowhere") == (None, [])


def test_layout_of_the_manifest_does_not_matter(tmp_path: Path) -> None:
    """Its hash is of what it says: an editor may indent it or end its lines otherwise."""
    path = _write(tmp_path, 5) / "manifest.json"
    path.write_bytes(json.dumps(json.loads(path.read_text()), indent=7).replace("\n", "\r\n").encode())
    assert read_manifest(tmp_path / "step-5") == MANIFEST


def test_known_damage_is_passed_over_and_moved_aside(tmp_path: Path) -> None:
    for step in (4, 5):
        _write(tmp_path, step)
    manifest, passed = find(tmp_path, known_bad={5: "a hash differs"})
    assert manifest is not None and manifest.step == 4 and passed == ["a hash differs"]
    with pytest.raises(CheckpointError, match="checkpoint.load_step = 5: a hash differs"):
        find(tmp_path, 5, known_bad={5: "a hash differs"})
    partial = tmp_path / ".partial-5"
    partial.mkdir()
    (partial / "shard").write_bytes(b"1234")
    publish(partial, tmp_path, MANIFEST, known_bad={5: "a hash differs"})
    assert (tmp_path / "step-5.invalid-0" / REASON).read_text() == "a hash differs\n"
    assert (tmp_path / "step-5.invalid-0").is_dir() and find(tmp_path) == (MANIFEST, [])


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    partial = tmp_path / ".partial-5"
    partial.mkdir()
    (partial / "manifest.json.part").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=f"{partial}/manifest.json.part cannot be written: No space left on"):
        publish(partial, tmp_path, MANIFEST)
    assert steps_in(tmp_path) == []
