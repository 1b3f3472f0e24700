"""Hang watchdog: names the rank that the others wait for, and ends all ranks when one raises.

    with HangWatchdog() as watchdog:
        for step in range(1, steps + 1):
            watchdog.phase("data", step)
            batch = next(batches)
            watchdog.phase("forward")
            ...

A daemon thread of each rank publishes the rank's state in the run's key-value store, over its own
connection, so it works when a collective hangs. It does not read the device. A rank alone has a
`Position`.

Traffic: 1 KB per rank and heartbeat, and two requests per rank and second; from 1,000 ranks on at
most 3,000 requests a second in all. Rank 0 reads the states of others when it stands still itself.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import _get_default_store, _world

from titanlite import exit_codes
from titanlite.callbacks import SLOW_PHASES
from titanlite.config.run_sections import Comm, Stall
from titanlite.dist.launch_env import this_rank
from titanlite.dist.signals import StopRequested
from titanlite.exit_codes import is_of_collectives
from titanlite.metrics.console import console_handler
from titanlite.metrics.hang_report import table, verdict  # never at a hang: files may hang too
from titanlite.metrics.phase_tracker import Position
from titanlite.metrics.rank_state import RankState
from titanlite.runs import TRACES
from titanlite.runs.rank_logs import FOLDER as LOGS
from titanlite.utils import logger, progress_at

#: Name of the thread, as `threading.enumerate` and a debugger show it.
THREAD = "titanlite-watchdog"
#: Phases that may take as long as a first step.
PATIENT = SLOW_PHASES | {"start"}

#: Share of the collectives' timeout that is the deadline where none is configured.
_DEADLINE_SHARE = 0.6
#: A phase is reported when it takes this many times as long as the longest so far, if the deadline
#: is shorter.
_SLOW = 3.0
_POLL_SECONDS = 0.5
#: Upper limits over all ranks.
_POLLS_PER_SECOND, _BEATS_PER_SECOND = 2000, 1000
_STORE_SECONDS = 10
#: Time in which a rank may raise by itself the error of another rank: a wrong checkpoint is wrong
#: on all.
_OWN_REASON_SECONDS = 1.0
#: A rank that does not publish its state for this many heartbeats does not answer.
_SILENT_BEATS = 2.0
#: Longest wait of a rank for what another is about to publish.
_TOLD_SECONDS = 4.0
#: Time that a rank that raised has for its own end.
_UNWIND_SECONDS = 7.0
#: Characters of an error's text, and frames of a stack, that are published.
_TEXT, _FRAMES, _DEPTH = 2000, 12, 60
#: Held by the thread that looks at frames.
_looks = threading.Lock()


def _is_common(error: BaseException) -> bool:
    """Return whether all ranks raise this error together."""
    by_python = (KeyboardInterrupt, SystemExit, GeneratorExit)
    return isinstance(error, (StopRequested, *by_python)) or getattr(error, "together", False)


class PeerError(RuntimeError):
    """Another rank has raised, and this one ends because of it."""

    exit_code = exit_codes.LOST_PEER


class HangWatchdog(Position):
    """Watches the ranks of the default process group while the block runs.

    Enter it on all ranks. Without progress for the deadline, rank 0 logs a table of all ranks and
    names the culprit, and no process ends. An exception that leaves the block on one rank alone
    ends the others within seconds, with `exit_codes.LOST_PEER`. A failed collective ends none.

    stall, comm: sections with the deadlines. folder: of the run, for messages. end: ends this
    process with a code.
    """

    def __init__(
        self,
        stall: Stall | None = None,
        comm: Comm | None = None,
        folder: Path | None = None,
        end: Callable[[int], object] | None = exit_codes.end_process,
    ) -> None:
        stall = stall or Stall()
        comm = comm or Comm()
        super().__init__(2 * comm.init_timeout_seconds)
        self._deadline = _DEADLINE_SHARE * comm.train_timeout_seconds
        if stall.deadline_seconds is not None:
            self._deadline = stall.deadline_seconds
        self._patience = max(self._deadline, _DEADLINE_SHARE * comm.init_timeout_seconds)
        self._heartbeat = stall.heartbeat_seconds
        if self._deadline:
            self._heartbeat = min(self._heartbeat, self._deadline / 2)
        self._folder = folder
        self._end = end
        self._host = socket.gethostname()
        self._first_step: int | None = None
        #: Seconds of the longest phase so far, without the first step and the phases in PATIENT.
        self._longest = 0.0
        self._thread: threading.Thread | None = None

    def phase(self, name: str, step: int | None = None) -> None:
        old, _, before, since = self._now
        super().phase(name, step)
        # The first step allocates and warms up.
        if before not in PATIENT and old != self._first_step:
            self._longest = max(self._longest, self._now[3] - since)
        if self._first_step is None:
            self._first_step = step

    def expect_warm_up(self, step: int) -> None:
        self._first_step = step

    def __enter__(self) -> HangWatchdog:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        launch = this_rank()
        first = self.rank - launch.local_rank
        #: The ranks of this launcher, but where it numbers those of several machines in turn.
        self._near = range(first, first + launch.local_world_size)
        default: Any = _get_default_store()
        # A separate connection: an operation that waits holds up all others on the same one.
        store = default.clone()
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        # One watchdog after the other, the same on all ranks.
        number = store.add(f"titanlite_watchdog/{self.rank}", 1)
        self._store = dist.PrefixStore(f"titanlite_watchdog/{number}", store)
        self._poll = max(_POLL_SECONDS, self.size / _POLLS_PER_SECOND)
        self._heartbeat = max(self._heartbeat, self.size / _BEATS_PER_SECOND)
        #: Longest wait of a report for the state of each rank.
        self._silence = _SILENT_BEATS * self._heartbeat + self._poll
        self._main = threading.get_ident()
        self._stop = threading.Event()
        #: How this rank ends; set once that is so.
        self._end_state: dict[str, Any] = {}
        self._has_reason = threading.Event()
        #: Held on rank 0 by the thread that finds the culprit.
        self._judges = threading.Lock()
        #: This rank has acted on the error of another, or cannot.
        self._followed = threading.Event()
        self._next_beat = 0.0
        #: Begin of the phase that was reported.
        self._reported: float | None = None
        #: Ends a rank that raised and hangs on its way out, with the code of its error.
        self._unwind: threading.Timer | None = None
        self._now = (*self._now[:3], time.monotonic())
        self._publish()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        thread = self._thread
        if thread is None:
            return
        if error is None or _is_common(error):
            self._end_state = {"end": "left"}
            self._has_reason.set()
        else:
            self.failed(error)
        with contextlib.suppress(RuntimeError):
            if self._end_state["end"] == "raised":
                if self.rank:
                    self._wait_for(
                        "told"
                    )  # torchrun ends all ranks after the first: rank 0 reports before that
                self._store.set("out", "")
            elif self._end_state["end"] == "lost" and self._store.check(["raised"]):
                # the thread reports the error of the other rank, and ends the process
                self._followed.wait()
            self._publish()
        self._stop.set()
        if self._unwind is not None:
            self._unwind.cancel()
        # A thread that is in a call outside Python when the interpreter ends would abort the
        # process.
        thread.join(_STORE_SECONDS + 1)
        self._thread = None

    def failed(self, error: BaseException) -> str:
        """Report an exception to the other ranks before it leaves the block: cleaning up may take
        time.

        If a collective failed, find the rank to blame, which takes some seconds; log and return the
        verdict.
        """
        if self._thread is None or self._end_state or _is_common(error):
            return ""
        text = f"{type(error).__name__}: {error}".rstrip().removesuffix(":")
        lost = is_of_collectives(error)
        self._end_state = {"end": "lost" if lost else "raised", "text": text[:_TEXT]}
        # A host that is cut off waits for the store's answer for ever: it has no timeout for that.
        finish = self._end
        if finish is not None:

            def end() -> None:
                logger.error(f"this rank ends here, since it hangs on its way out: {text}")
                finish(exit_codes.code_of(error))

            seconds = _UNWIND_SECONDS + lost * (_TOLD_SECONDS + self._silence)
            self._unwind = threading.Timer(seconds, end)
            self._unwind.daemon = True
            self._unwind.start()
        if not lost:
            self._has_reason.set()
        # Without the store the error itself is the one to be seen.
        with contextlib.suppress(RuntimeError):
            self._publish()
            if lost:
                self._store.set("lost", "")
                return self._find_culprit()
            stack = tuple(_place(*where) for where in traceback.walk_tb(error.__traceback__))
            self._store.compare_set(
                "raised", "", replace(self._state(), stack=stack[::-1][:_FRAMES]).dump()
            )
        return ""

    def _state(self) -> RankState:
        (step, place, phase, since), (stack, waits) = self._now, _stack(self._main)
        seconds = time.monotonic() - since
        return RankState(
            self.rank,
            self._host,
            os.getpid(),
            step,
            place,
            phase,
            seconds,
            stack,
            waits,
            **self._end_state,
        )

    def _publish(self) -> None:
        self._store.set(f"beat/{self.rank}", f"{time.monotonic_ns()} {self._state().dump()}")

    def _wait_for(
        self, key: str, seconds: float = _TOLD_SECONDS, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Return whether a key of the store came. unless: it will not."""
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline or unless():
                return False
            time.sleep(0.1)
        return True

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._poll):
                now = time.monotonic()
                if now >= self._next_beat:
                    self._next_beat = now + self._heartbeat
                    self._publish()
                if not self._followed.is_set() and self._store.check(["raised"]):
                    self._follow(RankState.load(self._store.get("raised").decode()))
                    self._followed.set()
                elif not self._end_state:
                    self._look_out(now)
        except (RuntimeError, OSError) as error:
            if not self._stop.is_set():
                reason = str(error).partition("\n")[0]
                logger.log(
                    logging.INFO if self.rank else logging.WARNING,
                    "stalls are not watched any longer: the store of the run does not answer. "
                    f"Rank 0, or the torchrun that serves it, has ended or hangs ({reason})",
                )
        finally:
            self._followed.set()

    def _look_out(self, now: float) -> None:
        """End this rank if NCCL has failed; on rank 0, watch all ranks."""
        # A rank waits for the verdict, and rank 0 may wait in a collective for that rank.
        lost = not self.rank and self._store.check(["lost"]) and not self._store.check(["verdict"])
        if lost:
            self._stop.wait(_OWN_REASON_SECONDS)
        failure = nccl_failure()
        if failure:
            # Its thread may wait for the device for ever, and NCCL is about to abort the process.
            self.failed(dist.DistBackendError(failure))
            logger.error(f"{failure}: this rank ends")
            self._record_peer()
            self._end_process()
        elif lost:
            self._find_culprit()
        elif self.rank == 0 and self._deadline:
            self._watch(now)

    def _watch(self, now: float) -> None:
        """Report on rank 0 if no rank has made progress for too long."""
        step, _, phase, since = self._now
        since = max(since, progress_at.get(phase, since))
        if self._reported is not None:
            if since != self._reported:
                logger.warning(f"rank 0 continues, in {phase} of step {step}")
                self._reported, self.verdict = None, ""
            return
        limit = max(self._deadline, _SLOW * self._longest)
        if phase in PATIENT or step == self._first_step:
            limit = self._patience
        if now - since > limit:
            self._reported = since
            self._report(f"no progress for {now - since:.0f} s")

    def _report(self, reason: str) -> None:
        """Log where all ranks are; those without a heartbeat meanwhile are silent."""
        deadline = time.monotonic() + self._silence
        before = [self._beat(rank) for rank in range(self.size)]
        self._publish()
        states = [self._state_since(rank, old) for rank, old in enumerate(before)]
        while time.monotonic() < deadline and any(
            state.silent and not self._is_gone(state) for state in states
        ):
            time.sleep(self._poll / 2)
            for rank, state in enumerate(states):
                if state.silent:
                    states[rank] = self._state_since(rank, before[rank])
        culprits, self.verdict = verdict(states)
        if self._folder and not culprits and torch.cuda.is_available():
            records = self._folder / TRACES
            self.verdict += (
                f". When they time out, `torchfrtrace {records}` compares their last ones"
            )
        logger.error(f"{reason}:\n{table(states, culprits)}\n{self.verdict}")

    def _state_since(self, rank: int, before: str) -> RankState:
        """Return a rank's state, which is silent if its heartbeat is still `before`."""
        beat = self._beat(rank)
        state = RankState(rank)
        if beat:
            state = RankState.load(beat.partition(" ")[2])
        return replace(state, silent=beat == before and not state.end)

    def _is_gone(self, state: RankState) -> bool:
        """Return whether the process of a rank has ended, where this one can tell: a restart waits
        for the report.
        """
        if state.rank not in self._near or state.host != self._host:
            return False
        try:
            os.kill(state.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def _beat(self, rank: int) -> str:
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _find_culprit(self) -> str:
        """Rank 0 finds out why a collective failed; the others take over its verdict."""
        if self.rank == 0:
            with self._judges:
                if not self._store.check(["raised"]) and not self._store.check(["verdict"]):
                    self._report("a collective failed")
                    self._store.set("verdict", self.verdict)
        elif self._wait_for(
            "verdict",
            _TOLD_SECONDS + self._silence,
            unless=lambda: self._is_gone(self._state_since(0, "")),
        ):
            self.verdict = self._store.get("verdict").decode()
        elif not self._store.check(["raised"]):
            self.verdict = "rank 0 does not say why: it has ended, hangs or is cut off"
            logger.error(f"a collective failed: {self.verdict}")
        return self.verdict

    def _follow(self, peer: RankState) -> None:
        """A rank has raised: end, unless this one has its own reason."""
        has_reason = self._has_reason.wait(_OWN_REASON_SECONDS)
        if not has_reason:
            _, self.verdict = verdict([peer])
        if self.rank == 0:
            if not has_reason:
                see = ""
                if self._folder:
                    see = f". Its traceback is in {self._folder / LOGS / f'rank_{peer.rank}.log'}"
                handler = console_handler()
                where = f"{peer.name} raised in {peer.where}{peer.spot}"
                logger.error(f"{where}: all ranks end{see}\n{peer.text}")
                if handler is not None and self._end is not None:
                    logger.removeHandler(handler)  # this is to be the last line that is read
            self._store.set("told", "")
        if has_reason:
            return
        self._record_peer()
        with contextlib.suppress(RuntimeError):  # the store may end with the rank that raised
            self._wait_for("out", 2 * _TOLD_SECONDS)  # torchrun blames the first rank that ends
        if not self._stop.wait(2 * _POLL_SECONDS):
            self._end_process()

    def _record_peer(self) -> None:
        if self.on_peer is not None:
            with contextlib.suppress(Exception):
                self.on_peer(PeerError(self.verdict))

    def _end_process(self) -> None:
        if self._end is not None:
            self._end(exit_codes.LOST_PEER)


def nccl_failure() -> str:
    """Return what NCCL's watchdog has found, a minute before it aborts the process; or ""."""
    for group in list(_world.pg_map):
        with contextlib.suppress(RuntimeError, AttributeError):  # no NCCL, or a wrapper that debugs
            found = group._get_backend(torch.device("cuda")).get_error()
            if found != ErrorType.SUCCESS:
                return f"NCCL reports {found.name} in the group {group.group_desc}"
    return ""


def _stack(thread: int) -> tuple[tuple[str, ...], bool]:
    """Return a thread's innermost frame, those around it that are not torch's, and if it is in a
    collective.
    """
    # Python 3.11 may collect garbage within one look at another thread's frames, and let that
    # thread run meanwhile. Then the look reads and writes freed memory, or all stand still.
    with _looks:
        usual = gc.get_threshold()
        gc.set_threshold(0)
        try:
            return _look(thread)
        finally:
            gc.set_threshold(*usual)


def _look(thread: int) -> tuple[tuple[str, ...], bool]:
    frame = sys._current_frames().get(thread)
    own: list[FrameType] = []
    if frame is not None:
        walk = itertools.islice(traceback.walk_stack(frame), _DEPTH)
        own = [one for one, _ in walk]
    waits = any(_is_collective(frame, index) for index, frame in enumerate(own[:8]))
    shown = []
    for index, frame in enumerate(own):
        if not index or "/torch/" not in frame.f_code.co_filename:
            shown.append(frame)
    return tuple(_place(frame, frame.f_lineno) for frame in shown[:_FRAMES]), waits


def _is_collective(frame: FrameType, index: int) -> bool:
    path = frame.f_code.co_filename
    if path.endswith(("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")):
        return True
    if index:
        return False
    return any(
        part in path for part in ("torch/distributed/fsdp/", "torch/distributed/pipelining/")
    ) or (
        path == sys.modules[StopRequested.__module__].__file__ and frame.f_code.co_name == "result"
    )


def _place(frame: FrameType, line: int | None) -> str:
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{line} {frame.f_code.co_name}"
