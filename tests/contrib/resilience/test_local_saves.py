"""Local saves, by real ranks, in folders that stand for the disks of nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import PRINTS, RUN, assert_equal, flip, options
from tests.support.harness import Run, build_tiny, state_of, stepper
from tests.support.pool import Pools
from tests.support.words import listening
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.contrib.resilience.copies import Copies, keepers_of
from titanlite.contrib.resilience.folder import LocalFolder
from titanlite.contrib.resilience.manager import TieredCheckpointer
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import check_config
from titanlite.run.config import RunConfig

#: Shared checkpoints come after these steps, local saves after all others.
SHARED = 4
_STRAIGHT: dict[tuple[int, int], list[dict[str, Any]]] = {}


def train_both(
    world: DistEnv,
    run: Run,
    folder: Path,
    last: int,
    nodes: Sequence[int],
    expected_step: int = 0,
    **fields: Any,
) -> dict[str, Any]:
    """Steps to `last`, from the newest save of both tiers. nodes: the node of each rank."""
    model, optimizer, take = stepper(world, run)
    torch.manual_seed(100 + world.rank)
    local = folder / f"node-{nodes[world.rank]}"
    section = options(folder / "shared", local_folder=str(local), local_interval=1, **fields)
    draws = []
    with listening() as said, closing(TieredCheckpointer(section, world, PRINTS)) as saver:
        loaded = saver.load(model, optimizer)
        start = loaded.step if loaded else 0
        for step in range(start + 1, last + 1):
            take(step, run.rates[step - 1], step - 1)
            draws.append(torch.rand(()).item())
            save = saver.save_local if step % SHARED else saver.save
            save(step, model, optimizer, {"next_sequence": 8 * step})
        saver.wait()
    assert start == expected_step, said
    notices = loaded.notices if loaded else []
    tensors = state_of(model, optimizer)
    return {"tensors": tensors, "draws": draws, "said": said, "notices": notices}


def refused(world: DistEnv, *arguments: Any, **fields: Any) -> str:
    try:
        train_both(world, *arguments, **fields)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it was not refused")


def straight(pool: Pools, run: Run, folder: Path, last: int) -> list[dict[str, Any]]:
    """Return the results of a run without a stop on two ranks of each replica; each is trained
    once.
    """
    key = (run.replicas, last)
    if key not in _STRAIGHT:
        ranks = 2 * run.replicas
        _STRAIGHT[key] = pool(ranks).run(train_both, run, folder / "straight", last, [0] * ranks)
    return _STRAIGHT[key]


def same_end(found: list[dict[str, Any]], straight: list[dict[str, Any]]) -> None:
    """The run ended as one without a stop, with the same random numbers on each rank."""
    for one, other in zip(found, straight, strict=True):
        assert_equal(one["tensors"], other["tensors"])
        assert one["draws"] == other["draws"][len(other["draws"]) - len(one["draws"]) :]


def parts_of(folder: Path, node: int, rank: int, step: int) -> list[Path]:
    return list(folder.glob(f"node-{node}/run-*/rank-{rank}/step-{step}/*.safetensors"))


def part_of(folder: Path, node: int, rank: int, step: int) -> Path:
    (path,) = parts_of(folder, node, rank, step)
    return path


@pytest.fixture
def two(pool: Pools, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Train on two ranks, each a node of its own, to a step, from the save of an earlier one."""

    def train(last: int, start: int = 0, nodes: Sequence[int] = (0, 1), **fields: Any) -> Any:
        return pool(2).run(train_both, RUN, tmp_path, last, nodes, start, **fields)

    return train


def test_a_run_goes_on_from_a_local_save_bit_for_bit(two, pool, tmp_path):
    two(7, async_mode="async")
    found = two(10, 7, async_mode="async")
    same_end(found, straight(pool, RUN, tmp_path, 10))
    notice = "the local save of step 7 is taken: the newest shared checkpoint is of step 4"
    assert notice in found[0]["notices"]


def test_a_part_is_a_safetensors_file_of_what_the_rank_holds(two, tmp_path):
    found = two(3)[0]["tensors"]
    parts = [load_file(part_of(tmp_path, rank, rank, 3)) for rank in (0, 1)]
    for name, whole in found.items():
        if name.endswith(".weight"):
            pieces = [part[f"model.{name}"] for part in parts]
            assert torch.equal(torch.cat(pieces), whole), name
    assert parts[0].keys() == parts[1].keys()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node", "bit"])
def test_without_a_part_of_a_rank_an_older_save_is_taken(two, pool, tmp_path, lost):
    two(7)
    part = part_of(tmp_path, 1, 1, 7)
    step = 6
    if lost == "node":
        shutil.rmtree(tmp_path / "node-1")
        step = 4
    else:
        flip(part)
    found = two(10, step)
    same_end(found, straight(pool, RUN, tmp_path, 10))
    passed = [line for line in found[0]["notices"] if "passed over: the local save" in line]
    assert "step 7: no node has the part of rank 1, nor a replica's" in passed[0]
    assert ("has changed since it was written" in passed[0]) == (lost == "bit")
    assert not part.is_file()


