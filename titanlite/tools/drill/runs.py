"""The runs of a drill, and what is compared of two runs; the tests compare the same."""

from __future__ import annotations

import re
import shutil
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.metrics.jsonl import read_metrics
from titanlite.tools.drill.config import HALF, STEPS, TinyConfig
from titanlite.tools.drill.faults import NO_FAULT, Fault
from titanlite.tools.drill.ranks import check, train


@dataclass
class Workspace:
    """The folder of a drill: a whole run, the first half of one, and a run per scenario.

    The first two have no fault.

    Methods raise RanksError when a run does not end as expected.
    """

    tiny: TinyConfig
    folder: Path

    def make_references(self) -> None:
        """Train the runs without a fault."""
        self.train(self.folder / "whole")
        self.train(self.folder / "half", f"--training.steps={HALF}")
        check(HALF in saved_steps(self.folder / "half"), f"no checkpoint of step {HALF} was saved")

    def begin(self, name: str) -> Path:
        """Make the folder of a run that holds the first half."""
        return shutil.copytree(self.folder / "half", self.folder / name)

    def train(
        self, run: Path, *flags: str, fault: Fault = NO_FAULT, code: int = 0, ranks: int = 0
    ) -> str:
        """Train once to the end and return the output. ranks: 0 for those of the drill.

        The struck rank must end with exit code `code`. The others end with the same, or with
        LOST_PEER after a kill.
        """
        run.mkdir(exist_ok=True)
        folders = [f"--job.dump_folder={run}", f"--data.token_cache={self.folder / 'tokens'}"]
        arguments = [*self.tiny.arguments, *folders, *flags]
        codes, text = train(arguments, ranks or self.tiny.ranks, run / "console.log", fault)
        expected = [exit_codes.LOST_PEER if code == -signal.SIGKILL else code] * len(codes)
        expected[fault.rank] = code
        check(codes == expected, f"exit codes {codes}, not {expected}", text)
        return text

    def finish(self, run: Path, step: int, *flags: str) -> str:
        """Resume a run from `step`, train to its end and compare it with the whole run.

        Return the output.
        """
        text = self.train(run, *flags)
        check_resumed(text, step)
        self.compare(run)
        return text

    def compare(self, run: Path, like: str = "whole") -> None:
        """Check that two runs have the same figures in each step, and the same last checkpoint."""
        ours = Counter(records(run))
        theirs = Counter(records(self.folder / like))
        unlike = sorted({step for step, *_ in (ours - theirs) + (theirs - ours)})
        check(not unlike, f"steps {unlike} differ from those of the run {like!r}")
        tensors = differing(checkpoint(run), checkpoint(self.folder / like))
        problem = f"{tensors[:3]} in the last checkpoint differ from those of the run {like!r}"
        check(not tensors, problem)


def differing(left: Path, right: Path) -> list[str]:
    """Return the tensors of two checkpoints that are not equal bit for bit."""
    # It imports torch.
    from titanlite.tools.hub.tensors import Contents, compare

    found = compare(Contents(left), Contents(right))
    return [one.name for one in found if one.elements or one.left != one.right]


def checkpoint(run: Path, step: int = STEPS) -> Path:
    """Return the folder of a checkpoint of a run."""
    return run / "checkpoint" / f"step-{step}"


def saved_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints of a run, ascending."""
    names = [path.parent.name[5:] for path in (run / "checkpoint").glob("step-*/manifest.json")]
    return sorted(int(name) for name in names if name.isdigit())


def records(run: Path, needed: str = "") -> list[tuple[Any, ...]]:
    """Return the rows of metrics.jsonl that have the figure `needed`, without times and memory."""
    kept = ("loss", "grad_norm", "lr", "tokens_seen", "validation_loss", "validation_tokens")
    found: list[tuple[Any, ...]] = []
    for row in read_metrics(run / "metrics.jsonl"):
        if not needed or needed in row:
            figures = [(key, row[key]) for key in kept if key in row]
            found.append((row["step"], *figures))
    return found


def check_resumed(text: str, step: int) -> None:
    """Fail unless a run resumed from this step. text: its output."""
    found = re.findall(r"resumed from step (\d+)", text)
    problem = f"the run resumed from step {', '.join(found) or 'none'}, not {step}"
    check(found == [str(step)], problem, text)
