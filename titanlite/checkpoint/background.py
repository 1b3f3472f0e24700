"""Saves that are written while training goes on: a copy in host memory, then a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from titanlite.checkpoint.place import Place
from titanlite.parallel.dist_env import KEEPS_TIMEOUT

#: A save in the background holds nobody up, so its ranks may wait for each other for long.
_TIMEOUT = timedelta(hours=2)
#: Name of the thread, as `threading.enumerate` and reports of stalls show it.
THREAD = "titanlite-save"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """How a save in the background ended."""

    step: int
    folder: Place
    #: From the beginning of its copy to its end.
    seconds: float
    #: Why there is no checkpoint; "" when there is one.
    problem: str = ""


class BackgroundSave:
    """At most one save at a time, in a thread of this rank. All ranks make one together and call it alike.

    device: where the tensors are. overlap: the copy is made in the thread too, while the forward and backward pass of
    the next step go on, from a GPU into page-locked memory; call `await_copy` before the tensors change. Host memory
    for one copy of this rank's part of a checkpoint is taken with the first save and kept.
    """

    def __init__(self, device: torch.device, overlap: bool = False) -> None:
        self._overlap = overlap
        self._beside = overlap and device.type == "cuda"
        self._copied = Event()
        self._copied.set()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=self._beside,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,  # whoever copies has nothing to do meanwhile
            )
        )
        self._group = new_group(_TIMEOUT)
        self._thread: Thread | None = None
        self._outcome: Outcome | None = None
        self._news: deque[Outcome] = deque()

    @property
    def in_flight(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(
        self, step: int, folder: Place, tensors: Tensors, write: Callable[[Tensors, dist.ProcessGroup], None]
    ) -> None:
        """Copy the tensors, then call `write(copies, group)` in a thread. What it raises is in the outcome.

        When this returns, or with `overlap` when `await_copy` does, the copy is complete: the tensors may change.
        """
        assert not self.in_flight, "the save before this one has not been waited for"
        started = time.perf_counter()
        copy = self._copy_of(tensors)
        self._outcome = None
        staged = None if self._overlap else copy()
        self._copied.clear()

        def run() -> None:
            problem = ""
            try:
                try:
                    copies = copy() if staged is None else staged
                finally:
                    self._copied.set()
                write(copies, self._group)
            except BaseException as error:  # DCP's own is none of Exception's, and nobody is above to see it
                problem = str(error) or repr(error)
            self._outcome = Outcome(step, folder, time.perf_counter() - started, problem)
            self._news.append(self._outcome)

        self._thread = Thread(target=run, name=THREAD, daemon=True)
        self._thread.start()

    def _copy_of(self, tensors: Tensors) -> Callable[[], Tensors]:
        """What copies the tensors as they are now, also if it is called by another thread."""
        if not self._beside:
            return lambda: cast(Tensors, self._stager.stage(tensors))
        # The thread's copies run beside the kernels of the next step, but after those that were issued so far.
        stream, written = torch.cuda.Stream(), torch.cuda.Event()
        written.record()

        def copy() -> Tensors:
            with torch.cuda.stream(stream):
                stream.wait_event(written)
                copies = cast(Tensors, self._stager.stage(tensors))
            stream.synchronize()
            return copies

        return copy

    def await_copy(self) -> None:
        """Until the tensors of the latest save may change: at once, but for `overlap`."""
        self._copied.wait()

    def poll(self) -> Outcome | None:
        """The outcome of a save that has ended, each told once, in their order; None when there is no other."""
        return self._news.popleft() if self._news else None

    def wait(self) -> Outcome | None:
        """Until nothing is in flight; the outcome of the latest save."""
        if self._thread is not None:
            self._thread.join()
        return self._outcome

    def prepare(self, group: dist.ProcessGroup) -> None:
        """Before another save, on all ranks: wait for the last one, and meet anew when it has failed anywhere.

        group: by which they learn of that. A group whose communication has failed once is of no further use.
        """
        outcome = self.wait()
        failed: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(failed, outcome is not None and bool(outcome.problem), group)
        if any(failed):
            dist.destroy_process_group(self._group)
            self._group = new_group(_TIMEOUT)

    def close(self) -> None:
        """Release memory and group; of a save still in flight (the run failed) they are left to the process's end."""
        if not self.in_flight:
            self._stager.close()
            dist.destroy_process_group(self._group)


def new_group(timeout: timedelta) -> dist.ProcessGroup:
    """A group for what ranks agree on in a save, on the host, whose timeout nobody lowers. All ranks call it."""
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc=KEEPS_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group
