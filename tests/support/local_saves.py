"""Runs that save to shared and to local folders, on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import PRINTS, assert_equal, options
from tests.support.harness import Run, full, stepper
from tests.support.pool import Pools
from tests.support.words import listening
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.contrib.resilience.manager import TieredCheckpointer
from titanlite.dist.dist_env import DistEnv

#: Shared checkpoints come after these steps, local saves after all others.
SHARED = 4
_STRAIGHT: dict[tuple[int, int, int], list[dict[str, Any]]] = {}


def train_both(
    world: DistEnv,
    run: Run,
    folder: Path,
    last: int,
    nodes: Sequence[int],
    expected_step: int = 0,
    every: int = SHARED,
    **fields: Any,
) -> dict[str, Any]:
    """Steps to `last`, from the newest save of both tiers.

    nodes: the node of each rank. every: steps between shared checkpoints.
    """
    model, optimizer, take = stepper(world, run, loss_function=run.builder(world).loss())
    torch.manual_seed(100 + world.rank)
    local = folder / f"node-{nodes[world.rank]}"
    section = options(folder / "shared", local_folder=str(local), local_interval=1, **fields)
    saver = TieredCheckpointer(section, world, PRINTS)
    draws = []
    with listening() as said:
        try:
            loaded = saver.load(model, optimizer)
            start = loaded.step if loaded else 0
            for step in range(start + 1, last + 1):
                take(step, run.rates[step - 1], step - 1)
                draws.append(torch.rand(()).item())
                train = {"next_sequence": 8 * step}
                if step % every == 0:
                    saver.save(step, model, optimizer, train)
                else:
                    saver.save_local(step, model, optimizer, train)
            saver.wait()
        finally:
            saver.close()
    assert start == expected_step, said
    state = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            state[f"{name}.{kind}"] = full(value)
    weights = {name: full(parameter) for name, parameter in model.named_parameters()}
    notices = [] if loaded is None else loaded.notices
    tensors = {**weights, **state}
    return {"tensors": tensors, "draws": draws, "said": said, "notices": notices, "saver": section}


def refused(world: DistEnv, *arguments: Any, **fields: Any) -> str:
    try:
        train_both(world, *arguments, **fields)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it was not refused")


def straight(pool: Pools, run: Run, folder: Path, ranks: int, last: int) -> list[dict[str, Any]]:
    """Return the results of a run without a stop; each is trained once."""
    key = (run.replicas, ranks, last)
    if key not in _STRAIGHT:
        nodes = [0] * ranks
        _STRAIGHT[key] = pool(ranks).run(train_both, run, folder / "straight", last, nodes)
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
