"""Who holds a run up, and an end for all when one rank raises.

    with StallWatch() as stalls:
        for step in range(1, steps + 1):
            stalls.phase("data", step)
            batch = next(batches)
            stalls.phase("forward")
            ...

A daemon thread of each rank keeps the rank's place in the run's key-value store, over a connection of its own. There it
works when a collective hangs, on gloo and NCCL alike, and without a collective or a word from the device.

Traffic: one value of about 250 bytes per rank and heartbeat (2 s), and one look at a counter per rank and half second;
both less often from 1,000 ranks on, so that the store gets no more than 3,000 requests a second. The others' places are
read by rank 0 alone, when it has stood still itself for a heartbeat: ranks of one run stand still together.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from titanlite import exit_codes
from titanlite.config.plans import StallPlan
from titanlite.exit_codes import is_of_collectives
from titanlite.guard import BadStepError
from titanlite.observe.console import console_handler
from titanlite.observe.stall_report import End, RankState, process_state, table, verdict
from titanlite.preempt import Preempted

logger = logging.getLogger("titanlite")

#: Name of the thread, as `threading.enumerate` and a debugger show it.
THREAD = "titanlite-stalls"
#: Phases that may take as long as a first step.
PATIENT = frozenset({"start", "compile", "validate", "save", "rollback", "end"})

#: A phase is reported when it takes so many times as long as the longest step, if the deadline is shorter.
_SLOW = 3.0

_POLL_SECONDS = 0.5
#: At most, over all ranks.
_POLLS_PER_SECOND = 2000
_BEATS_PER_SECOND = 1000
#: A rank not heard of for three heartbeats, and so long, is taken for dead: Python's lock may be held for a while.
_SILENT_SECONDS = 20.0
_STORE_SECONDS = 10
#: Ranks that do not answer for so long, and two polls, do not answer.
_ANSWER_SECONDS = 2.0
#: How much later than rank 0 its deputy, rank 1, reports: only when rank 0 did not.
_DEPUTY_SECONDS = 5.0
#: What a rank gets to raise by itself what another has raised: a wrong checkpoint is wrong on all.
_OWN_REASON_SECONDS = 1.0
#: The longest a rank that raised waits for rank 0 to say so, and the others for its end: torchrun blames who ends
#: first.
_TOLD_SECONDS = 4.0
#: What a rank that raised gets for its own end.
_UNWIND_SECONDS = 7.0
_TEXT = 2000
_FRAMES, _DEPTH = 12, 60
#: File in which a main thread waits for another one → that thread, whose stack says more.
_WORKERS = {"data/background.py": "titanlite-prefetch", "checkpoint/async_save.py": "titanlite-save"}
_TOGETHER = (Preempted, BadStepError, KeyboardInterrupt, SystemExit, GeneratorExit)


class PeerError(RuntimeError):
    """Another rank has raised, and this one ends because of it."""

    exit_code = exit_codes.LOST_PEER


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StallWatch:
    """Watches the ranks of the default process group, or one process alone, while the block runs.

    Enter it on all ranks, after the group was made. When a rank makes no progress for the plan's deadline, or its
    process is gone, rank 0 logs a table of all ranks and a sentence that names the culprit; nothing is ended by that.
    The deadline is longer where steps are slow (`_limit`). When an exception leaves the block on one rank alone, the
    others end within seconds, with `exit_codes.LOST_PEER`, and the last that rank 0 logs is that exception. What a stop
    or the guard raises on all ranks is no such thing, nor is a collective that failed: for that the table is logged.

    Args:
        plan: deadlines in seconds.
        logs: folder with the logs of all ranks, to point to. traces: folder in which the flight recorder leaves its
            records when a collective fails.
        end: ends this process with a code, when another rank has raised or this one hangs after raising. None: nothing
            ends it, it is only said.

    Attributes:
        verdict: the sentence that names the culprit, once there is one.
        wanted: asked now and then whether this rank was asked to stop; the others then hear of it (`wished`), also
            where no collective can tell them.
        wished: a rank was asked to stop.
        on_peer: called in another thread with a PeerError before `end`, to record how the run ended.
    """

    def __init__(
        self,
        plan: StallPlan | None = None,
        logs: str = "",
        traces: str = "",
        end: Callable[[int], object] | None = _leave,
    ) -> None:
        self.plan = plan or StallPlan()
        self.logs, self.traces = logs, traces
        self.verdict = ""
        self.on_peer: Callable[[PeerError], None] | None = None
        self.wanted: Callable[[], bool] | None = None
        self.wished = self._wish_told = False
        self._end = end
        self._host = socket.gethostname()
        self._now = (0, 0, "start", time.monotonic())
        self._first_step: int | None = None
        #: Steps done; seconds of the present one and of the longest, without the phases in PATIENT.
        self._steps = 0
        self._seconds = self._longest = 0.0
        self._thread: threading.Thread | None = None

    def phase(self, name: str, step: int | None = None) -> None:
        """This rank begins something: data, forward, backward, optimizer, ... All ranks in the same order.

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
            # The first step allocates and warms up: it tells how long the second may take, no more.
            self._longest = self._seconds if self._steps <= 2 else max(self._longest, self._seconds)
        self._seconds = 0.0
        self._now = (step, 0, name, now)

    def __enter__(self) -> StallWatch:
        together = dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        # A connection of its own: an operation that waits holds up all others on the same one.
        store = _get_default_store().clone() if together else dist.HashStore()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        number = store.add(f"titanlite_stalls/{self.rank}", 1)  # one watch after the other, the same on all ranks
        self._store = dist.PrefixStore(f"titanlite_stalls/{number}", store)
        self._poll = max(_POLL_SECONDS, self.size / _POLLS_PER_SECOND)
        self._heartbeat = max(self.plan.heartbeat_seconds, self.size / _BEATS_PER_SECOND)
        self._main = threading.get_ident()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._followed = threading.Event()
        #: This rank has a reason of its own to end; and when it had it.
        self._over = threading.Event()
        self._over_since = 0.0
        self._code = exit_codes.ERROR
        self._last: tuple[End, str] = ("", "")
        self._beats = 0
        self._next_beat = self._next_look = 0.0
        self._alarms = 0
        self.wished = self._wish_told = False
        self._asked = 0.0
        #: Beats of other ranks, and when each was first seen.
        self._heard: dict[int, tuple[str, float]] = {}
        #: Since when this rank stood still when that was reported.
        self._stalled: float | None = None
        self._peer: RankState | None = None
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
            self._last = "left", ""
            self._over.set()
        else:
            self.failed(error)
        with contextlib.suppress(RuntimeError):
            if self._last[0] == "raised" and self.size > 1:
                self._wait_for("told", _TOLD_SECONDS)
            elif self._last[0] == "lost" and self._peer is not None:
                self._followed.wait()  # the thread tells, and ends the process
            self._publish()
        self._stop.set()
        # A thread that is in a call outside Python when the interpreter ends would abort the process.
        thread.join(_STORE_SECONDS + 1)
        self._thread = None

    def failed(self, error: BaseException) -> str:
        """Tell the others of an exception now, before it leaves the block: for what takes time to clean up.

        For a collective that failed: find out who is to blame, which takes some seconds, log it, and return it.
        """
        if self._thread is None or self._last[0] or isinstance(error, _TOGETHER):
            return ""
        text = f"{type(error).__name__}: {error}"[:_TEXT].rstrip().removesuffix(":")
        with contextlib.suppress(RuntimeError):  # the store is gone: the error itself is the one to be seen
            if is_of_collectives(error):
                self._last = "lost", text
                self._publish()
                self._lost()
                return self.verdict
            stack = _frames_of(error.__traceback__)
            self._last = "raised", text
            self._code = exit_codes.code_of(error)
            self._over_since = time.monotonic()
            self._over.set()
            if self.rank == 0:
                self._store.set("told", "")  # it speaks for itself
            self._publish()
            self._alarm("raised", replace(self._state(), stack=stack))
        return ""

    # What this rank says.

    def _state(self, asked: bool = False) -> RankState:
        step, place, phase, since = self._now
        stack, waits = _stack(self._main) if asked else ((), False)
        end, text = self._last
        seconds = time.monotonic() - since
        return RankState(
            self.rank, self._host, os.getpid(), step, place, phase, seconds, stack, waits, end=end, text=text
        )

    def _publish(self) -> None:
        self._beats += 1
        # Seconds since the epoch tell how long ago that was; the clocks of two hosts differ little.
        self._store.set(f"beat/{self.rank}", f"{time.time()} {self._beats} {self._state().dump()}")

    def _alarm(self, kind: str, state: RankState) -> int:
        number = self._store.add("alarms", 1)
        self._store.set(f"alarm/{number}", f"{kind} {state.dump()}")
        return number

    # What it hears.

    def _run(self) -> None:
        while not self._stop.wait(self._poll):
            try:
                self._tick()
            except (RuntimeError, OSError) as error:
                if not self._stop.is_set():
                    level = logging.WARNING if self.rank <= 1 else logging.INFO
                    reason = str(error).partition("\n")[0]
                    logger.log(
                        level,
                        "stalls are not watched any longer: the store of the run does not answer. Rank 0, or the "
                        f"torchrun that serves it, has ended or hangs ({reason})",
                    )
                self._followed.set()
                return
            if self._peer is not None and not self._followed.is_set():
                self._follow(self._peer)
                self._followed.set()
            if self._over_since and time.monotonic() - self._over_since > _UNWIND_SECONDS and self._end is not None:
                logger.error(f"{self._last[1]}\nthis rank raised, and hangs on its way out: it is ended")
                self._end(self._code)

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._heartbeat
            self._publish()
        if self.wanted is not None and not self._wish_told and self.wanted():
            self._wish_told = True
            self._alarm("wish", self._state())
        self._hear()
        if self.rank <= 1 and self.plan.deadline_seconds and not self._last[0] and self._peer is None:
            self._watch(now)

    def _hear(self) -> None:
        with self._lock:
            for number in range(self._alarms + 1, self._store.add("alarms", 0) + 1):
                self._alarms = number
                kind, text = self._store.get(f"alarm/{number}").decode().split(" ", 1)
                if kind == "report":
                    self._asked = time.monotonic()
                    self._store.set(f"answer/{number}/{self.rank}", self._state(asked=True).dump())
                    self._store.add(f"answers/{number}", 1)
                elif kind == "wish":
                    self.wished = True
                elif (state := RankState.load(text)).rank != self.rank and self._peer is None:
                    self._peer = state

    def _wait_for(self, key: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    # Stalls.

    def _watch(self, now: float) -> None:
        """On rank 0, and its deputy: has this rank, and so all of them, stood still for too long?"""
        step, _, phase, since = self._now
        age = now - since
        if self._stalled is not None:
            if since != self._stalled:
                logger.warning(f"rank {self.rank} goes on, in {phase} of step {step}")
                self._stalled, self.verdict = None, ""
            return
        limit = self._limit(step, phase)
        if self.rank:
            limit += _DEPUTY_SECONDS
            if self._asked >= since:
                return
        dead = self._dead(now) if age > self._heartbeat else ""
        if dead or age > limit:
            self._stalled = since
            self._report(dead or f"no progress for {age:.0f} s")

    def _limit(self, step: int, phase: str) -> float:
        """Seconds that a phase may take before it is reported."""
        if phase in PATIENT or step == self._first_step:
            return self.plan.patience_seconds
        latest = self.plan.latest_seconds if self.size > 1 else math.inf  # alone, no collective times out
        return max(self.plan.deadline_seconds, min(_SLOW * self._longest, latest))

    def _dead(self, now: float) -> str:
        """Looks, once in a heartbeat, for ranks whose process is gone, or that were not heard of for some."""
        if now < self._next_look:
            return ""
        self._next_look = now + self._heartbeat
        silent = max(3 * self._heartbeat, _SILENT_SECONDS)
        for rank in range(self.size):
            if rank == self.rank or not self._store.check([f"beat/{rank}"]):
                continue
            text = self._store.get(f"beat/{rank}").decode()
            state = RankState.load(text.split(" ", 2)[2])
            if self._heard.get(rank, ("", 0.0))[0] != text:
                self._heard[rank] = text, now
            gone = state.host == self._host and process_state(state.pid) == "gone"
            if not state.end and (gone or now - self._heard[rank][1] > silent):
                return f"rank {rank} {'is gone' if gone else 'is not heard of'}"
        return ""

    def _report(self, reason: str) -> None:
        """Ask all ranks where they are, and log it."""
        with self._lock:
            number = self._alarm("report", self._state())
            self._hear()
            states = self._collect(number)
        culprits, self.verdict = verdict(states)
        if self.traces and not culprits and self.size > 1:
            self.verdict += f". When they time out, `torchfrtrace {self.traces}` compares their last ones"
        logger.error(f"{reason}:\n{table(states, culprits)}\n{self.verdict}")

    def _collect(self, number: int) -> list[RankState]:
        """The answers of all ranks, and what was last heard of those that do not answer."""
        began = looked = time.monotonic()
        answered: list[RankState] = []
        others: list[RankState] = []
        while True:
            done = self._store.add(f"answers/{number}", 0) >= self.size
            now = time.monotonic()
            late = now - began > _ANSWER_SECONDS + 2 * self._poll
            if done or late or now - looked > self._poll:
                looked = now
                ranks = [r for r in range(self.size) if self._store.check([f"answer/{number}/{r}"])]
                others = [self._last_heard(r) for r in sorted(set(range(self.size)) - set(ranks))]
                if done or late or all(s.end or s.process == "gone" for s in others):
                    texts = self._store.multi_get([f"answer/{number}/{r}" for r in ranks])
                    answered = [RankState.load(text) for text in texts]
                    break
            time.sleep(0.05)
        return sorted([*answered, *others], key=lambda state: state.rank)

    def _last_heard(self, rank: int) -> RankState:
        if not self._store.check([f"beat/{rank}"]):
            return RankState(rank, silent=0.0)
        when, _, text = self._store.get(f"beat/{rank}").decode().split(" ", 2)
        state = RankState.load(text)
        if state.end:
            return state
        silent = max(time.time() - float(when), 0.0)
        process = process_state(state.pid) if state.host == self._host else ""
        return replace(state, seconds=state.seconds + silent, silent=silent, process=process)

    # Ends.

    def _lost(self) -> None:
        """A collective failed here. Rank 0 finds out why; the others wait for what it finds, to say it too."""
        self._hear()
        if self._peer is None and self.rank:
            # Rank 0 may be the one that is gone.
            key, deputy = "verdict", self.rank == 1
            if self._wait_for(key, _TOLD_SECONDS / 2 if deputy else _TOLD_SECONDS):
                self.verdict = self._store.get(key).decode()
                return
            self._hear()
            if not deputy or self._last_heard(0).end:
                return
        if self._peer is None:
            self._report("a collective failed")
            self._store.set("verdict", self.verdict)

    def _follow(self, peer: RankState) -> None:
        """Another rank has raised: end, unless this one has a reason of its own."""
        if self._over.wait(_OWN_REASON_SECONDS):
            return
        _, self.verdict = verdict([peer])
        with contextlib.suppress(RuntimeError):
            if self.rank == 0:
                see = f". Its traceback is in {Path(self.logs) / f'rank_{peer.rank}.log'}" if self.logs else ""
                at = f", at {peer.stack[0]}" if peer.stack else ""
                logger.error(f"{peer.name} raised in {peer.where}{at}: all ranks end{see}\n{peer.text}")
                handler = console_handler()
                if handler is not None and self._end is not None:
                    logger.removeHandler(handler)  # this is to be the last that is read
                self._store.set("told", "")
            else:
                self._wait_for("told", _TOLD_SECONDS)
        if self.on_peer is not None:
            hook = threading.Thread(target=self.on_peer, args=(PeerError(self.verdict),), daemon=True)
            hook.start()
            hook.join(_OWN_REASON_SECONDS)
        if self._end is None:
            return
        deadline = time.monotonic() + _TOLD_SECONDS
        here = peer.host == self._host
        while time.monotonic() < deadline and not (here and process_state(peer.pid) == "gone"):
            if self._stop.wait(0.1):
                return  # all that was to be done is done here
        time.sleep(_POLL_SECONDS)  # in which torchrun sees who ended first
        self._end(exit_codes.LOST_PEER)


def _stack(thread: int) -> tuple[tuple[str, ...], bool]:
    """The innermost frame of a thread and those around it that are not torch's; and whether it is in a collective."""
    frames = sys._current_frames()
    own = _innermost(frames.get(thread))
    waits = any(_is_collective(frame, index) for index, frame in enumerate(own[:8]))
    files = [Path(frame.f_code.co_filename).as_posix() for frame in own[:4]]
    worker = next((name for end, name in _WORKERS.items() if any(file.endswith(end) for file in files)), None)
    for other in threading.enumerate():
        if other.name == worker and other.ident in frames:
            own = [*_innermost(frames[other.ident])[: _FRAMES // 2], *own]
    told = [frame for index, frame in enumerate(own) if not index or "/torch/" not in frame.f_code.co_filename]
    return tuple(_frame(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in told[:_FRAMES]), waits


def _innermost(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < _DEPTH:
        found.append(frame)
        frame = frame.f_back
    return found


def _is_collective(frame: FrameType, index: int) -> bool:
    path = frame.f_code.co_filename
    if path.endswith(("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")):
        return True
    if index:
        return False
    return any(part in path for part in ("torch/distributed/fsdp/", "torch/distributed/pipelining/")) or (
        path.endswith("titanlite/preempt.py") and frame.f_code.co_name == "result"
    )


def _frames_of(trace: TracebackType | None) -> tuple[str, ...]:
    """Where an exception was raised, innermost first."""
    found: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(_frame(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return tuple(found[::-1][:_FRAMES])


def _frame(path: str, line: int | None, name: str) -> str:
    return f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"
