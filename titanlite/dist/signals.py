"""Stop requests from outside: SIGTERM, SIGUSR1 (Slurm's `--signal`), Ctrl-C.

All ranks act on one together.

    with StopSignal() as stop:
        for step in range(1, steps + 1):
            train(step)
            if stop.requested_anywhere():  # one small all-reduce between the hosts
                save(step)
                break

A loop over `TrainStep` needs no further collective: pass it `stop=stop.requested`, and
`FiniteGuard.poll` answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

from titanlite import exit_codes

# By name: Windows has no SIGUSR1, and there the import must not fail before the refusal.
SIGNALS = tuple(one for one in signal.Signals if one.name in ("SIGTERM", "SIGUSR1", "SIGINT"))
#: A signal that comes sooner after the first is the same request again: a scheduler signals
#: torchrun and its workers.
_APART_SECONDS = 1.0
#: Time to clean up for a process that ends at once. It may hang on its way out, in a collective.
_UNWIND_SECONDS = 3.0

T = TypeVar("T")


class StopRequested(BaseException):
    """The run was asked to stop and did: like KeyboardInterrupt, no `Exception`.

    `step` counts steps done. `saved` says that none is lost, `together` that all ranks raise it at
    the same place.
    """

    def __init__(
        self, reason: str, step: int = 0, saved: bool = True, together: bool = False
    ) -> None:
        super().__init__(reason)
        self.step = step
        self.saved = saved
        self.together = together

    @property
    def exit_code(self) -> int:
        return exit_codes.PREEMPTED if self.saved else exit_codes.PREEMPTED_UNSAVED


class StopSignal:
    """Turns signals into a flag while the block runs, and restores the handlers afterwards.

    Blocks may be nested.

    A second Ctrl-C raises KeyboardInterrupt; if the process hangs on its way out it ends by exit
    code 130. Outside the main thread nothing is installed; only `request` sets the flag then.

    Args:
        at_once: raise StopRequested at the first signal, for the time before there is anything to
            save. May be changed while the block runs.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        #: Is printed after the signal's name when one comes: when the loop stops, and whether it
        #: saves.
        self.notice = "stopping as soon as this step is done"
        #: Whether the latest `interruptible` left items out.
        self.interrupted = False
        #: What asked this rank to stop: a signal's name, or the words given to `request`; "" if
        #: nothing did.
        self.reason = ""
        #: The first signal, and when it came.
        self._first: tuple[int, float] | None = None
        self._depth = 0
        self._handlers: dict[signal.Signals, Any] = {}
        self._exit: threading.Timer | None = None

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop. Others may not know yet: see
        `requested_anywhere`.
        """
        return bool(self.reason)

    def request(self, reason: str) -> None:
        """Ask to stop from within the program, on one rank or all."""
        self.reason = self.reason or reason

    def requested_anywhere(self) -> bool:
        """Return whether any rank was asked to stop: the same answer on all, which call it
        together.

        A small all-reduce between the hosts; no device is waited for.
        """
        return _ask_all(self.requested)()

    def interruptible(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`. All ranks end at the same item, after a rank was asked to stop.

        Each must bring as many.

        `interrupted` says afterwards whether items were left out.
        """
        self.interrupted = False
        answer: Callable[[], bool] = bool
        with contextlib.ExitStack() as stack:
            iterator = iter(items)
            if close := getattr(iterator, "close", None):
                stack.callback(close)
            for item in iterator:
                # Asked with the item before, answered while the loop worked on it: nothing waits
                # for the answer.
                if answer():
                    self.interrupted = True
                    return
                answer = _ask_all(self.requested)
                yield item
            answer()

    def describe(self) -> str:
        """Return which ranks were asked by what, as "SIGTERM on every rank".

        All ranks call it together.
        """
        import torch.distributed as dist

        from titanlite.dist.dist_env import gather_objects

        reasons = [self.reason]
        if dist.is_initialized():
            reasons = gather_objects(self.reason)
        parts = []
        for reason in dict.fromkeys(filter(None, reasons)):
            ranks = [str(rank) for rank, other in enumerate(reasons) if other == reason]
            every = len(ranks) == len(reasons)
            where = "every rank" if every else f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
            parts.append(reason if len(reasons) == 1 else f"{reason} on {where}")
        return "; ".join(parts)

    @contextlib.contextmanager
    def shield_children(self) -> Iterator[None]:
        """Hide these signals from processes started inside: torchrun sends them to all that its
        worker has started.

        For the compilers that `torch.compile` starts: without one the step cannot end. This process
        still gets them.
        """
        if not self._handlers:
            yield
            return
        # A new process inherits it; other threads do not.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> StopSignal:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._handlers = _install(SIGNALS, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, old in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        self._handlers.clear()
        if self._exit is not None:
            self._exit.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            self.reason = name
            if self.at_once:
                self._exit_later(exit_codes.PREEMPTED)
                raise StopRequested(f"{name} before the first step")
            self._print(f"{name}: {self.notice}")
            return
        # torchrun passes the second Ctrl-C on to its workers as SIGTERM.
        insists = number == signal.SIGINT or (
            number == signal.SIGTERM and self._first[0] == signal.SIGINT
        )
        if insists and now - self._first[1] > _APART_SECONDS:
            self._print(f"{name} again: ending at once")
            self._exit_later(exit_codes.INTERRUPTED)
            raise KeyboardInterrupt

    def _print(self, text: str) -> None:
        """Print once for all ranks, not by the log: a handler may interrupt a write to it."""
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"{text}\n".encode())

    def _exit_later(self, code: int) -> None:
        """End the process by this code, unless the block ends within seconds."""
        self._exit = threading.Timer(_UNWIND_SECONDS, exit_codes.end_process, [code])
        self._exit.daemon = True
        self._exit.start()


def _ask_all(mine: bool) -> Callable[[], bool]:
    """Start to ask all ranks; return what waits for the answer."""
    import torch
    import torch.distributed as dist

    answer = torch.tensor([mine], dtype=torch.int32)
    work = (
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, async_op=True)
        if dist.is_initialized()
        else None
    )

    def result() -> bool:
        if work is not None:
            work.wait()
        return bool(answer.item())

    return result


def exit_on_signals(*numbers: signal.Signals) -> None:
    """End the process at once with exit code 5 on these signals, while nothing can be lost yet.

    A later handler (`StopSignal`, torchrun) replaces it. Signals that are blocked until here count.
    """
    _install(numbers, _exit_now)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    # From here on this worker writes its exit code after any of the signals.
    exit_codes.report_code(exit_codes.BEGUN)


def _install(numbers: Iterable[signal.Signals], handler: Any) -> dict[signal.Signals, Any]:
    # A shell ignores SIGINT for jobs in its background: a Ctrl-C there means another job.
    taken = [n for n in numbers if n != signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in taken}


def _exit_now(number: int, frame: FrameType | None) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = signal.Signals(number).name
        os.write(2, f"stopped: {name} before the first step\n".encode())
    exit_codes.end_process(exit_codes.PREEMPTED)
