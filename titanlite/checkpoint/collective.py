"""Steps that all ranks take together around a save or a load: work of rank 0 alone, and the comparison with hashes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint.index import INDEX
from titanlite.checkpoint.manifest import CheckpointError, Manifest, Progress, check_files
from titanlite.checkpoint.paths import AnyPath, StoreError
from titanlite.parallel.dist_env import KEEPS_TIMEOUT, DistEnv
from titanlite.utils import human_bytes, logger

#: Seconds between two log lines of a long comparison.
_LOG_SECONDS = 10.0
T = TypeVar("T")


def new_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make a gloo group of all ranks for agreements around a save; nobody lowers its timeout. All ranks call it."""
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc=KEEPS_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def on_rank_0(world: DistEnv, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run on rank 0 only; all ranks get its result, or its error as a CheckpointError.

    group: of all ranks, in which they wait; None: the default one.
    """
    result: T | None = None
    problem: str | None = None
    if world.rank == 0:
        try:
            result = action()
        except (CheckpointError, OSError) as error:
            problem = str(error)
        except Exception as error:  # the other ranks wait for an answer in any case
            problem = repr(error)
    answer = [(result, problem)]
    dist.broadcast_object_list(answer, src=0, group=group, device=torch.device("cpu"))
    result, problem = cast("tuple[T, str | None]", answer[0])
    if problem is not None:
        raise CheckpointError(problem)
    return result


@contextlib.contextmanager
def dcp_errors(action: str) -> Iterator[None]:
    """Turn DCP's failures into CheckpointErrors. They are a BaseException, which `except Exception` would miss."""
    try:
        yield
    except CheckpointException as error:
        failures = ((rank, failure[0]) for rank, failure in error.failures.items())
        plain = (OSError, CheckpointError)
        causes = {f"rank {rank}: {cause if isinstance(cause, plain) else repr(cause)}" for rank, cause in failures}
        raise CheckpointError(f"{action} failed: {'; '.join(sorted(causes))}") from error


def verify_before_load(folder: AnyPath, manifest: Manifest, world: DistEnv, every_byte: bool) -> str | None:
    """Return what is wrong with a checkpoint's content, the same on all ranks; None when nothing is.

    Each rank reads its share of the files, and the index, which all will use; without every_byte the index alone.

    Raises CheckpointError, on all of them, when one of them cannot read: that says nothing of the checkpoint.
    """
    names = share(manifest.files, world.rank, world.size) if every_byte else []
    if INDEX in manifest.files and INDEX not in names:
        names.append(INDEX)
    return _verify(folder, manifest, names, world, None)


def verify_after_save(
    folder: AnyPath, manifest: Manifest, writers: Mapping[str, int], world: DistEnv, group: dist.ProcessGroup
) -> str | None:
    """As `verify_before_load`, right after a save. writers: file → rank; group: in which all ranks agree."""
    names = [name for name, writer in writers.items() if reader_of(writer, world.size) == world.rank]
    return _verify(folder, manifest, names, world, group)


def share(files: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """Return the files that this rank reads so that all are read once: about equal bytes each. files: name → bytes."""
    return sorted(files, key=lambda name: (-files[name], name))[rank::ranks]


def reader_of(writer: int, ranks: int) -> int:
    """Return the rank that reads the files of `writer` back: on another host, if there is one.

    The writer's host may still have in memory what its disk has lost.
    """
    return (writer + ranks // 2) % ranks


def _verify(
    folder: AnyPath, manifest: Manifest, names: Sequence[str], world: DistEnv, group: dist.ProcessGroup | None
) -> str | None:
    problems: list[str] = []
    failure = ""
    try:
        problems = check_files(folder, manifest, names, _progress(folder, world))
    except StoreError as error:
        failure = f"rank {world.rank} cannot read {error}"
    except Exception as error:  # the others wait for this rank's answer in any case
        failure = f"rank {world.rank} cannot read {folder}: {error!r}"
    found = [(problems, failure)] * world.size
    dist.all_gather_object(found, (problems, failure), group)
    if failures := sorted(text for _, text in found if text):
        raise CheckpointError("; ".join(failures))
    all_problems = sorted({problem for part, _ in found for problem in part})
    more = f" (and {len(all_problems) - 1} more of its files)" if len(all_problems) > 1 else ""
    return all_problems[0] + more if all_problems else None


def _progress(folder: AnyPath, world: DistEnv) -> Progress:
    """Log the progress every ten seconds."""
    logged = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal logged
        if time.monotonic() - logged >= _LOG_SECONDS:
            logged = time.monotonic()
            part = " of this rank's part" if world.size > 1 else ""
            logger.info(f"comparing {folder} with its hashes: {human_bytes(done)} of {human_bytes(total)}{part}")

    return progress
