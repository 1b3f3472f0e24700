"""Tasks of lm-evaluation-harness that measure a model while it trains.

    harness.py         finds and runs them   run.py       when they run, and their figures
    harness_model.py   the model they ask    ranks.py     … on the ranks of a run
    scoring.py         requests, batches and sums

The key is `eval.tasks`. `titanlite eval` uses the same files for a checkpoint on one device. Those
that need torch or the package `lm_eval` are imported where they are used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.features.tasks.harness import HARNESS, KEY, HarnessTask, load_tasks
from titanlite.run.features import Feature, Row
from titanlite.utils import pip_install

if TYPE_CHECKING:
    from torch import nn

    from titanlite.assembly.build import TrainingComponents
    from titanlite.config.sections import Config
    from titanlite.data.dataset_builder import Share
    from titanlite.features.tasks.run import TaskRun
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.run.config import RunConfig
    from titanlite.run.features import Write


class TaskEvaluation(Feature):
    """Tasks in a run that names some."""

    key = KEY

    def __init__(self, config: Config) -> None:
        self.section = config.eval

    # Before the ranks start

    def missing_packages(self, is_installed: Callable[[str], bool]) -> Iterator[Problem]:
        if not is_installed(HARNESS):
            message = "needs the package lm-eval, which is not installed"
            remedy = f"{pip_install(HARNESS)}, or leave the key out"
            yield Problem("missing-package", KEY, message, remedy)

    # The tasks: `titanlite.assembly.datasets` calls this

    def load(self, run: RunConfig, share: Share) -> Sequence[HarnessTask]:
        """Load the tasks on rank 0 alone.

        Raises ConfigError for tasks that cannot be loaded, or cannot run beside training.
        """
        found: list[HarnessTask] = []

        def load() -> None:
            import datasets

            logging.getLogger(HARNESS).setLevel(logging.ERROR)
            datasets.disable_progress_bars()
            s = self.section
            found.extend(load_tasks(s.tasks, s.include_path, s.num_fewshot, s.limit))

        share("the tasks", load)
        return found

    # The run

    def callbacks(self, parts: TrainingComponents, write: Write) -> Iterator[TaskRun]:
        """An evaluation may end with the save of a run."""
        from titanlite.features.context.loader import split_batch
        from titanlite.features.tasks.ranks import Place, RankScorer
        from titanlite.features.tasks.run import TaskRun
        from titanlite.features.tasks.scoring import Subject

        run = parts.run
        model = parts.model_parts
        mesh = run.mesh
        # Tensor-parallel ranks share rows evenly; those of a context have two chunks each.
        multiple = mesh.tensor * (2 * mesh.context if mesh.context > 1 else 1)
        longest = model.args.max_seq_len
        subject = Subject(
            model.model,
            parts.datasets.tokenizer,
            longest - longest % multiple,
            parts.world.device,
        )
        size = self.section.batch_size or run.validation.batch_size or run.batch.micro_batch_size
        counts = model.mesh.get_local_rank("tp") == 0
        place = Place(*parts.loaders.share, counts, leads=parts.world.rank == 0)
        scorer = RankScorer(
            subject,
            parts.train_step.runner,
            (size, multiple),
            place,
            lambda batch: split_batch(batch, model.mesh),
        )
        weights: Any = contextlib.nullcontext
        if self.section.ema and parts.average is not None:
            weights = parts.average.applied
        yield TaskRun(self.section, parts.datasets.tasks, scorer, weights, write)

    # The start report

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        when = f"every {self.section.freq:,} steps"
        if self.section.at_end:
            when += " and at the end"
        weights = ", with the average of the weights" if self.section.ema else ""
        yield "tasks", f"{', '.join(self.section.tasks)}: {when}{weights}"
