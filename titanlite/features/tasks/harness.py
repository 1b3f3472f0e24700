"""Tasks of lm-evaluation-harness (package `lm_eval`): found by name, loaded and run.

The package is imported when a task is loaded. Its tasks may hold code, which runs.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem, refuse, unfit
from titanlite.utils import pip_install

if TYPE_CHECKING:
    from titanlite.features.tasks.ranks import RankScorer
    from titanlite.features.tasks.scoring import Scorer

KEY = "eval.tasks"
#: The harness's package.
HARNESS = "lm_eval"
#: Seeds of the harness's own command, for the examples before a question.
_SEED, _FEWSHOT_SEED = 0, 1234
#: Endings and names of results that are no figures.
_NO_FIGURES = ("_stderr", "alias", "sample_len", "samples", "name", "sample_count")


@dataclass
class HarnessTask:
    """A task, group or tag of the harness, or a pattern of names.

    num_fewshot: examples before each question; None: the task's own number. limit: documents of
    each task; None: all.
    """

    name: str
    #: The tasks that the harness has loaded.
    loaded: dict[str, Any]
    num_fewshot: int | None = None
    limit: int | None = None

    def run(self, scorer: RankScorer) -> dict[str, float]:
        """Return the figures, with the task's name before them within a group or tag."""
        with _watched(scorer):
            found = self.evaluate(scorer, iterations=0)
        # A group has figures, or its tasks have.
        results = found["results"]
        shown = {self.name: results[self.name]} if self.name in results else results
        figures: dict[str, float] = {}
        for task, row in shown.items():
            for metric, value in _figures(row):
                figures[metric if task == self.name else f"{task}/{metric}"] = value
        return figures

    def evaluate(self, scorer: Scorer, iterations: int) -> dict[str, Any]:
        """iterations: of the harness's bootstrap; 0: no standard errors."""
        from lm_eval.evaluator import evaluate

        from titanlite.features.tasks.harness_model import HarnessModel

        for task in self.loaded["tasks"].values():
            # As the harness's own command: a task that says 0 keeps it, one without a number has
            # none.
            own = task.get_config("num_fewshot")
            if own is None or (self.num_fewshot is not None and own != 0):
                task.set_config(key="num_fewshot", value=self.num_fewshot or 0)
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        with _seeded():
            found: dict[str, Any] = evaluate(
                HarnessModel(scorer),
                self.loaded,
                limit=self.limit,
                bootstrap_iters=iterations,
                log_samples=False,
            )
        return found


def load_tasks(
    names: Sequence[str],
    include_path: str | None,
    num_fewshot: int | None,
    limit: int | None,
    key: str = KEY,
) -> list[HarnessTask]:
    """Load tasks by name. key: names them in a config or on the command line.

    Raises ConfigError for unknown names, or tasks that cannot be loaded, also for want of a
    network.
    """
    if importlib.util.find_spec(HARNESS) is None:
        message = f"lm-evaluation-harness is not installed: {pip_install(HARNESS)}"
        raise unfit(key, message, code="missing-package")
    if include_path is not None and not Path(include_path).is_dir():
        raise unfit("eval.include_path", f"there is no folder {include_path}")
    with _seeded():
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=include_path)
    problems = []
    for name in names:
        if not manager.match_tasks([name]):
            message = f"the harness has no task {name!r}"
            hint = "`lm_eval ls tasks` lists them; an include path adds yours"
            problems.append(Problem("unknown-value", key, message, hint))
    refuse(problems)
    found = []
    for name in names:
        try:
            with _seeded():
                loaded = manager.load(manager.match_tasks([name]))
            found.append(HarnessTask(name, loaded, num_fewshot, limit))
            if any(one.OUTPUT_TYPE == "generate_until" for one in loaded["tasks"].values()):
                message = f"the task {name} continues texts, one token after the other"
                hint = "`titanlite export`, and `lm_eval --model vllm` (docs/evaluation.md)"
                problems.append(Problem("conflict", key, message, hint))
        except Exception as error:
            message = f"the task {name} cannot be loaded: {type(error).__name__}: {error}"
            hint = (
                "correct its file; without a network its data must be in the cache "
                "(docs/evaluation.md)"
            )
            problems.append(Problem("unreadable", key, message, hint))
    refuse(problems)
    return found


def _figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        metric, _, kept = key.partition(",")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not kept or not is_number or metric.endswith(_NO_FIGURES):
            continue
        yield metric if kept == "none" else f"{metric}/{kept}", float(value)


@contextmanager
def _seeded() -> Iterator[None]:
    import numpy as np
    import torch

    kept = random.getstate()
    kept_numpy = np.random.get_state()
    random.seed(_SEED)
    np.random.seed(_FEWSHOT_SEED)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(kept)
        np.random.set_state(kept_numpy)


@contextmanager
def _watched(scorer: RankScorer) -> Iterator[None]:
    """Replace progress bars, which would cut the log: other ranks hear of rank 0's long work
    instead.
    """
    from lm_eval.api import model, task

    bars = [(module, module.tqdm) for module in (model, task) if hasattr(module, "tqdm")]
    for module, _ in bars:
        module.tqdm = lambda items, *_, **__: scorer.waiting(items)
    try:
        yield
    finally:
        for module, bar in bars:
            module.tqdm = bar
