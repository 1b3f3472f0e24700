"""Local saves, by real ranks, in folders that stand for the disks of nodes."""

from __future__ import annotations

import math
import pickle
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import PRINTS, RUN, flip, options
from tests.support.harness import Run, stepper
from tests.support.local_saves import part_of, parts_of, refused, same_end, straight, train_both
from tests.support.pool import Pools
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.sections import Checkpoint
from titanlite.contrib.resilience import reader, write
from titanlite.contrib.resilience.copies import keepers_of, places_of
from titanlite.contrib.resilience.folder import ABOUT
from titanlite.contrib.resilience.load import TieredChooser
from titanlite.contrib.resilience.manager import TieredCheckpointer
from titanlite.contrib.resilience.reader import Offer
from titanlite.dist.dist_env import DistEnv


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_goes_on_from_a_local_save_bit_for_bit(
    pool: Pools, tmp_path: Path, mode: str
) -> None:
    fields = {"async_mode": mode}
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1], **fields)
    found = pool(2).run(train_both, RUN, tmp_path, 10, [0, 1], 7, **fields)
    same_end(found, straight(pool, RUN, tmp_path, 2, 10))
    notice = "the local save of step 7 is taken: the newest shared checkpoint is of step 4"
    assert notice in found[0]["notices"]