HSDP = Run(RUN.tokens, RUN.labels, RUN.rates, replicas=2)


@pytest.mark.slow
def test_a_lost_node_gets_its_part_from_a_replica(pool, tmp_path):
    nodes = [0, 0, 1, 1]
    pool(4).run(train_both, HSDP, tmp_path, 7, nodes)
    shutil.rmtree(tmp_path / "node-0")
    found = pool(4).run(train_both, HSDP, tmp_path, 10, nodes, 7)
    same_end(found, straight(pool, HSDP, tmp_path, 10))
    assert (
        "2 ranks got their part of the local save from another node, as rank 0 from that of rank 2"
    ) in found[0]["notices"]
    assert part_of(tmp_path, 0, 0, 9).is_file()


@pytest.mark.slow
def test_ranks_that_changed_their_nodes_get_their_own_parts(two, pool, tmp_path):
    two(7)
    found = two(10, 7, [1, 0])
    same_end(found, straight(pool, RUN, tmp_path, 10))


@pytest.mark.slow
def test_an_older_step_by_load_step_drops_newer_local_saves(two):
    two(7)
    two(4, 4, load_step=4)
    two(5, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "nodes", "reason"),
    [
        (RUN, [0], "it has the parts of 2 ranks, and this run has 1"),
        (HSDP, [0, 1], "other degrees divided its tensors"),
    ],
    ids=["ranks", "degrees"],
)
def test_other_ranks_or_degrees_take_the_shared_checkpoint(two, pool, tmp_path, run, nodes, reason):
    two(7)
    found = pool(len(nodes)).run(train_both, run, tmp_path, 7, nodes, 4)[0]
    assert any(reason in line for line in found["notices"])


@pytest.mark.slow
def test_runs_in_one_local_folder_do_not_mix(two, pool, tmp_path):
    two(3)
    shutil.copytree(tmp_path / "shared", tmp_path / "copy" / "shared")
    for node in ("node-0", "node-1"):
        (tmp_path / "copy" / node).symlink_to(tmp_path / node)
    pool(2).run(train_both, RUN, tmp_path / "copy", 1, [0, 1], 0)


def test_a_fresh_start_is_refused_beside_local_saves(two, pool, tmp_path):
    two(3)
    text = pool(2).run(refused, RUN, tmp_path, 4, [0, 1], start="fresh")[0]
    assert f'checkpoint.start = "fresh", but {tmp_path}/node-0/run-' in text


@pytest.mark.slow
def test_without_any_usable_save_the_run_begins_anew(two, pool, tmp_path):
    two(3)
    shutil.rmtree(tmp_path / "node-1")
    two(2)
    text = pool(2).run(refused, RUN, tmp_path / "new", 2, [0, 1], start="resume")[0]
    assert "has no valid checkpoint" in text


def test_a_folder_that_cannot_be_made_is_told_at_the_start(pool, tmp_path):
    (tmp_path / "node-1").write_text("a file")
    text = pool(2).run(refused, RUN, tmp_path, 1, [0, 1])[0]
    assert "rank 1: checkpoint.local_folder:" in text
    assert "cannot be made" in text


@pytest.mark.slow
def test_a_rollback_takes_the_newest_save_that_is_not_suspect(two, pool, tmp_path):
    two(7)
    assert pool(2).run(_go_back, tmp_path) == [6, 6]
    assert not parts_of(tmp_path, 1, 1, 7)
    assert (tmp_path / "shared" / "step-4").is_dir()
    two(6, 6)


def _saver(world: DistEnv, folder: Path) -> tuple[Any, Any, TieredCheckpointer]:
    model, optimizer, _ = build_tiny(world, RUN)
    local = folder / f"node-{world.rank}"
    section = options(folder / "shared", local_folder=str(local), local_interval=1)
    return model, optimizer, TieredCheckpointer(section, world, PRINTS)


def _go_back(world: DistEnv, folder: Path) -> int:
    model, optimizer, saver = _saver(world, folder)
    suspects = {7: "it is suspect"}
    with closing(saver):
        saver.load(model, optimizer)
        return saver.load_newest(model, optimizer, lambda step: suspects.get(step, "")).step


def test_a_connection_that_breaks_in_mid_copy_ends_nothing(two, pool, tmp_path):
    found = pool(2).run(_train_until_a_copy_breaks, tmp_path)
    same_end(found, straight(pool, RUN, tmp_path, 7))
    (told,) = [line for line in found[0]["said"] if "no local save was written" in line]
    assert "step 6: " in told
    assert parts_of(tmp_path, 1, 1, 6) == []
    two(7, 7, local_copies=1)


