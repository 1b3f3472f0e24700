"""One run that many tests read, made once in a test session, also where several processes share the
tests.

Two ranks of `train.py` train 20 steps, and after a resume four more. They save and validate after
steps 10, 20 and 24. In step 5 a value on rank 1 is not finite, and the guard skips it. Step 20 is
profiled.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.support.ranks import check, train
from tests.support.run_folders import strict_lines
from tests.support.tiny import TWENTY_STEPS

STEPS = 20
MORE = 24
BAD_STEP = 5
#: Beside `TWENTY_STEPS`.
FLAGS = [
    "--guard.policy=skip",
    "--checkpoint.interval=10",
    "--metrics.layer_norms=3",
    "--metrics.enable_tensorboard",
    "--profiling.enable_profiling",
    "--profiling.profile_freq=20",
]


@dataclass(frozen=True)
class GoldenRun:
    """Tests read `folder`, and change only a copy of it."""

    folder: Path

    def rows(self, name: str = "loss") -> dict[int, dict[str, Any]]:
        """Return the rows of metrics.jsonl that have this figure, by step."""
        from titanlite.runs.read_jsonl import read_metrics

        return {
            row["step"]: row for row in read_metrics(self.folder / "metrics.jsonl") if name in row
        }

    def console(self) -> list[list[str]]:
        """Return what the console showed of the run and of its resume, without time stamps."""
        outputs = ((self.folder.parent / f"console-{steps}").read_text() for steps in (STEPS, MORE))
        return [[line[20:] for line in output.splitlines()] for output in outputs]

    def events(self) -> list[dict[str, Any]]:
        return strict_lines(self.folder / "guard.jsonl")

    def copy(self, target: Path, newest: int = MORE) -> Path:
        """Copy the run, with checkpoints up to this step."""
        shutil.copytree(
            self.folder,
            target,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("tb", "profile_traces"),
        )
        for step in {10, STEPS, MORE}:
            if step > newest:
                shutil.rmtree(target / "checkpoint" / f"step-{step}")
        return target


def golden_run(base: Path) -> GoldenRun:
    """Return the run below `base`, and make it first if there is none.

    base: a folder of the test session.
    """
    from filelock import FileLock  # of torch

    made = base / "golden"
    with FileLock(base / "golden.lock"):
        if not made.exists():
            aside = base / "golden.part"
            aside.mkdir()
            flags = [
                "--job.config_file=debug_model.toml",
                *TWENTY_STEPS,
                *FLAGS,
                f"--job.dump_folder={aside}/run",
            ]
            for steps in (STEPS, MORE):
                console = aside / f"console-{steps}"
                codes, said = train(
                    [*flags, f"--training.steps={steps}"],
                    2,
                    console,
                    main="tests.support.golden_run",
                )
                check(codes == [0, 0], "the golden run failed", said)
            aside.rename(made)
    return GoldenRun(made / "run")


def main() -> NoReturn:
    """Train as `train.py`; in one step a value of rank 1 is not finite."""
    from tests.support.faults import before_steps
    from titanlite import main as entry

    handles: list[Any] = []

    def spoil(step: int, model: Any, _: Any) -> None:
        while handles:
            handles.pop().remove()
        if step == BAD_STEP and os.environ["RANK"] == "1":
            w2 = model.get_submodule("layers.1.feed_forward.w2")
            handles.append(w2.register_forward_hook(lambda module, given, out: out * float("nan")))

    before_steps(spoil)
    entry.main()
