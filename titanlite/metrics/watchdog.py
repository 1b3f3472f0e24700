"""Hang watchdog: names the rank that the others wait for, and ends all ranks when one raises.

    with HangWatchdog() as watchdog:
        for step in range(1, steps + 1):
            watchdog.phase("data", step)
            batch = next(batches)
            watchdog.phase("forward")
            ...

A daemon thread of each rank publishes the rank's state in the run's key-value store, over a connection of its own. So
it works when a collective hangs, on gloo and NCCL alike, without a collective and without reading the device.

Traffic: one value of about 250 bytes per rank and heartbeat (2 s), and one read of a counter per rank and half second;
both less often from 1,000 ranks on, so that the store gets no more than 3,000 requests a second. Only rank 0 reads the
states of others, and only when it has stood still itself for a heartbeat: ranks of one run stand still together.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
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
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from titanlite import exit_codes
from titanlite.callbacks import SLOW_PHASES
from titanlite.config.run_sections import Comm, Stall
from titanlite.exit_codes import is_of_collectives
from titanlite.guard import BadStepError
from titanlite.metrics.console import console_handler
from titanlite.metrics.hang_report import RankState, process_state, table, verdict
from titanlite.signals import StopRequested
from titanlite.utils import logger

#: Name of the thread, as `threading.enumerate` and a debugger show it.
THREAD = "titanlite-watchdog"
#: Phases that may take as long as a first step.
PATIENT = SLOW_PHASES | {"start"}

#: Shares of the collectives' timeout: the deadline where none is configured, and the longest one, where steps are slow.
_DEADLINE_SHARE, _LATEST_SHARE = 0.6, 0.8
#: A phase is reported when it takes so many times as long as the longest step, if the deadline is shorter.
_SLOW = 3.0
_POLL_SECONDS = 0.5
#: Upper limits over all ranks.
_POLLS_PER_SECOND, _BEATS_PER_SECOND = 2000, 1000
#: A rank that is silent for three heartbeats, and so long, counts as dead: Python's lock may be held for a while.
_SILENT_SECONDS = 20.0
_STORE_SECONDS = 10
#: A rank has so long, and two polls, to answer.
_ANSWER_SECONDS = 2.0
#: A rank has so long to raise by itself the error that another has raised: a wrong checkpoint is wrong on all.
_OWN_REASON_SECONDS = 1.0
#: Longest wait of a rank that raised for rank 0's report, and of the others for its end: torchrun blames the first rank
#: that ends.
_TOLD_SECONDS = 4.0
#: A rank that raised has so long for its own end.
_UNWIND_SECONDS = 7.0
#: Characters of an error's text, and frames of a stack, that are published.
_TEXT, _FRAMES, _DEPTH = 2000, 12, 60
#: File in which a main thread waits for another one -> that thread, whose stack says more.
_WORKERS = {"data/prefetch.py": "titanlite-prefetch", "checkpoint/async_save.py": "titanlite-save"}
#: All ranks raise these together.
_TOGETHER = (StopRequested, BadStepError, KeyboardInterrupt, SystemExit, GeneratorExit)


class PeerError(RuntimeError):
    """Another rank has raised, and this one ends because of it."""

    exit_code = exit_codes.LOST_PEER


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class HangWatchdog:
    """Watches the ranks of the default process group, or one process alone, while the block runs.

    Enter it on all ranks, after the group was made. When a rank makes no progress for the deadline, or its process is
    gone, rank 0 logs a table of all ranks and a sentence that names the culprit; the report ends no process. The
    deadline is longer where steps are slow. When an exception leaves the block on one rank alone, the others end within
    seconds, with `exit_codes.LOST_PEER`, and rank 0's last line is that exception. A stop or the guard raises on all
    ranks, which ends no other rank. A collective that failed ends no other rank either: rank 0 logs the table.

    Args:
        stall, comm: sections with the deadlines. Phases in PATIENT have the collectives' first timeout.
        logs: folder with the logs of all ranks, for messages. traces: folder of the flight recorder, for messages.
        end: ends this process with a code, when another rank has raised or this one hangs after raising. None: nothing
            ends it.

    Attributes:
        verdict: the sentence that names the culprit, once there is one.
        on_peer: called in another thread with a PeerError before `end`, to record how the run ended.
    """

    def __init__(
        self,
        stall: Stall | None = None,
        comm: Comm | None = None,
        logs: str = "",
        traces: str = "",
        end: Callable[[int], object] | None = _exit,
    ) -> None:
        stall, comm = stall or Stall(), comm or Comm()
        given, beat = stall.deadline_seconds, stall.heartbeat_seconds
        self._deadline = _DEADLINE_SHARE * comm.train_timeout_seconds if given is None else given
        self._patience = max(self._deadline, _DEADLINE_SHARE * comm.init_timeout_seconds)
        self._latest = _LATEST_SHARE * comm.train_timeout_seconds
        self._heartbeat = min(beat, self._deadline / 2) if self._deadline else beat
        self.logs, self.traces = logs, traces
        self.verdict = ""
        self.on_peer: Callable[[PeerError], None] | None = None
        self._end = end
        self._host = socket.gethostname()
        self._now = (0, 0, "start", time.monotonic())
        self._first_step: int | None = None
        #: Steps done; seconds of the present one and of the longest, without the phases in PATIENT.
        self._steps = 0
        self._seconds = self._longest = 0.0
        self._thread: threading.Thread | None = None

    def phase(self, name: str, step: int | None = None) -> None:
        """Take note that this rank begins a phase: data, forward, backward, ... All ranks call it in the same order.

        Costs about half a microsecond. step: number of the step where another one begins.
        """
        old, place, before, since = self._now
        now = time.monotonic()
        if before not in PATIENT:
            self._seconds += now - since
        if step is None or step == old:
            self._now = (old, place + 1, name, now)
            return
        if self._first_step is None:
            self._first_step = step
        else:
            self._steps += 1
            # The first step allocates and warms up: it counts for the second step alone.
            self._longest = self._seconds if self._steps <= 2 else max(self._longest, self._seconds)
        self._seconds = 0.0
        self._now = (step, 0, name, now)

    def __enter__(self) -> HangWatchdog:
        grouped = dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        # A connection of its own: an operation that waits holds up all others on the same one.
        store = _get_default_store().clone() if grouped else dist.HashStore()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        number = store.add(f"titanlite_watchdog/{self.rank}", 1)  # one watchdog after the other, the same on all ranks
        self._store = dist.PrefixStore(f"titanlite_watchdog/{number}", store)
        self._poll = max(_POLL_SECONDS, self.size / _POLLS_PER_SECOND)
        self._heartbeat = max(self._heartbeat, self.size / _BEATS_PER_SECOND)
        self._main = threading.get_ident()
        self._lock, self._stop = threading.RLock(), threading.Event()
        #: How this rank ends, and when it is to have ended; set once that is so.
        self._end_state: dict[str, Any] = {}
        self._code, self._end_before = exit_codes.ERROR, math.inf
        self._has_reason = threading.Event()
        #: Another rank that raised; set when this one has acted on it.
        self._peer: RankState | None = None
        self._followed = threading.Event()
        self._beats = self._calls = 0
        self._next_beat = self._next_look = 0.0
        #: Latest beats of other ranks, and when each was first seen.
        self._seen: dict[int, tuple[str, float]] = {}
        #: Begin of the phase that was reported.
        self._reported: float | None = None
        self._now = (*self._now[:3], time.monotonic())
        self._publish()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread = self._thread
        if thread is None:
            return
        if error is None or isinstance(error, _TOGETHER):
            self._end_state = {"end": "left"}
            self._has_reason.set()
        else:
            self.failed(error)
        with contextlib.suppress(RuntimeError):
            if self._end_state["end"] == "raised" and self.size > 1:
                self._wait_for("told")
            elif self._end_state["end"] == "lost" and self._peer is not None:
                self._followed.wait()  # the thread reports it, and ends the process
            self._publish()
        self._stop.set()
        # A thread that is in a call outside Python when the interpreter ends would abort the process.
        thread.join(_STORE_SECONDS + 1)
        self._thread = None

    def failed(self, error: BaseException) -> str:
        """Report an exception to the other ranks now, before it leaves the block: cleaning up may take time.

        If a collective failed, find the rank to blame, which takes some seconds, log it, and return the verdict.
        """
        if self._thread is None or self._end_state or isinstance(error, _TOGETHER):
            return ""
        text = f"{type(error).__name__}: {error}"[:_TEXT].rstrip().removesuffix(":")
        with contextlib.suppress(RuntimeError):  # the store is gone: the error itself is the one to be seen
            if is_of_collectives(error):
                self._end_state = {"end": "lost", "text": text}
                self._publish()
                self._find_culprit()
                return self.verdict
            self._end_state = {"end": "raised", "text": text}
            self._code, self._end_before = exit_codes.code_of(error), time.monotonic() + _UNWIND_SECONDS
            self._has_reason.set()
            if self.rank == 0:
                self._store.set("told", "")  # its own end is its report
            self._publish()
            stack = tuple(_place(*where) for where in traceback.walk_tb(error.__traceback__))
            self._store.compare_set("raised", "", replace(self._state(), stack=stack[::-1][:_FRAMES]).dump())
            self._store.add("calls", 1)
        return ""

    def _state(self) -> RankState:
        (step, place, phase, since), (stack, waits) = self._now, _stack(self._main)
        seconds = time.monotonic() - since
        return RankState(
            self.rank, self._host, os.getpid(), step, place, phase, seconds, stack, waits, **self._end_state
        )

    def _publish(self) -> None:
        self._beats += 1
        # Wall-clock time: the clocks of two hosts differ little.
        self._store.set(f"beat/{self.rank}", f"{time.time()} {self._beats} {self._state().dump()}")

    def _wait_for(self, key: str) -> bool:
        deadline = time.monotonic() + _TOLD_SECONDS
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    # The thread.

    def _run(self) -> None:
        while not self._stop.wait(self._poll):
            try:
                self._tick(time.monotonic())
            except (RuntimeError, OSError) as error:
                if not self._stop.is_set():
                    reason = str(error).partition("\n")[0]
                    logger.log(
                        logging.INFO if self.rank else logging.WARNING,
                        "stalls are not watched any longer: the store of the run does not answer. Rank 0, or the "
                        f"torchrun that serves it, has ended or hangs ({reason})",
                    )
                self._followed.set()
                return
            if self._peer is not None and not self._followed.is_set():
                self._follow(self._peer)
                self._followed.set()
            if time.monotonic() > self._end_before and self._end is not None:
                logger.error(f"{self._end_state['text']}\nthis rank raised, and hangs on its way out: it is ended")
                self._end(self._code)

    def _tick(self, now: float) -> None:
        self._answer()
        if now >= self._next_beat:
            self._next_beat = now + self._heartbeat
            self._publish()
        if self.rank == 0 and self._deadline and not self._end_state and self._peer is None:
            self._watch(now)

    def _answer(self) -> None:
        """Publish this rank's state if rank 0 has called for it, and find out whether a rank has raised."""
        with self._lock:
            if (calls := self._store.add("calls", 0)) == self._calls:
                return
            self._publish()
            self._calls = calls
            if self._peer is None and self._store.check(["raised"]):
                state = RankState.load(self._store.get("raised").decode())
                self._peer = None if state.rank == self.rank else state

    def _watch(self, now: float) -> None:
        """On rank 0: report if this rank, and so all of them, have stood still for too long."""
        step, _, phase, since = self._now
        if self._reported is not None:
            if since != self._reported:
                logger.warning(f"rank 0 goes on, in {phase} of step {step}")
                self._reported, self.verdict = None, ""
            return
        age = now - since
        dead = self._dead(now) if age > self._heartbeat else ""
        if dead or age > self._limit(step, phase):
            self._reported = since
            self._report(dead or f"no progress for {age:.0f} s")

    def _limit(self, step: int, phase: str) -> float:
        """Return the seconds that a phase may take before it is reported."""
        if phase in PATIENT or step == self._first_step:
            return self._patience
        latest = self._latest if self.size > 1 else math.inf  # alone, no collective times out
        return max(self._deadline, min(_SLOW * self._longest, latest))

    def _dead(self, now: float) -> str:
        """Look, once in a heartbeat, for a rank whose process is gone or that has been silent for several beats."""
        if now < self._next_look:
            return ""
        self._next_look = now + self._heartbeat
        for rank in range(1, self.size):
            beat = self._beat(rank)
            if self._seen.get(rank, ("", 0.0))[0] != beat:
                self._seen[rank] = beat, now
            state = _silent(rank, beat, self._host)
            if beat and not state.end:
                if state.process == "gone":
                    return f"rank {rank} is gone"
                if now - self._seen[rank][1] > max(3 * self._heartbeat, _SILENT_SECONDS):
                    return f"rank {rank} is not heard of"
        return ""

    def _report(self, reason: str) -> None:
        """Ask all ranks where they are, and log it."""
        states = self._collect()
        culprits, self.verdict = verdict(states)
        if self.traces and not culprits and self.size > 1:
            self.verdict += f". When they time out, `torchfrtrace {self.traces}` compares their last ones"
        logger.error(f"{reason}:\n{table(states, culprits)}\n{self.verdict}")

    def _collect(self) -> list[RankState]:
        """Ask for the states of all ranks; of a rank that does not answer in time return its last heartbeat."""
        with self._lock:
            before = [self._beat(rank) for rank in range(self.size)]
            self._store.add("calls", 1)
            self._answer()
            deadline = time.monotonic() + _ANSWER_SECONDS + 2 * self._poll
            while True:
                late = time.monotonic() > deadline
                beats = [self._beat(rank) for rank in range(self.size)]
                states = [
                    _silent(rank, beat, self._host) if beat == before[rank] else RankState.load(beat.split(" ", 2)[2])
                    for rank, beat in enumerate(beats)
                ]
                if late or all(s.silent is None or s.process == "gone" for s in states):
                    return states
                time.sleep(self._poll / 5)

    def _beat(self, rank: int) -> str:
        """Return the latest heartbeat of a rank: seconds since 1970, number, state; "" if there is none."""
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _find_culprit(self) -> None:
        """A collective failed here. Rank 0 finds out why; the others take over its verdict."""
        self._answer()
        if self._peer is not None:
            return
        if self.rank == 0:
            self._report("a collective failed")
            self._store.set("verdict", self.verdict)
        elif self._wait_for("verdict"):
            self.verdict = self._store.get("verdict").decode()
        elif self._peer is None:  # rank 0 may be the one that is gone
            _, self.verdict = verdict([_silent(0, self._beat(0), self._host)])
            logger.error(f"a collective failed: {self.verdict}")

    def _follow(self, peer: RankState) -> None:
        """Another rank has raised: end, unless this one has a reason of its own."""
        if self._has_reason.wait(_OWN_REASON_SECONDS):
            return
        _, self.verdict = verdict([peer])
        if self.rank == 0:
            self._log_peer(peer)
            with contextlib.suppress(RuntimeError):
                self._store.set("told", "")
        if self.on_peer is not None:
            hook = threading.Thread(target=self.on_peer, args=(PeerError(self.verdict),), daemon=True)
            hook.start()
            hook.join(_OWN_REASON_SECONDS)
        if self._end is None:
            return
        deadline = time.monotonic() + 2 * _TOLD_SECONDS
        here = peer.host == self._host
        while time.monotonic() < deadline and not (here and process_state(peer.pid) == "gone"):
            if self._stop.wait(0.1):
                return  # this rank has ended in order
        time.sleep(_POLL_SECONDS)  # in which torchrun sees which rank ended first
        self._end(exit_codes.LOST_PEER)

    def _log_peer(self, peer: RankState) -> None:
        see = f". Its traceback is in {Path(self.logs) / f'rank_{peer.rank}.log'}" if self.logs else ""
        handler = console_handler()
        if handler is not None and handler.view is not None:
            handler.view.close(0.3)
        logger.error(f"{peer.name} raised in {peer.where}{peer.spot}: all ranks end{see}\n{peer.text}")
        if handler is not None and self._end is not None:
            logger.removeHandler(handler)  # this is to be the last line that is read


