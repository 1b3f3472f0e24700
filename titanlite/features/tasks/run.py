"""The tasks of a run: when they are due, who runs them, and what becomes of the figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from titanlite.callbacks import Callback
from titanlite.config.run_sections import Eval
from titanlite.exit_codes import no_exit
from titanlite.features.tasks.ranks import InterruptedTasksError, RankScorer
from titanlite.runs.text_tables import Table, render
from titanlite.utils import human_time, logger

if TYPE_CHECKING:
    from titanlite.features.tasks.harness import HarnessTask
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer

#: Their name among what a run owes.
NAME = "tasks"


class TaskRun(Callback):
    """Runs the tasks of `[eval]` while a model trains. All ranks call it together.

    tasks: of rank 0 alone. weights: entered while the model is run, as `WeightAverage.applied`.
    write: takes a step and figures.
    """

    owes = NAME

    def __init__(
        self,
        section: Eval,
        tasks: Sequence[HarnessTask],
        scorer: RankScorer,
        weights: Callable[[], AbstractContextManager[object]],
        write: Callable[[int, Mapping[str, float]], object],
    ) -> None:
        self._section = section
        self._tasks = tasks
        self._scorer = scorer
        self._weights = weights
        self._write = write

    def on_start(self, trainer: Trainer) -> None:
        """Run the tasks that an earlier attempt has left."""
        if NAME in trainer.owed:
            self._run(trainer)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        step = trainer.step
        at_end = self._section.at_end and step >= trainer.steps
        if not at_end and step % self._section.freq:
            return
        trainer.sync_guard()
        trainer.owed.add(NAME)  # until they are done
        if not trainer.stopping:
            self._run(trainer)

    def _run(self, trainer: Trainer) -> None:
        """A task that fails does not end the training. A stop leaves the tasks to the
        resumed run.
        """
        trainer.owed.add(NAME)
        trainer.phase("evaluate")
        began = time.perf_counter()
        try:
            with trainer.stop.shield_children(), self._weights():
                found = self._measure(trainer)
        except InterruptedTasksError:
            trainer.stopping = True
            logger.info(f"the tasks at {trainer.step} were interrupted; the resumed run runs them")
            return
        trainer.owed.discard(NAME)
        trainer.phase("log")
        if self._scorer.place.leads:
            self._report(trainer.step, found, time.perf_counter() - began)

    def _measure(self, trainer: Trainer) -> dict[str, dict[str, float]]:
        scorer = self._scorer
        scorer.stop = trainer.stop
        scorer.tick = lambda: trainer.phase("evaluate")
        found: dict[str, dict[str, float]] = {}
        if not self._scorer.place.leads:
            scorer.follow()
            return found
        for task in self._tasks:
            try:
                with no_exit(f"the task {task.name}"):
                    found[task.name] = task.run(scorer)
            except Exception as error:
                if scorer.failed:
                    raise
                logger.warning(
                    f"step {trainer.step}: the task {task.name} failed, training continues "
                    f"without it: {type(error).__name__}: {error}"
                )
        scorer.end()
        return found

    def _report(self, step: int, found: Mapping[str, Mapping[str, float]], seconds: float) -> None:
        row: dict[str, float] = {}
        lines = []
        for name, figures in found.items():
            for metric, value in figures.items():
                row[f"eval/{name}/{metric}"] = value
                lines.append((name, metric, f"{value:.4f}"))
        title = f"tasks at {step}, in {human_time(seconds)}"
        table = render(Table(("task", "figure", "value"), lines, (0, 1), title), terminal=False)
        for line in table.splitlines():
            logger.info(line)
        self._write(step, {**row, "eval_seconds": seconds})
