"""Local saves, by real ranks, in folders that stand for the disks of nodes."""

from __future__ import annotations

import math
import pickle
import shutil
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
from titanlite.contrib.resilience import write
from titanlite.contrib.resilience.copies import Copies, keepers_of, places_of
from titanlite.contrib.resilience.folder import ABOUT
from titanlite.contrib.resilience.load import TieredChooser
from titanlite.contrib.resilience.manager import TieredCheckpointer
from titanlite.contrib.resilience.reader import Offer
from titanlite.dist.dist_env import DistEnv


def test_a_run_goes_on_from_a_local_save_bit_for_bit(pool: Pools, tmp_path: Path) -> None:
    fields = {"async_mode": "async"}
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
@pytest.mark.parametrize("lost", ["node", "bit"])
def test_without_a_part_of_a_rank_an_older_save_is_taken(
    pool: Pools, tmp_path: Path, lost: str
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    part = part_of(tmp_path, 1, 1, 7)
    step = 6
    if lost == "node":
        shutil.rmtree(tmp_path / "node-1")
        step = 4
    else:
        flip(part)
    found = pool(2).run(train_both, RUN, tmp_path, 10, [0, 1], step)
    same_end(found, straight(pool, RUN, tmp_path, 2, 10))
    passed = [line for line in found[0]["notices"] if "passed over: the local save" in line]
    assert "step 7: no node has the part of rank 1, nor a replica's" in passed[0]
    assert ("has changed since it was written" in passed[0]) == (lost == "bit")
    assert not part.is_file()


@pytest.mark.slow
def test_one_manifest_proves_a_save_and_is_written_where_it_lacks(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    manifest = part_of(tmp_path, 1, 1, 7).parent / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b'"world_size": 2', b'"world_size": 3'))
    found = pool(2).run(train_both, RUN, tmp_path, 7, [0, 1], 7)
    assert any("is damaged" in line for line in found[0]["notices"])
    assert manifest.read_bytes() == whole
    same_end(found, straight(pool, RUN, tmp_path, 2, 7))


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
def test_ranks_that_changed_their_nodes_get_their_own_parts(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    found = pool(2).run(train_both, RUN, tmp_path, 10, [1, 0], 7)
    same_end(found, straight(pool, RUN, tmp_path, 2, 10))


@pytest.mark.slow
def test_an_older_step_by_load_step_drops_newer_local_saves(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    pool(2).run(train_both, RUN, tmp_path, 4, [0, 1], 4, load_step=4)
    pool(2).run(train_both, RUN, tmp_path, 5, [0, 1], 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "nodes", "reason"),
    [
        (RUN, [0], "it has the parts of 2 ranks, and this run has 1"),
        (HSDP, [0, 1], "other degrees divided its tensors"),
    ],
    ids=["ranks", "degrees"],
)
def test_other_ranks_or_degrees_take_the_shared_checkpoint(
    pool: Pools, tmp_path: Path, run: Run, nodes: list[int], reason: str
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    found = pool(len(nodes)).run(train_both, run, tmp_path, 7, nodes, 4)[0]
    assert any(reason in line for line in found["notices"])


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
def test_a_local_save_that_fails_ends_nothing_and_keeps_no_space(
    pool: Pools, tmp_path: Path
) -> None:
    found = pool(2).run(_train_with_full_disk, RUN, tmp_path)
    told = [line for line in found[0]["said"] if "no local save was written: rank 1" in line]
    assert len(told) == 3, "of steps 1 to 3"
    same_end(found, straight(pool, RUN, tmp_path, 2, 4))
    assert [path.name for path in tmp_path.glob("node-*/run-*/rank-*/step-*")] == []
    pool(2).run(train_both, RUN, tmp_path, 5, [0, 1], 4)


def _train_with_full_disk(world: DistEnv, run: Run, folder: Path) -> dict[str, Any]:
    real = write.publish

    def full_disk(*arguments: Any) -> Any:
        if world.rank == 1:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with patch.object(write, "publish", full_disk):
        return train_both(world, run, folder, 4, [0, 1])


def test_a_folder_that_cannot_be_made_is_told_at_the_start(pool: Pools, tmp_path: Path) -> None:
    (tmp_path / "node-1").write_text("a file")
    text = pool(2).run(refused, RUN, tmp_path, 1, [0, 1])[0]
    assert "rank 1: checkpoint.local_folder:" in text
    assert "cannot be made" in text


@pytest.mark.slow
def test_a_rollback_takes_the_newest_save_that_is_not_suspect(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    assert pool(2).run(_go_back, RUN, tmp_path, {7: "it is suspect"}) == [6, 6]
    assert not parts_of(tmp_path, 1, 1, 7)
    assert (tmp_path / "shared" / "step-4").is_dir()
    pool(2).run(train_both, RUN, tmp_path, 6, [0, 1], 6)


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
def test_a_copy_that_cannot_be_kept_does_not_stop_the_save(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 1, [0, 1], local_copies=1)
    (root,) = tmp_path.glob("node-1/run-*")
    shutil.rmtree(root / "copy-0")
    (root / "copy-0").write_text("no folder")
    found = pool(2).run(train_both, RUN, tmp_path, 2, [0, 1], 1, local_copies=1)
    assert any("no copy of the part of rank 0 is kept" in line for line in found[1]["said"])
    pool(2).run(train_both, RUN, tmp_path, 2, [0, 1], 2)


def test_a_connection_that_breaks_in_mid_copy_ends_nothing(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(_train_until_a_copy_breaks, RUN, tmp_path)
    same_end(found, straight(pool, RUN, tmp_path, 2, 7))
    (told,) = [line for line in found[0]["said"] if "no local save was written" in line]
    assert "step 6: " in told
    assert parts_of(tmp_path, 1, 1, 6) == []
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1], 7, local_copies=1)


def _train_until_a_copy_breaks(world: DistEnv, run: Run, folder: Path) -> dict[str, Any]:
    """Steps to 7. In the save of step 6 rank 1 loses its connection, and rank 0 waits for it."""
    real = Copies.exchange

    def breaking(copies: Copies, part: Path, written: Any, step: int, *more: Any) -> list[Path]:
        if step == 6 and world.rank == 1:
            raise RuntimeError("Connection reset by peer")
        return real(copies, part, written, step, *more)

    with patch.object(Copies, "exchange", breaking):
        return train_both(world, run, folder, 7, [0, 1], async_mode="async", local_copies=1)


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


def test_a_nan_in_a_callbacks_state_leaves_a_save_what_it_is() -> None:
    """Each rank gets its own copy of the choice, in which a NaN is unequal."""
    state = {"best": math.nan, ABOUT: {"save": "0" * 16, "layout": "", "line": ""}}
    manifest = Manifest(1, {}, {}, {}, state, {}, 1, 0.0, {})
    chooser = TieredChooser(Checkpoint(), {}, {}, offers=[Offer(manifest, ())])
    assert chooser.offer_of(pickle.loads(pickle.dumps(manifest))) is chooser.offers[0]
    assert chooser.offer_of(replace(manifest, train={})) is None
