"""What a pool tells of a rank that dies or stands still, and what its jobs find."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.support.pool import RankFailure, RankPool
from titanlite.dist.dist_env import DistEnv
from titanlite.parallel.init import use_deterministic
from titanlite.utils import logger


def rank_of(world: DistEnv) -> int:
    return world.rank


def die(world: DistEnv) -> None:
    os.abort()


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    ranks = RankPool(1)
    yield ranks
    ranks.close()


def test_a_death_is_told_with_its_signal_its_stacks_and_the_jobs_before(ranks: RankPool) -> None:
    for _ in range(3):
        assert ranks.run(rank_of) == [0]
    with pytest.raises(RankFailure) as failure:
        ranks.run(die)
    told = str(failure.value)
    assert "rank 0:\nthe process died: SIGABRT" in told
    assert "in die\n" in told
    assert "abort + 0x" in told  # of C
    name = "tests/test_pool.py::test_a_death_is_told_with_its_signal_its_stacks_and_the_jobs_before"
    assert f"  rank_of in {name} (call), 3 times\n  die in {name} (call)" in told
    # The next job starts new processes.
    assert ranks.run(rank_of) == [0]


def answer_once(world: DistEnv) -> None:
    """Rank 1 stands still in a call of C."""
    if world.rank == 1:
        os.read(os.pipe()[0], 1)


def test_a_rank_that_gives_no_answer_tells_where_it_stands() -> None:
    pair = RankPool(2, after_an_answer=1)
    try:
        assert pair.run(rank_of) == [0, 1]
        begin = time.monotonic()
        with pytest.raises(RankFailure) as failure:
            pair.run(answer_once)
        assert time.monotonic() - begin < 60
        assert pair.run(rank_of) == [0, 1]
    finally:
        pair.close()
    told = str(failure.value)
    assert told.startswith("rank 1: no answer\n")
    # Twice, to tell a slow rank from one that is stuck, and at its end, then with calls of C.
    assert told.count("in answer_once\n") == 3
    assert told.count("threads, as the kernel sees them:") == 2
    assert "frame #1: " in told and "libc.so.6)\n" in told
    assert "  rank_of in tests/test_pool.py::test_a_rank_that_gives_no_answer" in told
    assert "  answer_once in " in told


class Seen(NamedTuple):
    """What a job finds of the process."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    handlers: int
    level: int
    drawn: tuple[float, float, float]
    dtype: torch.dtype
    device: torch.device
    precision: str
    threads: int
    flags: tuple[bool, ...]


def look(world: DistEnv) -> Seen:
    return Seen(
        dict(os.environ),
        os.getcwd(),
        list(sys.path),
        len(logger.handlers),
        logger.level,
        (random.random(), np.random.rand(), torch.rand(1).item()),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        (
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            gc.isenabled(),
            any("ignored" in str(one[1]) for one in warnings.filters),
        ),
    )


def change(world: DistEnv) -> Seen:
    os.environ["TITANLITE_OF_A_JOB"] = "1"
    del os.environ["MASTER_PORT"]
    os.chdir("/")
    sys.path.insert(0, "/of/a/job")
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.CRITICAL)
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    use_deterministic()
    gc.disable()
    warnings.filterwarnings("ignore", category=BytesWarning, message="ignored")
    with torch.device("cpu"):
        return look(world)


def test_a_job_finds_the_process_as_the_first_one_did(ranks: RankPool) -> None:
    (before,) = ranks.run(look)
    (changed,) = ranks.run(change)
    same = [name for name in Seen._fields if getattr(before, name) == getattr(changed, name)]
    assert same == ["device"]  # `look` is told where to draw
    assert not any(one == other for one, other in zip(before.flags, changed.flags, strict=True))
    assert ranks.run(look) == [before]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compile_for(world: DistEnv, sizes: range) -> None:
    compiled = torch.compile(double, backend="eager", fullgraph=True, dynamic=False)
    for size in sizes:
        compiled(torch.ones(size))
    torch._dynamo.config.recompile_limit += 9


@pytest.mark.slow
def test_a_job_may_compile_what_jobs_before_it_compiled_many_times(ranks: RankPool) -> None:
    limit = torch._dynamo.config.recompile_limit
    with pytest.raises(RankFailure, match="recompile_limit"):
        ranks.run(compile_for, range(2, limit + 4))
    ranks.run(compile_for, range(2, limit))
    ranks.run(compile_for, range(limit, 2 * limit - 2))
