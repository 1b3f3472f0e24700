"""A checkpoint that a user pins while it is being deleted: it stays whole, or the pin is
refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import MANIFEST, SHARD, names, options, write
from titanlite.checkpoint.manifest import PIN, find, steps_in
from titanlite.checkpoint.paths import AnyPath, StorePath
from titanlite.checkpoint.retention import (
    Deleter,
    delete,
    leftovers,
    prune,
    put_back_pinned,
    unpublish,
)
from titanlite.cli.checkpoint_folders import list_checkpoints, remove

#: Touches KEEP in checkpoint after checkpoint, a moment after each was named, and tells which
#: touches succeeded.
_TOUCHER = """
import random, sys, time
from pathlib import Path
for line in sys.stdin:
    pin = Path(line.strip())
    time.sleep(random.uniform(0.0, 0.002))
    try:
        pin.touch()
        print("touched", flush=True)
    except OSError:
        print("refused", flush=True)
"""


def _is_whole(root: AnyPath, step: int) -> bool:
    return (
        find(root, step)[0] == replace(MANIFEST, step=step)
        and (root / f"step-{step}" / "shard").read_bytes() == SHARD
    )


@pytest.mark.slow
def test_a_touch_that_succeeds_keeps_the_checkpoint(tmp_path: Path) -> None:
    """Another process touches KEEP while this one prunes, several hundred times."""
    answers = {"touched": 0, "refused": 0}
    # Adapted to the load, so that each side wins often: a busy machine wakes a process late.
    head_start = 0.0005
    with subprocess.Popen(
        [sys.executable, "-c", _TOUCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as toucher:
        assert toucher.stdin is not None
        assert toucher.stdout is not None
        for number in range(300):
            root = tmp_path / str(number)
            write(root, 1, 2, 3)
            toucher.stdin.write(f"{root / 'step-1' / PIN}\n")
            toucher.stdin.flush()
            time.sleep(head_start)
            deleter = Deleter()
            deleter.delete(prune(root, 3, options(root, keep_latest_k=2)))
            assert deleter.wait(300)
            answer = toucher.stdout.readline().strip()
            answers[answer] += 1
            head_start *= 0.8 if answer == "touched" else 1.25
            assert leftovers(root) == []
            if answer == "touched":
                assert _is_whole(root, 1) and names(root / "step-1") == [
                    PIN,
                    "manifest.json",
                    "shard",
                ], number
            else:
                assert steps_in(root) == [2, 3], number
        toucher.stdin.close()
    assert min(answers.values()) > 10, f"the race was not run: {answers}"


def _touch(folder: int) -> None:
    """Make KEEP in an open folder, as a machine does that knows the folder by an older name."""
    os.close(os.open(PIN, os.O_CREAT | os.O_WRONLY, dir_fd=folder))


def test_a_pin_through_the_old_name_of_a_renamed_folder_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems of a network find a folder by its old name for seconds after a rename."""
    write(tmp_path, 1, 2, 3)
    folder = os.open(tmp_path / "step-1", os.O_RDONLY)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        renamed = real(path, target)
        if path.name == "step-1":
            _touch(folder)
        return renamed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        assert prune(tmp_path, 3, options(tmp_path, keep_latest_k=2)) == []
    assert _is_whole(tmp_path, 1)
    assert leftovers(tmp_path) == []
    (tmp_path / "step-1" / PIN).unlink()
    marks = prune(tmp_path, 3, options(tmp_path, keep_latest_k=2))
    for way in (_touch, lambda folder: os.utime(PIN, dir_fd=folder)):
        with pytest.raises(FileNotFoundError):  # both ways in which `touch` tries
            way(folder)
    os.close(folder)
    assert [delete(mark) for mark in marks] == [True]
    assert names(tmp_path) == ["step-2", "step-3"]


def test_a_pin_between_two_steps_of_a_deletion_counts(
    root: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder before the rename, in a store after the manifest has gone and before the other
    objects go.
    """
    write(root, 1, 2, 3)
    kind, change = (Path, "rename") if isinstance(root, Path) else (StorePath, "unlink")
    real = getattr(kind, change)

    def pinning(path: Any, *arguments: Any, **more: Any) -> Any:
        if path.name == "step-1":
            (path / PIN).write_bytes(b"")
        found = real(path, *arguments, **more)
        if path.name == "manifest.json":
            (path.parent / PIN).write_bytes(b"")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(kind, change, pinning)
        assert prune(root, 3, options(root, keep_latest_k=2)) == []
    assert _is_whole(root, 1)
    assert leftovers(root) == []
    if isinstance(root, StorePath):
        (root / "step-1" / PIN).unlink()
        (mark,) = prune(root, 3, options(root, keep_latest_k=2))
        (root / "step-1" / PIN).write_bytes(b"")
        assert not delete(mark)
        assert _is_whole(root, 1)
        assert leftovers(root) == []


def test_rm_leaves_what_is_pinned_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads another checkpoint in full before it deletes, which may take minutes."""
    write(tmp_path, 1, 2, 3)
    from titanlite.cli import checkpoint_folders

    real = checkpoint_folders._must_leave_one

    def reading(root: AnyPath, going: Any) -> None:
        real(root, going)
        (root / "step-1" / PIN).write_bytes(b"")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folders, "_must_leave_one", reading)
        gone = remove([tmp_path / "step-1", tmp_path / "step-2"])
    assert [entry.folder.name for entry in gone] == ["step-2"]
    assert _is_whole(tmp_path, 1)
    assert names(tmp_path) == ["step-1", "step-3"]
    assert [entry.folder.name for entry in remove([tmp_path / "step-1"], force=True)] == ["step-1"]
    assert names(tmp_path) == ["step-3"], "--force deletes a pinned one"


def test_a_killed_deletion_of_a_pinned_one_is_undone(tmp_path: Path) -> None:
    """The process died between the rename and the look for KEEP."""
    write(tmp_path, 1, 2)
    (tmp_path / "step-1" / PIN).write_bytes(b"")
    leftover = tmp_path / ".deleted-step-1-0123abcd"
    (tmp_path / "step-1").rename(leftover)
    (entry,) = [entry for entry in list_checkpoints(tmp_path) if entry.folder == leftover]
    assert entry.description == "being deleted, pinned"
    put_back_pinned(tmp_path)
    assert _is_whole(tmp_path, 1)
    assert leftovers(tmp_path) == []
    (tmp_path / "step-1").rename(leftover)
    assert not delete(leftover) and _is_whole(tmp_path, 1), (
        "also where nothing looks before the deletion"
    )


def test_a_link_keep_of_the_user_counts(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    (tmp_path / "step-1" / PIN).symlink_to("wherever")
    assert unpublish(tmp_path / "step-1") is None
    assert _is_whole(tmp_path, 1)
