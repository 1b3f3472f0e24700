"""A checkpoint is read back before it gets its name: what went wrong on its way replaces nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.checkpoint import s3
from tests.checkpoint.runs import PRINTS, RUN
from tests.pool import Pools
from tests.training.harness import build_tiny
from titanlite.checkpoint import Checkpointer, CheckpointError, comparing
from titanlite.checkpoint.manifest import find, read_manifest, steps_in
from titanlite.checkpoint.place import Place, place
from titanlite.checkpoint.shelf import verify
from titanlite.parallel.dist_env import DistEnv

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]


def _damage(folder: Place) -> str:
    """One bit of what rank 1 has written, as long as before; the file's name."""
    file = next(path for path in folder.iterdir() if re.fullmatch(r"__1_(.*_)?0\.distcp", path.name))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    with file.open("wb") as stream:
        stream.write(data)
    return file.name


def _save_thrice(world: DistEnv, folder: str, mode: AsyncMode, verify_saves: bool) -> list[str]:
    """Saves of steps 1, 2 and 3 where only one stays; the second is damaged as soon as all have written. What each
    said."""
    model, optimizer, _ = build_tiny(world, RUN)
    plan = CheckpointPlan(enable=True, folder=folder, async_mode=mode, keep_latest_k=1, verify_saves=verify_saves)
    saver = Checkpointer(plan, world, PRINTS)
    written, said = saver._sizes_and_hashes, []
    try:
        for step in (1, 2, 3):

            def on_a_bad_disk(partial: Place, writer: Any, step: int = step) -> Any:
                found = written(partial, writer)
                if step == 2:
                    _damage(partial)
                return found

            saver._sizes_and_hashes = on_a_bad_disk  # type: ignore[method-assign]
            try:
                # A validated one needs none before it to stay.
                saver.save(step, model, optimizer, {}, validation_loss=1.0)
                saver.wait()
                said.append(f"saved: {world.broadcast(None) or steps_in(place(folder))}")
            except CheckpointError as error:
                said.append(str(error))
                said.append(f"left: {world.broadcast(None) or steps_in(place(folder))}")
    finally:
        saver.close()
    return said


def _check(said: list[list[str]], root: Place) -> None:
    for first, problem, left, last in said:
        assert (first, left, last) == ("saved: [1]", "left: [1]", "saved: [3]"), "the second replaced nothing"
        assert re.search(r"could not be read back: .*__1_\w*0\.distcp has changed since it was written: xxh3:", problem)
    assert len({tuple(part) for part in said}) == 1, "every rank learns of it"
    manifest, passed = find(root)
    assert manifest is not None and manifest.step == 3 and passed == []
    assert verify(root / "step-3").problems == ()


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_bit_that_changed_on_its_way(pool: Pools, tmp_path: Path, mode: AsyncMode) -> None:
    _check(pool(2).run(_save_thrice, str(tmp_path), mode, True), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"], "what could not be read back is cleared away"


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_in_an_object_store(pool: Pools, bucket: s3.Bucket, mode: AsyncMode) -> None:
    _check(
        pool(2).run(s3.there, bucket.environment, _save_thrice, bucket.root, mode, True),
        place(bucket.root),
    )


def test_without_it_lengths_are_compared(pool: Pools, tmp_path: Path) -> None:
    """What the key turns off; a load finds the damage all the same."""
    assert pool(2).run(_save_thrice, str(tmp_path), "disabled", False)[0] == ["saved: [1]", "saved: [2]", "saved: [3]"]


def _who_reads_what(world: DistEnv, folder: str) -> list[str]:
    model, optimizer, _ = build_tiny(world, RUN)
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder), world, PRINTS)
    read: list[str] = []
    real = comparing.check_files

    def check_files(folder: Place, manifest: Any, names: list[str], progress: Any) -> list[str]:
        read.extend(names)
        return real(folder, manifest, names, progress)

    comparing.check_files = check_files  # type: ignore[assignment]
    try:
        saver.save(1, model, optimizer, {})
    finally:
        comparing.check_files = real
        saver.close()
    return read


@pytest.mark.parametrize(("hosts", "each"), [(2, 1), (2, 8), (4, 8), (3, 2)])
def test_another_host_reads_what_one_wrote(hosts: int, each: int) -> None:
    ranks = hosts * each
    readers = [comparing.reader_of(writer, ranks) for writer in range(ranks)]
    assert sorted(readers) == list(range(ranks)), "as much for each"
    assert all(writer // each != reader // each for writer, reader in enumerate(readers))


def _cannot_read(world: DistEnv, folder: str, mode: AsyncMode) -> str:
    """What a save says of which rank 1 cannot read anything back."""
    model, optimizer, _ = build_tiny(world, RUN)
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder, async_mode=mode), world, PRINTS)
    real = comparing.check_files

    def check_files(*arguments: Any) -> list[str]:
        if world.rank == 1:
            raise RuntimeError("can't start new thread")
        return real(*arguments)

    comparing.check_files = check_files  # type: ignore[assignment]
    try:
        saver.save(1, model, optimizer, {})
        saver.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        comparing.check_files = real
        saver.close()
    return "saved"


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_rank_that_fails_alone_keeps_none_waiting(pool: Pools, tmp_path: Path, mode: AsyncMode) -> None:
    for said in pool(2).run(_cannot_read, str(tmp_path), mode):
        assert "rank 1 cannot read" in said and "can't start new thread" in said
    assert steps_in(tmp_path) == []


def test_all_is_read_once_and_by_another_rank(pool: Pools, tmp_path: Path) -> None:
    read = pool(4).run(_who_reads_what, str(tmp_path))
    names = [name for part in read for name in part]
    assert sorted(names) == sorted(read_manifest(tmp_path / "step-1").files), "each file once"
    for rank, part in enumerate(read):
        assert f"__{rank}_0.distcp" not in part, "what it wrote may be in this host's memory and nowhere else"
