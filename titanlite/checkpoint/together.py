"""What saving and loading share: ranks that agree, DCP's failures as ours, and DCP without its warning."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint.manifest import CheckpointError
from titanlite.parallel.dist_env import DistEnv

T = TypeVar("T")


def on_rank_0(world: DistEnv, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run on rank 0 only; every rank gets its result, or its error as a CheckpointError.

    group: of all ranks, by which they wait for it; None: the default one.
    """
    result: T | None = None
    problem: str | None = None
    if world.rank == 0:
        try:
            result = action()
        except (CheckpointError, OSError) as error:
            problem = str(error)
        except Exception as error:  # the other ranks are waiting for an answer, whatever happened here
            problem = repr(error)
    answer = [(result, problem)]
    dist.broadcast_object_list(answer, src=0, group=group, device=torch.device("cpu"))
    result, problem = cast("tuple[T, str | None]", answer[0])
    if problem is not None:
        raise CheckpointError(problem)
    return result


@contextlib.contextmanager
def named(doing: str) -> Iterator[None]:
    """DCP's failures as CheckpointError. They are a BaseException, which `except Exception` would miss."""
    try:
        yield
    except CheckpointException as error:
        failures = ((rank, failure[0]) for rank, failure in error.failures.items())
        told = (OSError, CheckpointError)
        causes = {f"rank {rank}: {cause if isinstance(cause, told) else repr(cause)}" for rank, cause in failures}
        raise CheckpointError(f"{doing} failed: {'; '.join(sorted(causes))}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without DCP's warning about a single process. Not for threads: filters are the whole process's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield
