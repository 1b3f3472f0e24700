"""A wish to stop that comes from outside: SIGTERM, SIGUSR1 (Slurm's `--signal`), Ctrl-C. All ranks act on it together.

    with GracefulStop() as stop:
        for step in range(1, steps + 1):
            train(step)
            if stop.agreed():  # one small all-reduce between the hosts
                save(step)
                break

A loop over `train_step` needs no collective of its own: give it `stop=stop.wanted`, and `FiniteGuard.watch` answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from titanlite import exit_codes
from titanlite.entry import report_code
from titanlite.utils import logger

if TYPE_CHECKING:
    import torch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOPPING = "stopping as soon as this step is done"
#: What comes sooner after the first is the same wish on another way: a scheduler signals torchrun and its workers.
_APART_SECONDS = 1.0
#: What a process that is to end at once gets for cleaning up. It may hang in a collective, where nothing interrupts it.
_UNWIND_SECONDS = 3.0

T = TypeVar("T")


class Preempted(BaseException):
    """The run was asked to stop and did. No `Exception`, like KeyboardInterrupt: nobody should take it for a fault.

    step: steps done. saved: nothing of them is lost. together: all ranks raise it at the same place.
    """

    def __init__(self, reason: str, step: int = 0, saved: bool = True, together: bool = False) -> None:
        super().__init__(reason)
        self.step, self.saved, self.together = step, saved, together

    @property
    def exit_code(self) -> int:
        return exit_codes.PREEMPTED if self.saved else exit_codes.PREEMPTED_UNSAVED


class _Arrivals:
    """Tells the second signal, which ends at once, from the first and its echoes."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None

    def is_second(self, number: int) -> bool:
        """Take note of a signal. True for Ctrl-C's second, of which torchrun makes a SIGTERM for its workers."""
        now = time.monotonic()
        if self.first is None:
            self.first = number, now
            return False
        insists = number == signal.SIGINT or (number == signal.SIGTERM and self.first[0] == signal.SIGINT)
        return insists and now - self.first[1] > _APART_SECONDS


class GracefulStop:
    """Turns signals into a wish, while the block runs; what they did before is restored afterwards.

    The handler sets a flag and nothing else; a thread says at once that the signal has come, even while the main thread
    is busy outside Python. A second Ctrl-C ends at once, by KeyboardInterrupt, or, if the main thread does not come to
    that within seconds, by exit code 130. Outside the main thread nothing is installed; only `request` makes a wish.

    Args:
        at_once: raise Preempted at the first signal, for the time before there is anything to save. May be changed
            while the block runs.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        #: What is said when a signal comes: when the loop stops, and after that what will be saved.
        self.when = STOPPING
        self.notice = ""
        #: A signal has come, also where the main thread is busy outside Python and has not taken note of it.
        self.heard = False
        self._arrivals = _Arrivals()
        self._requested = ""
        self._before: dict[int, Any] = {}
        self._mask: set[signal.Signals | int] = set()
        self._pipe: tuple[int, int] | None = None
        self._old_wakeup = -1
        self._left = threading.Event()

    @property
    def wanted(self) -> bool:
        """Whether this rank was asked to stop. Others may not know of it: see `agreed`."""
        return self._arrivals.first is not None or bool(self._requested)

    @property
    def reason(self) -> str:
        """What asked this rank: a signal's name, or the words given to `request`."""
        if self._arrivals.first is not None:
            return signal.Signals(self._arrivals.first[0]).name
        return self._requested

    def request(self, reason: str) -> None:
        """Ask to stop from within the program, on one rank or all."""
        self._requested = self._requested or reason

    def agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all, which call it together.

        A small all-reduce between the hosts; no device is waited for.
        """
        return _Vote(self.wanted).result()

    def until_agreed(self, items: Iterable[T], void: Callable[[], bool] | None = None) -> Interruptible[T]:
        """`items`, up to one after all ranks know that one was asked to stop. Each rank must bring as many.

        void: whether the latest item of this rank stands for one that it does not have, so that the items count as
        broken off even if that was the last.
        """
        return Interruptible(self, items, void)

    def who(self) -> str:
        """Which ranks were asked by what, as "SIGTERM on every rank". Call it on all ranks together."""
        import torch.distributed as dist

        reasons = [self.reason]
        if dist.is_initialized():
            reasons = [""] * dist.get_world_size()
            dist.all_gather_object(reasons, self.reason)
        asked = {reason: [r for r, other in enumerate(reasons) if other == reason] for reason in reasons if reason}
        parts = []
        for reason, ranks in asked.items():
            where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}" + " and more" * (len(ranks) > 8)
            parts.append(reason if len(ranks) == len(reasons) == 1 else f"{reason} on {where}")
            if len(ranks) == len(reasons) > 1:
                parts[-1] = f"{reason} on every rank"
        return "; ".join(parts)

    @contextlib.contextmanager
    def shielding_children(self) -> Iterator[None]:
        """Processes started inside never see these signals, which torchrun sends to all that its worker has started.

        For the compilers that `torch.compile` calls: without one the step cannot end. Signals still reach this process.
        """
        if self._pipe is None:
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a new process inherits it; the thread has its own
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._left.clear()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        # A daemon, which never keeps the process from ending.
        threading.Thread(target=self._speak, args=(self._pipe[0],), name="titanlite-signals", daemon=True).start()
        # Written by the C handler itself, whatever the main thread does.
        self._old_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in SIGNALS:
            old = signal.getsignal(number)
            # A shell ignores SIGINT for jobs in its background: a Ctrl-C there means another job.
            if number == signal.SIGINT and old == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipe is None:
            return
        self._left.set()
        for number, old in self._before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        self._before.clear()
        signal.set_wakeup_fd(self._old_wakeup, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        with contextlib.suppress(OSError):
            os.write(self._pipe[1], b"\0")  # the thread closes its end
        os.close(self._pipe[1])
        self._pipe = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._arrivals.is_second(number):
            raise KeyboardInterrupt
        if self.at_once:
            raise Preempted(f"{signal.Signals(number).name} before the first step")

    def _speak(self, pipe: int) -> None:
        """The thread. It keeps its own account of what arrived: the main thread may not come to handle it for long."""
        arrivals = _Arrivals()
        try:
            while (byte := os.read(pipe, 1)) not in (b"", b"\0"):
                if byte[0] not in SIGNALS:
                    continue
                name = signal.Signals(byte[0]).name
                self.heard = True
                first = arrivals.first is None
                if arrivals.is_second(byte[0]):
                    self._leave_soon(f"{name} again: ending at once", exit_codes.INTERRUPTED)
                elif first and self.at_once:
                    self._leave_soon(f"{name}: ending before the first step", exit_codes.PREEMPTED)
                elif first:
                    # Usually all ranks get one. Where a rank gets it alone, rank 0 tells of it at the end of the step.
                    level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.INFO
                    logger.log(level, f"{name}: {self.when}{self.notice}")
        finally:
            os.close(pipe)

    def _leave_soon(self, words: str, code: int) -> None:
        logger.warning(words)
        if not self._left.wait(_UNWIND_SECONDS):
            report_code(code)
            os._exit(code)


class Interruptible(Generic[T]):
    """See `GracefulStop.until_agreed`. `broken_off` tells afterwards whether items were left out."""

    def __init__(self, stop: GracefulStop, items: Iterable[T], void: Callable[[], bool] | None = None) -> None:
        self.broken_off = False
        self._stop, self._items, self._void = stop, items, void

    def __iter__(self) -> Iterator[T]:
        vote: _Vote | None = None
        iterator = iter(self._items)
        try:
            for item in iterator:
                # Asked with the item before, answered while that was worked on: nobody waits for the answer.
                if vote is not None and vote.result():
                    self.broken_off = True
                    return
                vote = _Vote(self._stop.wanted, self._void is not None and self._void())
                yield item
            if vote is not None:
                vote.result()
                self.broken_off = vote.void
        finally:
            if (close := getattr(iterator, "close", None)) is not None:
                close()


def any_rank(mine: bool) -> bool:
    """Whether it is so on any rank: the same answer on all, which call this together."""
    return _Vote(mine).result()


class _Vote:
    """One question to all ranks, on its way."""

    def __init__(self, wanted: bool, void: bool = False) -> None:
        import torch
        import torch.distributed as dist

        self._answer: torch.Tensor = torch.tensor([wanted, void], dtype=torch.int32)
        alone = not dist.is_initialized()
        self._work = None if alone else dist.all_reduce(self._answer, op=dist.ReduceOp.MAX, async_op=True)

    def result(self) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._answer.any())

    @property
    def void(self) -> bool:
        """Whether a rank has no item, after `result`."""
        return bool(self._answer[1])
