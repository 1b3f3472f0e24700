"""Runs the members of a sweep, some at a time, each in its own process.

A sweep that was killed goes on: a member that is done is not run again. One that is half done
resumes from its checkpoint, or starts again without one. The runs' own records decide which.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titanlite import torchrun
from titanlite.runs.lock import RunLock, last_sign_of_life
from titanlite.tools.processes import (
    Stopped,
    end_all,
    start,
    stoppable,
    tell,
    training_environment,
)
from titanlite.tools.sweep.members import (
    CONSOLE,
    CheckedMember,
    Member,
    MemberResult,
    SweepError,
    changes,
    check_members,
    result_of,
    write_record,
)
from titanlite.utils import counted, human_time

#: Seconds that the runs have for their last save after Ctrl-C.
GRACE_SECONDS = 240.0
_POLL_SECONDS = 0.1
_CHANGES_SHOWN = 5


def run_members(
    members: Sequence[Member],
    config_args: Sequence[str],
    folder: Path,
    *,
    at_once: int = 1,
    nproc: int = 1,
    report: Callable[[str], None] = tell,
) -> list[MemberResult]:
    """Run the members that are not done, and return how all stand, in their order.

    config_args: files and flags that all members share, as `train` takes them. folder: each member
    has its own below it. at_once: members that run at a time. nproc: ranks of each. report: takes
    the lines of progress.

    Call it from the main thread. A member that fails does not end the others. Raises SweepError or
    ConfigError before any run starts, LockedError where another sweep runs in the folder, OSError
    where it cannot be written to. Raises `processes.Stopped` on Ctrl-C and SIGTERM, when all runs
    have ended; the same call goes on then.
    """
    checked = check_members(members, config_args, folder, nproc)
    crew = Crew(checked, config_args, folder, nproc, make_slots(at_once, nproc), report)
    refuse_changes(checked, folder)
    with held(folder):
        crew.run()
    return [result_of(member, folder) for member in members]


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder of a sweep against other sweeps; signals raise Stopped meanwhile.

    Raises LockedError and OSError.
    """
    with stoppable(), RunLock(folder, "folder"):
        yield


def refuse_changes(checked: Sequence[CheckedMember], folder: Path) -> None:
    """Raise SweepError for members whose folder has a run of another config."""
    lines = []
    for one in checked:
        found = changes(one, folder)
        if not found:
            continue
        shown = [f"{key}: {change}" for key, change in list(found.items())[:_CHANGES_SHOWN]]
        if len(found) > _CHANGES_SHOWN:
            shown.append(f"and {counted(len(found) - _CHANGES_SHOWN, 'further keys')}")
        lines.append(f"  {folder / one.name}: {', '.join(shown)}")
    if lines:
        head = f"{counted(len(lines), 'runs')} of this folder had another config before"
        hint = "name another folder with --folder, or delete these folders to run them again"
        raise SweepError("\n".join([head, *lines, hint]))


