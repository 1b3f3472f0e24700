"""The runs of a ladder in turn: which comes when, which are there already, what is said, and what stays of it all."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import titanlite
from titanlite import exit_codes
from titanlite.ladder.check import Planned, what_differs
from titanlite.ladder.figures import Measured, measure, summarize
from titanlite.ladder.levels import LadderError
from titanlite.ladder.process import Machine, Stopped, environment, last_lines, launch, run, stoppable
from titanlite.ladder.report import STATE, Report, save_pages, save_state
from titanlite.observe.console import escape
from titanlite.observe.metrics import json_value
from titanlite.observe.stepline import human_time
from titanlite.runs import provenance
from titanlite.runs.attempts import RunError
from titanlite.runs.read import Run, read_run

RUNS = "runs"
LEVELS = "levels"
CONSOLE = "console.log"
_DIFFERENCES_SHOWN = 8


@dataclass(frozen=True)
class Slot:
    """One run to be made."""

    planned: Planned
    #: From 1.
    repeat: int

    @property
    def name(self) -> str:
        return self.planned.level.name

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.repeat}"


def in_turn(planned: Sequence[Planned], repeats: int) -> list[Slot]:
    """All runs in their order. Each repeat has every level once, and another one first: a machine that becomes slower
    or faster favours none of them."""
    found = []
    for repeat in range(repeats):
        first = repeat % len(planned)
        found += [Slot(one, repeat + 1) for one in (*planned[first:], *planned[:first])]
    return found


@dataclass
class Ladder:
    """A ladder on its way. `planned`: the levels, the baseline first."""

    title: str
    planned: Sequence[Planned]
    machine: Machine
    ranks: int
    out: Path
    steps: int
    warmup: int
    repeats: int
    command: Sequence[str]
    #: What is measured already, by the name of its folder.
    finished: dict[str, Run] = field(default_factory=dict)
    _seconds: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._source = source_hash()
        self._inputs = self._find_inputs()

    def begin(self) -> None:
        """Take up what the folder has already. Raises LadderError when it is another ladder's."""
        self._refuse_another()
        slots = in_turn(self.planned, self.repeats)
        self.finished = {slot.folder: done for slot in slots if (done := self._done(slot)) is not None}

    def climb(self) -> tuple[Report, int]:
        """Make the runs that are missing after `begin`, which is called first; the report and the exit code.

        What was measured is written after every run, so an error or a signal costs the run it came in. Raises
        LadderError when nothing can be written.
        """
        slots = in_turn(self.planned, self.repeats)
        missing = [slot for slot in slots if slot.folder not in self.finished]
        if self.finished:
            _say(f"{len(self.finished)} of {len(slots)} runs are in {self.out} already")
        self._save()
        code = exit_codes.DONE
        with stoppable():
            try:
                for i, slot in enumerate(missing):
                    if not self._run(slot, len(slots) - len(missing) + i + 1, missing[i + 1 :], len(slots)):
                        code = exit_codes.ERROR
                        break
                    self._save()
            except Stopped as stop:
                code = 128 + stop.number
                _say(f"stopped by {stop}; the same command goes on with the runs that are missing")
        return self._save(), code

    def _run(self, slot: Slot, number: int, after: Sequence[Slot], count: int) -> bool:
        """Make one run, and say how it went; whether it is there now."""
        folder = self.out / RUNS / slot.folder
        folder.mkdir(parents=True, exist_ok=True)
        label = f"run {number} of {count}: {slot.name}, repeat {slot.repeat}"
        _say(f"{label} begins; its output: {folder / CONSOLE}")
        began = time.monotonic()
        arguments = [*slot.planned.arguments, f"--job.dump_folder={folder}"]
        code = run(launch(self.ranks, arguments), folder / CONSOLE, environment(self.machine.device_type))
        seconds = time.monotonic() - began
        done = self._done(slot)
        measured = None if done is None else measure(done, slot.name, slot.repeat, self.warmup)
        if code or done is None or measured is None:
            why = f"failed with exit code {code}" if code else f"left no metrics of {self.steps} steps in {folder}"
            _say(f"{label} {why}. Its last lines:")
            lines = escape("\n".join(f"    {line}" for line in last_lines(folder / CONSOLE)))
            print(lines, file=sys.stderr, flush=True)
            _say(
                f"all of its output: {folder / CONSOLE}; the same command tries it again, "
                f"--skip {slot.name} leaves it out"
            )
            return False
        self.finished[slot.folder] = done
        self._seconds.setdefault(slot.name, []).append(seconds)
        left = f"; about {human_time(self._left(after))} left" if after else ""
        speed = f"{measured.tokens_per_second:,.0f} tokens/s"
        _say(f"{label}: {speed}, loss {measured.losses[self.steps]:.4f}, in {human_time(seconds)}{left}")
        return True

    def _left(self, after: Sequence[Slot]) -> float:
        """Seconds that runs will take: as those of their level before, or as the mean of all."""
        everything = [seconds for mine in self._seconds.values() for seconds in mine]
        mine = (self._seconds.get(slot.name, everything) for slot in after)
        return sum(sum(seconds) / len(seconds) for seconds in mine)

    def _done(self, slot: Slot) -> Run | None:
        """The run of a slot, if it was trained to its end."""
        try:
            found = read_run(self.out / RUNS / slot.folder)
        except (RunError, OSError):
            return None
        steps = [int(row["step"]) for row in found.training]
        return found if found.state == "done" and steps and steps[-1] == self.steps else None

    def _find_inputs(self) -> dict[str, Any]:
        """What the figures depend on."""
        return {
            "steps": self.steps,
            **self.machine.hardware(self.ranks),
            "versions": provenance.versions(),
            "titanlite's files": self._source,
            "config": {one.level.name: _plain(one.values) for one in self.planned},
        }

    def _refuse_another(self) -> None:
        """Raise LadderError unless the folder's ladder, if there is one, has the same inputs."""
        state = read_state(self.out)
        if state is None:
            return
        before, now = state["inputs"], self._inputs
        # Levels may come and go; those that were left out stay known, for when they come again.
        known = before.get("config", {})
        shared = [name for name in known if name in now["config"]]
        sides = [{**side, "config": {name: side["config"][name] for name in shared}} for side in (before, now)]
        found = differences(*sides)
        now["config"] = {**known, **now["config"]}
        if found:
            more = [f"and {len(found) - _DIFFERENCES_SHOWN} more"] if len(found) > _DIFFERENCES_SHOWN else []
            lines = [f"  {line}" for line in (*found[:_DIFFERENCES_SHOWN], *more)]
            raise LadderError(
                "\n".join([f"{self.out} holds another ladder:", *lines, "begin this one elsewhere with --out FOLDER"])
            )

    def report(self) -> Report:
        names = [one.level.name for one in self.planned]
        slots = [slot for slot in in_turn(self.planned, self.repeats) if slot.folder in self.finished]
        measured = [measure(self.finished[s.folder], s.name, s.repeat, self.warmup) for s in slots]
        known = [one for one in measured if one is not None]
        unlike = {
            one.level.name: found
            for one in self.planned[1:]
            if (found := what_differs(self.planned[0].plans, one.plans))
        }
        figures = summarize(names, known, unlike)
        return Report(
            title=self.title,
            command=provenance.command(self.command),
            inputs=self._inputs,
            hardware=self.machine.hardware(self.ranks),
            versions=provenance.versions(),
            steps=self.steps,
            warmup=self.warmup,
            repeats=self.repeats,
            figures=figures,
            measured=known,
            notes=self._notes(known, unlike),
            about={one.level.name: one.level.about for one in self.planned},
        )

    def _notes(self, measured: Sequence[Measured], unlike: Mapping[str, Sequence[str]]) -> list[str]:
        notes = []
        emulated = [one.level.name for one in self.planned if one.emulates]
        if emulated:
            notes.append(
                f"float8 is emulated in {', '.join(emulated)}: their speed means nothing, it is the losses that show "
                "whether float8 computes what it should"
            )
        if self.machine.device_type == "cpu":
            notes.append("memory on a CPU is the resident memory of rank 0's process, the libraries included")
        for name, found in unlike.items():
            notes.append(f"{name} differs from {self.planned[0].level.name} in {', '.join(found)}: losses not compared")
        baseline = [one for one in measured if one.level == self.planned[0].level.name]
        spread = summarize([self.planned[0].level.name], baseline)[0].loss_spread
        if spread is not None:
            notes.append(f"between repeats of {self.planned[0].level.name} losses differ by at most {spread:.2g}")
        if source_hash() != self._source:
            notes.append("titanlite's own files changed while it ran: the runs are not all of one version")
        return notes

    def _save(self) -> Report:
        """Write all that is known; the report."""
        report = self.report()
        try:
            save_state(report, self.out)
        except OSError as error:
            raise LadderError(f"cannot write to {self.out}: {error.strerror or error}") from None
        return report

    def finish(self, report: Report) -> tuple[list[Path], str]:
        """Write the page and the pictures: what was written, and why a picture is missing. Raises LadderError."""
        runs: dict[str, Run] = {}
        for slot in in_turn(self.planned, self.repeats):
            if slot.folder in self.finished:
                runs.setdefault(slot.name, self.finished[slot.folder])
        names = [one.level.name for one in self.planned if one.level.name in runs]
        try:
            return save_pages(report, {name: runs[name] for name in names}, self.out)
        except OSError as error:
            raise LadderError(f"cannot write to {self.out}: {error.strerror or error}") from None


