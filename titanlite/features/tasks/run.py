"""The tasks of a run: when they are due, who runs them, and what becomes of the figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from titanlite.config.run_sections import Eval
from titanlite.exit_codes import no_exit
from titanlite.features.tasks.ranks import InterruptedTasksError, RankScorer
from titanlite.features.tasks.scoring import Scorer
from titanlite.step import do_nothing
from titanlite.utils import Table, human_time, logger, render

if TYPE_CHECKING:
    from titanlite.trainer import Trainer

#: Entry of a checkpoint's train state: the tasks of its step are to be run by the resumed run.
OWED = "tasks_owed"


class Task(Protocol):
    """What is measured under one name."""

    @property
    def name(self) -> str:
        """Of its figures."""
        ...

    def run(self, scorer: Scorer) -> dict[str, float]:
        """Return figures by name."""
        ...


class TaskRun:
    """Runs the tasks of `[eval]` while a model trains. All ranks call it together.

    tasks: of rank 0; the other ranks need none. weights: entered while the model is run, as
    `WeightAverage.applied`.
    """

    def __init__(
        self,
        section: Eval,
        tasks: Sequence[Task],
        scorer: RankScorer,
        weights: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.section = section
        #: Due and not done: a resumed run does it first.
        self.owed = False
        #: Takes a step and figures.
        self.write: Callable[[int, Mapping[str, float]], object] = do_nothing
        self._tasks = tasks
        self._scorer = scorer
        self._weights = weights
        #: Failures that were told.
        self._told: set[tuple[str, str]] = set()

    def is_due(self, step: int, steps: int) -> bool:
        """Whether the tasks run after a step. steps: of the whole run."""
        at_end = self.section.at_end and step >= steps
        return at_end or step % self.section.freq == 0

    def state_dict(self) -> dict[str, Any]:
        """Return entries for a checkpoint's train state."""
        return {OWED: True} if self.owed else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what the train state of a checkpoint says."""
        self.owed = bool(state.get(OWED))

    def run(self, trainer: Trainer) -> None:
        """Run the tasks and hand their figures on.

        A task that fails is told, and training continues. A stop leaves the tasks to the resumed
        run.
        """
        trainer.phase("evaluate")
        began = time.perf_counter()
        try:
            with trainer.stop.shield_children(), self._weights():
                found = self._measure(trainer)
        except InterruptedTasksError:
            trainer.stopping = True
            logger.info(f"the tasks at {trainer.step} were interrupted; the resumed run runs them")
            return
        self.owed = False
        trainer.phase("log")
        if self._scorer.place.leads:
            self._report(trainer.step, found, time.perf_counter() - began)

    def _measure(self, trainer: Trainer) -> dict[str, dict[str, float]]:
        """Return the figures of each task on rank 0, nothing on others."""
        scorer = self._scorer
        scorer.stop = trainer.stop
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
                self._tell(trainer.step, task.name, error)
        scorer.end()
        return found

    def _tell(self, step: int, name: str, error: Exception) -> None:
        """Warn of a task that failed, once for each reason."""
        reason = f"{type(error).__name__}: {error}"
        if (name, reason) in self._told:
            return
        self._told.add((name, reason))
        logger.warning(
            f"step {step}: the task {name} failed, training continues without it: {reason}"
        )

    def _report(self, step: int, found: Mapping[str, Mapping[str, float]], seconds: float) -> None:
        row: dict[str, float] = {}
        lines = []
        for name, figures in found.items():
            for metric, value in figures.items():
                row[f"eval/{name}/{metric}"] = value
                lines.append((name, metric, f"{value:.4f}"))
        title = f"tasks at {step}, in {human_time(seconds)}"
        if not lines:
            logger.info(f"{title}: no figures")
            return
        table = render(Table(("task", "figure", "value"), lines, (0, 1), title), terminal=False)
        for line in table.splitlines():
            logger.info(line)
        self.write(step, {**row, "eval_seconds": seconds})