def _silent(rank: int, beat: str, host: str) -> RankState:
    """Return the state in a heartbeat as that of a rank that has been silent since. host: this one."""
    if not beat:
        return RankState(rank, silent=0.0)
    when, _, text = beat.split(" ", 2)
    state, silent = RankState.load(text), max(time.time() - float(when), 0.0)
    if state.end:
        return state
    process = process_state(state.pid) if state.host == host else ""
    return replace(state, seconds=state.seconds + silent, silent=silent, process=process)


def _stack(thread: int) -> tuple[tuple[str, ...], bool]:
    """Return the innermost frame of a thread, those around it that are not torch's, and if it is in a collective."""
    frames = sys._current_frames()

    def innermost(ident: int | None, most: int) -> list[FrameType]:
        frame = frames.get(ident or 0)
        return [] if frame is None else [f for f, _ in itertools.islice(traceback.walk_stack(frame), most)]

    own = innermost(thread, _DEPTH)
    waits = any(_is_collective(frame, index) for index, frame in enumerate(own[:8]))
    files = [Path(frame.f_code.co_filename).as_posix() for frame in own[:4]]
    worker = next((name for end, name in _WORKERS.items() if any(file.endswith(end) for file in files)), None)
    for other in threading.enumerate():
        if other.name == worker:
            own = [*innermost(other.ident, _FRAMES // 2), *own]
    shown = [frame for index, frame in enumerate(own) if not index or "/torch/" not in frame.f_code.co_filename]
    return tuple(_place(frame, frame.f_lineno) for frame in shown[:_FRAMES]), waits


def _is_collective(frame: FrameType, index: int) -> bool:
    path = frame.f_code.co_filename
    if path.endswith(("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")):
        return True
    if index:
        return False
    return any(part in path for part in ("torch/distributed/fsdp/", "torch/distributed/pipelining/")) or (
        path == sys.modules[StopRequested.__module__].__file__ and frame.f_code.co_name == "result"
    )


def _place(frame: FrameType, line: int | None) -> str:
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{line} {frame.f_code.co_name}"