def make_slots(at_once: int, nproc: int) -> list[Mapping[str, str]]:
    """Return the variables of each member that runs at a time: its GPUs, if there are any.

    Raises SweepError where there are too few.
    """
    from titanlite.tools.commands.train import count_gpus

    gpus = count_gpus()
    if not gpus:
        return [{} for _ in range(at_once)]
    if at_once * nproc > gpus:
        raise SweepError(
            f"{counted(at_once, 'runs')} at a time with {counted(nproc, 'ranks')} each need "
            f"{at_once * nproc} GPUs, and this machine shows {gpus}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else list(map(str, range(gpus)))
    slots: list[Mapping[str, str]] = []
    for slot in range(at_once):
        own = names[slot * nproc : (slot + 1) * nproc]
        slots.append({"CUDA_VISIBLE_DEVICES": ",".join(own)})
    return slots


@dataclass
class _Running:
    """A member's process, and its variables, which the next one takes over."""

    checked: CheckedMember
    process: subprocess.Popen[bytes]
    slot: Mapping[str, str]
    #: Of `time.monotonic`.
    began: float


@dataclass
class Crew:
    """The members under way and those that wait."""

    checked: Sequence[CheckedMember]
    config_args: Sequence[str]
    folder: Path
    nproc: int
    slots: list[Mapping[str, str]]
    report: Callable[[str], None] = tell
    waiting: list[CheckedMember] = field(default_factory=list)
    running: list[_Running] = field(default_factory=list)
    #: Members that another process runs, as this sweep has said.
    told: set[str] = field(default_factory=set)
    #: Seconds of each run that ended since the start, with those that its start took.
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Run the members that are not done. Raises Stopped."""
        self.waiting = []
        for one in self.checked:
            if not result_of(one.member, self.folder).is_final:
                self.waiting.append(one)
        count = len(self.checked)
        done = count - len(self.waiting)
        if done:
            self.report(f"{done} of {counted(count, 'runs')} are in {self.folder} already")
        if self.waiting:
            self.report(f"each run writes its output to {self.folder / 'NAME' / CONSOLE}")
        try:
            while self.waiting or self.running:
                self._start_next()
                self._wait()
        except Stopped as stop:
            self.report(
                f"stopped by {stop}: {counted(len(self.running), 'runs')} under way, which must "
                "save and end; the same command goes on"
            )
            raise
        finally:
            self._end()

    def _start_next(self) -> None:
        """Fill the free slots."""
        for one in list(self.waiting):
            if not self.slots:
                return
            own = self.folder / one.name
            if last_sign_of_life(own) is not None:
                if one.name not in self.told:
                    self.told.add(one.name)
                    self.report(f"{one.name} runs already, in another process; waiting for it")
                continue
            self.waiting.remove(one)
            if one.name in self.told:
                # The other process may have finished it.
                result = result_of(one.member, self.folder)
                if result.is_final:
                    self.seconds.append(result.seconds)
                    self._tell_end(one)
                    continue
            self._start(one)

    def _start(self, one: CheckedMember) -> None:
        own = self.folder / one.name
        own.mkdir(parents=True, exist_ok=True)
        write_record(one.member, self.folder, None)
        slot = self.slots.pop(0)
        device_type = "cuda" if slot else "cpu"
        environment = {**training_environment(device_type, GRACE_SECONDS), **slot}
        command = self._command(one.member)
        process = start(command, own / CONSOLE, environment)
        self.running.append(_Running(one, process, slot, time.monotonic()))
        self.report(f"{one.name} starts")

    def _command(self, member: Member) -> list[str]:
        words = ["train", *member.arguments(self.config_args, self.folder)]
        if self.nproc == 1:
            return [sys.executable, "-m", "titanlite", *words]
        return torchrun.command(self.nproc, words)

    def _wait(self) -> None:
        """Wait until a member ends, or for a moment."""
        time.sleep(_POLL_SECONDS)
        for one in list(self.running):
            code = one.process.poll()
            if code is None:
                continue
            self.running.remove(one)
            self.slots.append(one.slot)
            self._note_end(one, code)

    def _note_end(self, one: _Running, code: int) -> None:
        write_record(one.checked.member, self.folder, code)
        self.seconds.append(time.monotonic() - one.began)
        self._tell_end(one.checked)

    def _tell_end(self, one: CheckedMember) -> None:
        """Report a run that has ended, and how long the others will take."""
        result = result_of(one.member, self.folder)
        ended = len(self.checked) - len(self.waiting) - len(self.running)
        text = f"{ended} of {len(self.checked)}: {one.name} {_in_words(result)}"
        left = self._seconds_left()
        if left:
            text += f", about {human_time(left)} left"
        lines = [text]
        if result.state == "failed":
            lines.append("    its last lines:")
            lines += [f"    {line}" for line in result.last_lines]
        self.report("\n".join(lines))

    def _seconds_left(self) -> float:
        """Return how long the other members will take, as those so far."""
        others = len(self.waiting) + len(self.running)
        at_once = len(self.slots) + len(self.running)
        mean = sum(self.seconds) / len(self.seconds)
        return mean * others / max(at_once, 1)

    def _end(self) -> None:
        """End the runs that are under way, together."""
        if not self.running:
            return
        end_all([one.process for one in self.running], grace=GRACE_SECONDS)
        for one in self.running:
            write_record(one.checked.member, self.folder, one.process.returncode)
        self.running.clear()


def _in_words(result: MemberResult) -> str:
    """Return how a run ended."""
    if result.state == "done":
        loss = "no loss" if result.loss is None else f"loss {result.loss:.4f}"
        return f"is done in {human_time(result.seconds)}, {loss}"
    if result.state == "diverged":
        why = result.reason.partition(". ")[0]
        return f"diverged after step {result.steps} ({why or 'its loss is not finite'})"
    if result.state == "unfinished":
        return f"was stopped after step {result.steps}"
    return f"failed after step {result.steps} ({result.reason})"
