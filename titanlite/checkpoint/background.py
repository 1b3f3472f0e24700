"""Saves that are written while training goes on: a copy in host memory, then a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from titanlite.parallel.world import PATIENT

#: A save in the background holds nobody up, so its ranks may wait for each other for long.
_TIMEOUT = timedelta(hours=2)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """How a save in the background ended."""

    step: int
    folder: Path
    #: From the beginning of its copy to its end.
    seconds: float
    #: Why there is no checkpoint; "" when there is one.
    problem: str = ""


class BackgroundSave:
    """At most one save at a time, in a thread of this rank. All ranks make one together and call it alike.

    pinned: copy into page-locked host memory, which is quicker from a GPU. Host memory for one copy of this rank's
    part of a checkpoint is taken with the first save and kept.
    """

    def __init__(self, pinned: bool) -> None:
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )
        self._group = _new_group()
        self._thread: Thread | None = None
        self._outcome: Outcome | None = None
        self._news: deque[Outcome] = deque()

    @property
    def in_flight(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(
        self, step: int, folder: Path, tensors: Tensors, write: Callable[[Tensors, dist.ProcessGroup], None]
    ) -> None:
        """Copy the tensors, then call `write(copies, group)` in a thread. What it raises is in the outcome.

        The copy is complete when this returns: the tensors may change.
        """
        assert not self.in_flight, "the save before this one has not been waited for"
        started = time.perf_counter()
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        self._outcome = None

        def run() -> None:
            problem = ""
            try:
                write(staged, self._group)
            except BaseException as error:  # DCP's own is none of Exception's, and nobody is above to see it
                problem = str(error) or repr(error)
            self._outcome = Outcome(step, folder, time.perf_counter() - started, problem)
            self._news.append(self._outcome)

        self._thread = Thread(target=run, name="titanlite-save", daemon=True)
        self._thread.start()

    def poll(self) -> Outcome | None:
        """The outcome of a save that has ended, each told once, in their order; None when there is no other."""
        return self._news.popleft() if self._news else None

    def wait(self) -> Outcome | None:
        """Until nothing is in flight; the outcome of the latest save."""
        if self._thread is not None:
            self._thread.join()
        return self._outcome

    def prepare(self) -> None:
        """Before another save, on all ranks: wait for the last one, and meet anew when it has failed anywhere.

        A group whose communication has failed once is of no further use.
        """
        outcome = self.wait()
        failed: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(failed, outcome is not None and bool(outcome.problem))
        if any(failed):
            dist.destroy_process_group(self._group)
            self._group = _new_group()

    def close(self) -> None:
        """Release memory and group; of a save still in flight (the run failed) they are left to the process's end."""
        if not self.in_flight:
            self._stager.close()
            dist.destroy_process_group(self._group)


def _new_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT, group_desc=PATIENT)
    assert isinstance(group, dist.ProcessGroup)
    return group