def _train_until_a_copy_breaks(world: DistEnv, folder: Path) -> dict[str, Any]:
    """Steps to 7. In the save of step 6 rank 1 loses its connection, and rank 0 waits for it."""
    real = Copies.exchange

    def breaking(copies: Copies, part: Path, written: Any, step: int, *more: Any) -> list[Path]:
        if step == 6 and world.rank == 1:
            raise RuntimeError("Connection reset by peer")
        return real(copies, part, written, step, *more)

    with patch.object(Copies, "exchange", breaking):
        return train_both(world, RUN, folder, 7, [0, 1], async_mode="async", local_copies=1)


@pytest.mark.parametrize(
    ("places", "number", "keepers"),
    [
        ("aabb", 1, [[2], [3], [0], [1]]),
        ("aab", 1, [[2], [2], [0]]),
        ("abc", 2, [[1, 2], [2, 0], [0, 1]]),
        ("aa", 1, [[], []]),
    ],
)
def test_the_next_nodes_keep_copies(places, number, keepers):
    assert keepers_of(places, number) == keepers


@pytest.mark.slow
def test_a_whole_save_of_an_abandoned_past_on_nodes_that_were_away_never_comes_back(two, tmp_path):
    two(7, local_copies=1)
    # On other nodes it goes on from step 4, and is stopped earlier.
    two(6, 4, [2, 3], local_copies=1)
    shutil.rmtree(tmp_path / "node-2")
    shutil.rmtree(tmp_path / "node-3")
    found = two(5, 4, local_copies=1)
    said = [line for line in found[0]["notices"] if "step 7" in line]
    assert any("later the run went on without it" in line for line in said)


@pytest.mark.slow
def test_a_run_that_went_on_without_local_saves_never_gets_old_ones_back(two, pool, tmp_path):
    two(7)
    pool(2).run(_start_without_local_saves, tmp_path)
    found = two(5, 4)[0]
    assert any("later the run went on without it" in line for line in found["notices"])


def _start_without_local_saves(world: DistEnv, folder: Path) -> None:
    """Resume from the shared checkpoint alone, and save nothing."""
    model, optimizer, _ = build_tiny(world, RUN)
    saver = Checkpointer(options(folder / "shared"), world, PRINTS)
    assert saver.load(model, optimizer) is not None
    saver.close()


@pytest.mark.slow
def test_a_deleted_shared_checkpoint_takes_local_saves_with_it(two, tmp_path):
    two(9)
    shutil.rmtree(tmp_path / "shared" / "step-8")
    found = two(5, 4)[0]
    said = [line for line in found["notices"] if "the shared checkpoint of step 8, which" in line]
    assert said[0].endswith("is gone")
    two(6, 5)


@pytest.mark.slow
def test_a_shared_checkpoint_that_is_damaged_takes_none_with_it(two, tmp_path):
    two(9)
    step = tmp_path / "shared" / "step-8"
    step.rename(step.with_name("step-8.invalid-0"))
    two(9, 9)


def test_a_local_save_of_a_later_titanlite_is_refused_and_stays(two, pool, tmp_path):
    two(3)
    manifest = part_of(tmp_path, 1, 1, 3).parent / "manifest.json"
    later = json.dumps({**json.loads(manifest.read_bytes()), "format": 99})
    manifest.write_text(later)
    text = pool(2).run(refused, RUN, tmp_path, 4, [0, 1])[0]
    assert "has format 99" in text
    assert manifest.read_text() == later


def test_unproven_saves_delete_nothing_and_a_proven_one_leaves_two(pool, tmp_path):
    left = pool(2).run(_save_without_proof, tmp_path)[0]
    assert left == [["step-1", "step-2", "step-3", "step-4"], ["step-4", "step-5"]]


def _save_without_proof(world: DistEnv, folder: Path) -> list[list[str]]:
    """Save four times without proof, then with; return what lay there before and after the last."""
    model, optimizer, saver = _saver(world, folder)
    found = []
    with closing(saver):
        for step in range(1, 6):
            saver.save_local(step, model, optimizer, {}, proven=step == 5)
            if step >= 4:
                found.append(sorted(path.name for path in saver.local.step(0).parent.iterdir()))
    return found


FOLDER = "--checkpoint.local_folder=/local/saves"


def _read(*flags: str) -> RunConfig:
    words = ["--job.config_file=debug_model.toml", "--checkpoint.enable_checkpoint", *flags]
    return check_config(words, 2, training=False)[1]


def test_an_interval_in_seconds_is_longer_than_any_number_of_steps():
    more = ["--checkpoint.interval_type=seconds", "--checkpoint.interval=10"]
    assert _read(FOLDER, *more).checkpoint.local_interval == 50


def test_folders_of_others_are_neither_read_nor_deleted(tmp_path):
    own, copied, *others = (
        tmp_path / name / "step-5" for name in ("rank-0", "copy-1", "rank-0.bak", "old-saves")
    )
    for folder in (own, copied, *others):
        folder.mkdir(parents=True)
    LocalFolder(tmp_path, 0).clear(())
    assert not own.exists() and not copied.exists()
    assert all(folder.is_dir() for folder in others)
