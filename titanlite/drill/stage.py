"""Where rehearsals play: runs at toy size, one that nothing happens to, and what is compared with it."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.checkpoint.manifest import step_folder, steps_in
from titanlite.drill.compare import unequal_tensors
from titanlite.drill.ranks import train
from titanlite.drill.shrink import HALF, STEPS, Toy
from titanlite.drill.strike import Strike
from titanlite.metrics.jsonl import read_metrics


class Failed(Exception):
    """A rehearsal did not go as it must; the text says what was wrong."""


@dataclass
class Stage:
    """Where the rehearsals of one drill play: a run without harm, and the first half of one, to begin from."""

    toy: Toy
    folder: Path
    #: From the start to the end of the first half: the yardstick for what must not take long on this machine.
    half_run_seconds: float = 0.0

    @property
    def whole(self) -> Path:
        return self.folder / "undisturbed"

    @property
    def half(self) -> Path:
        return self.folder / "half"

    def make_reference(self) -> None:
        """Raises Failed when the toy does not even train."""
        self.end(self.whole)
        began = time.monotonic()
        self.end(self.half, f"--training.steps={HALF}")
        self.half_run_seconds = time.monotonic() - began
        for run, last in ((self.whole, STEPS), (self.half, HALF)):
            check(last in steps_in(run / "checkpoint"), f"a run without harm wrote no checkpoint of step {last}")

    def new(self, name: str) -> Path:
        """The folder of a run that begins at its first step."""
        return self.folder / name

    def begin(self, name: str) -> Path:
        """A run folder with the first half in it."""
        run = self.folder / name
        shutil.copytree(self.half, run)
        return run

    def start(self, run: Path, *more: str, strike: Strike | None = None, alone: bool = False) -> tuple[list[int], str]:
        """One start to its end: exit codes by rank, and what was printed."""
        arguments = self.toy.alone if alone else self.toy.arguments
        run.mkdir(exist_ok=True)
        return train(
            [*arguments, f"--job.dump_folder={run}", *more], 1 if alone else self.toy.ranks, console(run), strike
        )

    def end(self, run: Path, *more: str, resumed: int | None = None) -> str:
        """A start without harm that must come to its end; what was printed. resumed: the step it must go on from."""
        codes, text = self.start(run, *more)
        check(codes == [exit_codes.DONE] * len(codes), f"a start without harm ended with {codes}", text)
        if resumed is not None:
            went_on(text, resumed)
        return text

    def same(self, run: Path, other: Path | None = None) -> None:
        """Raises Failed unless a run is, step by step and bit by bit, the one that nothing happened to, or `other`."""
        other = other or self.whole
        named = "the run that nothing happened to" if other == self.whole else f"the run {other.name}"
        ours, theirs = records(run), records(other)
        kinds = [(step, *(name for name, _ in figures)) for step, *figures in ours]
        twice = sorted({kind[0] for kind in kinds if kinds.count(kind) > 1})
        check(not twice, f"metrics.jsonl has steps {twice} more than once")
        unlike = sorted({step for step, *_ in set(ours) ^ set(theirs)})
        check(not unlike, f"steps {unlike} have other numbers than in {named}")
        names = unequal_tensors(step_folder(run / "checkpoint", STEPS), step_folder(other / "checkpoint", STEPS))
        check(not names, f"{len(names)} tensors differ at the end, {', '.join(names[:3])} among them")


def console(run: Path) -> Path:
    return run / "console.log"


def check(fine: bool, problem: str, text: str = "") -> None:
    """Raises Failed with the problem, and with the last lines of an output."""
    if not fine:
        last = "".join(f"\n    {line}" for line in text.splitlines()[-6:])
        raise Failed(problem + (":" + last if last else ""))


def went_on(text: str, step: int) -> None:
    found = re.findall(r"resumed from step (\d+)", text)
    check(found == [str(step)], f"the next start resumed from step {', '.join(found) or 'none'}, not {step}", text)


def records(run: Path) -> list[tuple[Any, ...]]:
    """The rows of metrics.jsonl, a step's and its validation's, but for times and memory."""
    kept = ("loss", "grad_norm", "lr", "tokens_seen", "validation_loss", "validation_tokens")
    rows = read_metrics(run / "metrics.jsonl")
    return [(row["step"], *((key, row[key]) for key in kept if key in row)) for row in rows]