def test_a_part_is_a_safetensors_file_of_what_the_rank_holds(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(train_both, RUN, tmp_path, 3, [0, 1])[0]["tensors"]
    parts = [load_file(part_of(tmp_path, rank, rank, 3)) for rank in (0, 1)]
    for name, whole in found.items():
        if name.endswith(".weight"):
            pieces = [part[f"model.{name}"] for part in parts]
            assert torch.equal(torch.cat(pieces), whole), name
    assert parts[0].keys() == parts[1].keys()


@pytest.mark.slow
def test_the_newest_two_stay(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    steps = sorted(path.name for path in tmp_path.glob("node-0/run-*/rank-0/*"))
    assert steps == ["step-6", "step-7"]


@pytest.mark.slow
def test_a_shared_checkpoint_is_taken_where_it_is_newer(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 8, [0, 1])
    found = pool(2).run(train_both, RUN, tmp_path, 9, [0, 1], 8)[0]
    notice = "the shared checkpoint of step 8 is taken: the newest local save is of step 7"
    assert notice in found["notices"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node", "bit", "manifest and part"])
def test_without_a_part_of_a_rank_an_older_save_is_taken(
    pool: Pools, tmp_path: Path, lost: str
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    part = part_of(tmp_path, 1, 1, 7)
    step = 6
    if lost == "node":
        shutil.rmtree(tmp_path / "node-1")
        step = 4
    elif lost == "bit":
        flip(part)
    else:
        shutil.rmtree(part.parent)
    found = pool(2).run(train_both, RUN, tmp_path, 10, [0, 1], step)
    same_end(found, straight(pool, RUN, tmp_path, 2, 10))
    passed = [line for line in found[0]["notices"] if "passed over: the local save" in line]
    assert "step 7: no node has the part of rank 1, nor a replica's" in passed[0]
    assert ("has changed since it was written" in passed[0]) == (lost == "bit")
    assert not part.is_file()


@pytest.mark.slow
def test_one_manifest_proves_a_save(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    part = part_of(tmp_path, 1, 1, 7)
    (part.parent / "manifest.json").unlink()
    found = pool(2).run(train_both, RUN, tmp_path, 7, [0, 1], 7)
    assert (part.parent / "manifest.json").is_file()
    same_end(found, straight(pool, RUN, tmp_path, 2, 7))


@pytest.mark.slow
def test_a_full_disk_keeps_no_run_from_its_start(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    (part_of(tmp_path, 1, 1, 7).parent / "manifest.json").unlink()
    found = pool(2).run(_start_on_a_full_disk, RUN, tmp_path)
    assert any("stays incomplete: [Errno 28]" in line for line in found[1]["said"])


def _start_on_a_full_disk(world: DistEnv, run: Run, folder: Path) -> dict[str, Any]:
    full_disk = OSError(28, "No space left on device")
    with patch.object(reader, "atomic_write", side_effect=full_disk):
        return train_both(world, run, folder, 7, [0, 1], 7)


@pytest.mark.slow
def test_a_part_without_a_whole_save_is_deleted(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    for rank in (0, 1):
        (part_of(tmp_path, rank, rank, 7).parent / "manifest.json").unlink()
    pool(2).run(train_both, RUN, tmp_path, 6, [0, 1], 6)
    assert parts_of(tmp_path, 0, 0, 7) == parts_of(tmp_path, 1, 1, 7) == []


HSDP = Run(RUN.tokens, RUN.labels, RUN.rates, replicas=2)


@pytest.mark.slow
def test_a_lost_node_gets_its_part_from_a_replica(pool: Pools, tmp_path: Path) -> None:
    nodes = [0, 0, 1, 1]
    pool(4).run(train_both, HSDP, tmp_path, 7, nodes)
    shutil.rmtree(tmp_path / "node-0")
    found = pool(4).run(train_both, HSDP, tmp_path, 10, nodes, 7)
    same_end(found, straight(pool, HSDP, tmp_path, 4, 10))
    assert (
        "2 ranks got their part of the local save from another node, as rank 0 from that of rank 2"
    ) in found[0]["notices"]
    assert part_of(tmp_path, 0, 0, 9).is_file()


@pytest.mark.slow
def test_a_damaged_part_is_replaced_by_that_of_a_replica(pool: Pools, tmp_path: Path) -> None:
    nodes = [0, 1, 2, 3]
    pool(4).run(train_both, HSDP, tmp_path, 6, nodes)
    part = part_of(tmp_path, 3, 3, 6)
    whole = part.read_bytes()
    flip(part)
    found = pool(4).run(train_both, HSDP, tmp_path, 7, nodes, 6)
    same_end(found, straight(pool, HSDP, tmp_path, 4, 7))
    assert part.read_bytes() == whole
    assert (part.parent / "manifest.json").is_file()


@pytest.mark.slow
def test_without_replicas_no_part_of_another_rank_is_taken(pool: Pools, tmp_path: Path) -> None:
    nodes = [0, 0, 1, 1]
    pool(4).run(train_both, RUN, tmp_path, 7, nodes)
    shutil.rmtree(tmp_path / "node-0")
    pool(4).run(train_both, RUN, tmp_path, 7, nodes, 4)


@pytest.mark.slow
def test_ranks_that_changed_their_nodes_get_their_own_parts(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    found = pool(2).run(train_both, RUN, tmp_path, 10, [1, 0], 7)
    same_end(found, straight(pool, RUN, tmp_path, 2, 10))
    again = pool(2).run(train_both, RUN, tmp_path, 11, [1, 0], 10)
    same_end(again, straight(pool, RUN, tmp_path / "more", 2, 11))
    assert not [line for line in again[0]["notices"] if "got their part" in line]


@pytest.mark.slow
def test_ranks_of_one_node_share_a_folder(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 0])
    found = pool(2).run(train_both, RUN, tmp_path, 10, [0, 0], 7)
    same_end(found, straight(pool, RUN, tmp_path, 2, 10))
    steps = sorted(path.name for path in tmp_path.glob("node-0/run-*/rank-1/*"))
    assert steps == ["step-10", "step-9"]


@pytest.mark.slow
def test_a_save_of_an_abandoned_past_never_comes_back(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    away = tmp_path / "away"
    shutil.move(tmp_path / "node-1", away)
    # From step 4 on it trains again, and is stopped earlier.
    pool(2).run(train_both, RUN, tmp_path, 5, [0, 1], 4)
    back = next(away.glob("run-*/rank-1/step-7"))
    target = next(tmp_path.glob("node-1/run-*/rank-1"))
    shutil.copytree(back, target / "step-7")
    pool(2).run(train_both, RUN, tmp_path, 6, [0, 1], 5)


@pytest.mark.slow
def test_an_older_step_by_load_step_drops_newer_local_saves(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    pool(2).run(train_both, RUN, tmp_path, 4, [0, 1], 4, load_step=4)
    pool(2).run(train_both, RUN, tmp_path, 5, [0, 1], 4)


@pytest.mark.slow
def test_other_ranks_take_the_shared_checkpoint(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    found = pool(1).run(train_both, RUN, tmp_path, 7, [0], 4)[0]
    reason = "it has the parts of 2 ranks, and this run has 1"
    assert any(reason in line for line in found["notices"])


@pytest.mark.slow
def test_other_degrees_take_the_shared_checkpoint(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    run = Run(RUN.tokens, RUN.labels, RUN.rates, replicas=2)
    found = pool(2).run(train_both, run, tmp_path, 7, [0, 1], 4)[0]
    assert any("other degrees divided its tensors" in line for line in found["notices"])


@pytest.mark.slow
def test_runs_in_one_local_folder_do_not_mix(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 3, [0, 1])
    shutil.copytree(tmp_path / "shared", tmp_path / "copy" / "shared")
    for node in ("node-0", "node-1"):
        (tmp_path / "copy" / node).symlink_to(tmp_path / node)
    pool(2).run(train_both, RUN, tmp_path / "copy", 1, [0, 1], 0)
    shutil.rmtree(tmp_path / "shared")
    pool(2).run(train_both, RUN, tmp_path, 1, [0, 1], 0)


def test_a_fresh_start_is_refused_beside_local_saves(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 3, [0, 1])
    text = pool(2).run(refused, RUN, tmp_path, 4, [0, 1], start="fresh")[0]
    assert f'checkpoint.start = "fresh", but {tmp_path}/node-0/run-' in text


@pytest.mark.slow
def test_without_any_usable_save_the_run_begins_anew(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 3, [0, 1])
    shutil.rmtree(tmp_path / "node-1")
    found = pool(2).run(train_both, RUN, tmp_path, 2, [0, 1], 0)[0]
    assert any("no node has the part of rank 1" in line for line in found["said"])
    text = pool(2).run(refused, RUN, tmp_path / "new", 2, [0, 1], start="resume")[0]
    assert "has no valid checkpoint" in text


@pytest.mark.slow
@pytest.mark.parametrize("file", ["part", "manifest"])
def test_a_local_save_that_fails_ends_nothing_and_keeps_no_space(
    pool: Pools, tmp_path: Path, file: str
) -> None:
    found = pool(2).run(_train_with_full_disk, RUN, tmp_path, file)[0]
    assert any("no local save was written: rank 1" in line for line in found["said"])
    assert [path.name for path in tmp_path.glob("node-*/run-*/rank-*/step-*")] == []
    pool(2).run(train_both, RUN, tmp_path, 5, [0, 1], 4)


def _train_with_full_disk(world: DistEnv, run: Run, folder: Path, file: str) -> dict[str, Any]:
    name = {"part": "write_part", "manifest": "publish"}[file]
    real = getattr(write, name)

    def full_disk(*arguments: Any) -> Any:
        if world.rank == 1:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with patch.object(write, name, full_disk):
        return train_both(world, run, folder, 4, [0, 1])


def test_a_folder_that_cannot_be_made_is_told_at_the_start(pool: Pools, tmp_path: Path) -> None:
    (tmp_path / "node-1").write_text("a file")
    text = pool(2).run(refused, RUN, tmp_path, 1, [0, 1])[0]
    assert "rank 1: checkpoint.local_folder:" in text
    assert "cannot be made" in text


@pytest.mark.slow
def test_a_rollback_passes_over_a_suspect_local_save(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    steps = pool(2).run(_go_back, RUN, tmp_path, {7: "it is suspect"})
    assert steps == [6, 6]
    assert parts_of(tmp_path, 1, 1, 7) == []
    pool(2).run(train_both, RUN, tmp_path, 6, [0, 1], 6)


@pytest.mark.slow
def test_a_rollback_takes_the_newest_local_save(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    # The shared one of step 4 is suspect, but not the newest.
    assert pool(2).run(_go_back, RUN, tmp_path, {4: "it is suspect"}) == [7, 7]
    assert (tmp_path / "shared" / "step-4").is_dir()


def _go_back(world: DistEnv, run: Run, folder: Path, suspects: dict[int, str]) -> int:
    model, optimizer, _ = stepper(world, run, loss_function=run.builder(world).loss())
    local = folder / f"node-{world.rank}"
    section = options(folder / "shared", local_folder=str(local), local_interval=1)
    saver = TieredCheckpointer(section, world, PRINTS)
    try:
        saver.load(model, optimizer)
        return saver.load_newest(model, optimizer, lambda step: suspects.get(step, "")).step
    finally:
        saver.close()


@pytest.mark.slow
def test_a_clock_that_went_back_does_not_hide_newer_saves(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    pool(2).run(_train_in_the_past, RUN, tmp_path, 9, 7)
    pool(2).run(train_both, RUN, tmp_path, 9, [0, 1], 9)


def _train_in_the_past(
    world: DistEnv, run: Run, folder: Path, last: int, expected_step: int
) -> dict[str, Any]:
    real = time.time
    with patch.object(time, "time", lambda: real() - 1e6):
        return train_both(world, run, folder, last, [0, 1], expected_step)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_disk_that_is_lost_in_mid_run_ends_nothing(
    pool: Pools, tmp_path: Path, mode: str
) -> None:
    found = pool(2).run(_train_until_a_disk_is_lost, RUN, tmp_path, mode)[0]
    problems = [line for line in found["said"] if "no local save was written: rank 1" in line]
    assert len(problems) == 2, "of steps 6 and 7"
    same_end([found], straight(pool, RUN, tmp_path, 2, 7)[:1])


def _train_until_a_disk_is_lost(
    world: DistEnv, run: Run, folder: Path, mode: str
) -> dict[str, Any]:
    real = TieredCheckpointer.save_local

    def save_local(saver: TieredCheckpointer, step: int, *more: Any) -> None:
        if step == 6 and world.rank == 1:
            saver.wait_for_local()
            shutil.rmtree(saver.local.root)
            saver.local.root.write_text("no folder any more")
        real(saver, step, *more)

    with patch.object(TieredCheckpointer, "save_local", save_local):
        return train_both(world, run, folder, 7, [0, 1], async_mode=mode)


@pytest.mark.slow
def test_a_lost_node_gets_its_parts_from_the_copies_on_the_next(
    pool: Pools, tmp_path: Path
) -> None:
    nodes = [0, 0, 1, 1]
    pool(4).run(train_both, RUN, tmp_path, 7, nodes, local_copies=1)
    shutil.rmtree(tmp_path / "node-0")
    found = pool(4).run(train_both, RUN, tmp_path, 10, nodes, 7, local_copies=1)
    same_end(found, straight(pool, RUN, tmp_path, 4, 10))
    assert any(line.startswith("2 ranks got their part") for line in found[0]["notices"])
    kept = {path.parent.name for path in tmp_path.glob("node-1/run-*/copy-*/step-*")}
    assert kept == {"copy-0", "copy-1"}
    assert len(list(tmp_path.glob("node-0/run-*/copy-2/step-*"))) == 2


@pytest.mark.slow
def test_copies_are_the_same_bytes(pool: Pools, tmp_path: Path) -> None:
    pool(4).run(train_both, RUN, tmp_path, 3, [0, 0, 1, 2], local_copies=2)
    parts = list(tmp_path.glob("node-*/run-*/*/step-3/*.safetensors"))
    assert len(parts) == 12
    for rank in range(4):
        (own,) = tmp_path.glob(f"node-*/run-*/rank-{rank}/step-3/*.safetensors")
        copies = list(tmp_path.glob(f"node-*/run-*/copy-{rank}/step-3/*.safetensors"))
        assert len(copies) == 2
        assert len({copy.parts[-5] for copy in copies} | {own.parts[-5]}) == 3
        assert {copy.read_bytes() for copy in copies} == {own.read_bytes()}


@pytest.mark.slow
def test_a_damaged_part_and_a_damaged_copy_make_an_older_save_the_newest(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1], local_copies=1)
    (copied,) = tmp_path.glob("node-1/run-*/copy-0/step-7/*.safetensors")
    flip(part_of(tmp_path, 0, 0, 7))
    flip(copied)
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1], 6, local_copies=1)


@pytest.mark.slow
def test_a_copy_that_cannot_be_kept_does_not_stop_the_save(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 1, [0, 1], local_copies=1)
    (root,) = tmp_path.glob("node-1/run-*")
    shutil.rmtree(root / "copy-0")
    (root / "copy-0").write_text("no folder")
    found = pool(2).run(train_both, RUN, tmp_path, 2, [0, 1], 1, local_copies=1)
    assert any("no copy of the part of rank 0 is kept" in line for line in found[1]["said"])
    pool(2).run(train_both, RUN, tmp_path, 2, [0, 1], 2)


def test_on_one_node_there_is_no_copy(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(train_both, RUN, tmp_path, 2, [0, 0], local_copies=1)
    assert list(tmp_path.glob("node-0/run-*/copy-*")) == []
    assert found[0]["tensors"]


@pytest.mark.parametrize(
    ("places", "number", "keepers"),
    [
        ("aabb", 1, [[2], [3], [0], [1]]),
        ("abab", 1, [[1], [0], [3], [2]]),
        ("aab", 1, [[2], [2], [0]]),
        ("abc", 2, [[1, 2], [2, 0], [0, 1]]),
        ("abc", 5, [[1, 2], [2, 0], [0, 1]]),
        ("aa", 1, [[], []]),
    ],
)
def test_the_next_nodes_keep_copies(places: str, number: int, keepers: list[list[int]]) -> None:
    assert keepers_of(places, number) == keepers


def test_several_disks_of_a_node_keep_no_copies_of_each_other() -> None:
    found = [("a", 1, 5), ("a", 2, 5), ("b", 1, 5), ("b", 2, 5)]
    assert keepers_of(places_of(found), 1) == [[2], [3], [0], [1]]
    assert keepers_of(places_of(found[:2]), 1) == [[1], [0]]


@pytest.mark.slow
def test_a_damaged_manifest_is_replaced_where_another_rank_has_it(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    manifest = part_of(tmp_path, 1, 1, 7).parent / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b'"world_size": 2', b'"world_size": 3'))
    found = pool(2).run(train_both, RUN, tmp_path, 7, [0, 1], 7)[0]
    assert any("manifest.json is damaged" in line for line in found["notices"])
    assert manifest.read_bytes() == whole


def test_a_nan_in_a_callbacks_state_leaves_a_save_what_it_is() -> None:
    """Each rank gets its own copy of the choice, in which a NaN is unequal."""
    state = {"best": math.nan, ABOUT: {"save": "0" * 16, "layout": "", "line": ""}}
    manifest = Manifest(1, {}, {}, {}, state, {}, 1, 0.0, {})
    chooser = TieredChooser(Checkpoint(), {}, {}, offers=[Offer(manifest, ())])
    assert chooser.offer_of(pickle.loads(pickle.dumps(manifest))) is chooser.offers[0]
    assert chooser.offer_of(replace(manifest, train={})) is None
