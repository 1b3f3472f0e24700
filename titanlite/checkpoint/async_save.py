"""Saves that are written during training: a copy in host memory, then a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.state_dict import Tensors, in_words, new_group
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.dist.local_parts import plain_local
from titanlite.optim.bad_step_errors import WeightsError

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint

#: Ranks may wait long for each other in an asynchronous save: it blocks no training.
_TIMEOUT = timedelta(hours=2)
#: Name of the thread in `threading.enumerate` and in reports of hangs.
THREAD = "titanlite-save"
#: Copies tensors into memory that stays unchanged.
Copy = Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class SaveOutcome:
    """The end of an asynchronous save."""

    step: int
    folder: AnyPath
    #: From the beginning of its check to its end.
    seconds: float
    #: Why there is no checkpoint; "" when there is one.
    problem: str


class AsyncSave:
    """At most one save at a time, in the one thread that this makes on its rank.

    All ranks make one together and make the same calls. The thread also checks and copies the
    tensors during the next passes: call `await_copy` before they change. The first save takes host
    memory for this rank's part of a checkpoint, and keeps it.

    pinned: copy from a GPU into page-locked memory, which is faster. timeout: ranks wait so long
    for each other.
    """

    def __init__(
        self, device: torch.device, pinned: bool = False, timeout: timedelta = _TIMEOUT
    ) -> None:
        # The thread's copies run beside the kernels of the next step, on their own stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = Event()
        self._copied.set()
        self._hook: RemovableHandle | None = None
        # Not DCP's DefaultStager: that of torch 2.11 can copy once only.
        self._stager = StateDictStager(pin_memory=pinned and device.type == "cuda")
        self._timeout = timeout
        #: None: this rank has left it.
        self._group: dist.ProcessGroup | None = new_group(timeout)
        self._idle = Event()
        self._idle.set()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        Thread(target=self._work, name=THREAD, daemon=True).start()
        self._outcome: SaveOutcome | None = None
        self._bad: WeightsError | None = None
        self._unreported: deque[SaveOutcome] = deque()

    def _work(self) -> None:
        while job := self._jobs.get():
            try:
                job()
            finally:
                # It holds the tensors.
                del job
                self._idle.set()

    @property
    def in_flight(self) -> bool:
        return not self._idle.is_set()

    def start(
        self,
        step: int,
        folder: AnyPath,
        work: Callable[[Copy, dist.ProcessGroup], None],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """After `prepare`, call in the thread `work(copy, group)`, which writes `copy(tensors)`.

        The optimizer waits until the tensors are copied. An error goes into the outcome;
        `raise_bad` raises a WeightsError, which `work` raises on all ranks or none.
        """
        started = time.perf_counter()
        self._copied.clear()
        if self._hook is not None:
            self._hook.remove()
        self._hook = optimizer.register_step_pre_hook(lambda *_: self.await_copy())
        if self._stream is not None:
            # For the update that was issued.
            self._stream.wait_stream(torch.cuda.current_stream())

        def copy(tensors: Tensors) -> Tensors:
            # An operator of DTensor would leave references to Python objects with this thread.
            # torch 2.13 releases them at its end, while other threads run Python.
            parts = {name: plain_local(tensor) for name, tensor in tensors.items()}
            copies = cast(Tensors, self._stager.stage(parts))
            self._copied.set()
            copied = dict(copies)
            for name, tensor in tensors.items():
                if isinstance(tensor, DTensor):
                    copied[name] = DTensor(copies[name], tensor._spec, requires_grad=False)
            return copied

        def run() -> None:
            problem = ""
            agreed = True
            try:
                assert self._group is not None, "prepare makes one"
                if self._stream is not None:
                    # A new thread starts on GPU 0 and its default stream. DCP would wait for that
                    # stream.
                    torch.cuda.set_device(self._stream.device)
                    torch.cuda.set_stream(self._stream)
                work(copy, self._group)
            except WeightsError as error:
                self._bad = error
                return
            except BaseException as error:
                # DCP's own is no Exception, and no caller would see it.
                problem = in_words(error)
                agreed = isinstance(error, CheckpointError)
            finally:
                self._copied.set()
            if not agreed:
                # Some ranks may not know of it, and wait: closed connections tell them.
                self._leave_group()
            self.report(step, folder, time.perf_counter() - started, problem)

        self._idle.clear()
        self._jobs.put(run)

    def report(self, step: int, folder: AnyPath, seconds: float, problem: str = "") -> None:
        """Let `poll` and `wait` return an outcome, also of a save in the foreground."""
        outcome = SaveOutcome(step, folder, seconds, problem)
        self._outcome = outcome
        self._unreported.append(outcome)

    def await_copy(self) -> None:
        """Wait until the tensors of the latest save may change."""
        self._copied.wait()

    def raise_bad(self) -> None:
        """After `await_copy` or `wait`: raise a WeightsError of the latest save, once, on all
        ranks.
        """
        bad = self._bad
        self._bad = None
        if bad is not None:
            raise bad

    def poll(self) -> SaveOutcome | None:
        """Return the outcome of a save that has ended, each once, in order, or None."""
        return self._unreported.popleft() if self._unreported else None

    def wait(self) -> SaveOutcome | None:
        """Wait until no save is in flight; return the latest outcome."""
        self._idle.wait()
        return self._outcome

    def prepare(self, group: dist.ProcessGroup) -> None:
        """Wait for the latest save, on all ranks, which agree in `group`.

        If it failed on any rank, make a new group: a failed one cannot be used again.
        """
        outcome = self.wait()
        self._outcome = None
        if any(gather_objects(outcome is not None and bool(outcome.problem), group)):
            self._leave_group()
            self._group = new_group(self._timeout)

    def close(self) -> None:
        """Release thread, memory and group; with a save in flight the end of the process does
        that.
        """
        if not self.in_flight:
            self._jobs.put(None)
            self._stager.close()
            self._leave_group()

    def _leave_group(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def async_save(config: Checkpoint, world: DistEnv) -> AsyncSave | None:
    """Return what saves in the background, if asked for. All ranks call it together."""
    if config.async_mode == "disabled":
        return None
    return AsyncSave(world.device, pinned=config.async_mode == "async_with_pinned_mem")
