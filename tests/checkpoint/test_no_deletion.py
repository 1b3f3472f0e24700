"""A run in a store that lets it list, read and write, and not delete."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.checkpoints import MANIFEST, SHARD, options
from titanlite.checkpoint.manifest import find, steps_in
from titanlite.checkpoint.retention import Deleter, begin, clear_leftovers, prune, publish
from titanlite.checkpoint.store_paths import StoreError, StorePath
from titanlite.runs.lock import LockedError, RunLock


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorePath:
    def refused(files: MemoryFileSystem, path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(MemoryFileSystem, "rm_file", refused)
    # Clients report nothing where they delete several objects.
    monkeypatch.setattr(MemoryFileSystem, "rm", lambda *_, **__: None)
    return StorePath(f"memory://{tmp_path.name}/run")


def test_saves_work_and_old_checkpoints_stay(locked: StorePath) -> None:
    deleter = Deleter()
    for step in (2, 4, 6):
        clear_leftovers(locked, step, deleter)
        folder: Any = begin(locked, step)
        (folder / "shard").write_bytes(SHARD)
        publish(folder, replace(MANIFEST, step=step, validation_loss=1.0))
        with pytest.raises(StoreError, match="access denied") if step > 2 else nullcontext():
            deleter.delete(prune(locked, step, options(locked, keep_latest_k=1)))
        assert deleter.wait(60)
        found = find(locked)
        assert found.manifest is not None
        assert (found.manifest.step, found.passed) == (step, [])
    assert steps_in(locked) == [2, 4, 6]


def test_a_lock_that_cannot_be_deleted_is_released_and_taken_over(locked: StorePath) -> None:
    for _ in range(2):
        with (
            RunLock(locked),
            pytest.raises(LockedError, match="belongs to a run that is alive"),
        ):
            RunLock(locked).__enter__()