def read_state(out: Path) -> dict[str, Any] | None:
    """The ladder.json of a folder; None where there is none. Raises LadderError for what is no ladder's."""
    try:
        state = json.loads((out / STATE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LadderError(f"{out / STATE} cannot be read ({error}); move it away, or name another --out") from None
    if not isinstance(state, dict) or not isinstance(state.get("inputs"), dict):
        raise LadderError(f"{out / STATE} is no record of a ladder; name another --out")
    return state


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not the same in the inputs of two ladders, a line each."""
    sides = [_flat(before), _flat(now)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    unequal = (name for name in names if sides[0].get(name) != sides[1].get(name))
    return [f"{name}: {_shown(sides[0].get(name))} there, {_shown(sides[1].get(name))} now" for name in unequal]


def _flat(tree: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{lead}{name} ")
        else:
            found[lead + name] = value
    return found


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    found = json_value(value)
    return found if isinstance(found, str | int | float | bool | None) else str(found)


def source_hash() -> str:
    """A short hash over titanlite's Python files: figures of two versions of the code are not one ladder."""
    package = Path(titanlite.__file__).resolve().parent
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        total.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def _say(text: str) -> None:
    """A line of progress, on standard error: standard output is the table's."""
    print(f"{datetime.now():%H:%M:%S} {escape(text)}", file=sys.stderr, flush=True)
