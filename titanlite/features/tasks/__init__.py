"""Tasks that measure a model while it trains: what titanlite knows of them, moment by moment.

    entries.py         the entries of the key           run.py       when they run, and figures
    own_files.py       texts and questions in files     ranks.py     … on the ranks of a run
    harness.py         tasks of lm-evaluation-harness   scoring.py   requests, batches and sums
    harness_model.py   the model as the harness asks it

The key is `eval.tasks`. `titanlite eval` uses the same files for a checkpoint on one device. Those
that need torch or the package `lm_eval` are imported where they are used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem, refuse
from titanlite.features.tasks import entries
from titanlite.run.features import Feature, Row
from titanlite.utils import pip_install

if TYPE_CHECKING:
    from torch import nn

    from titanlite.assembly.build import TrainingComponents
    from titanlite.config.loaded import LoadedConfig
    from titanlite.config.sections import Config
    from titanlite.data.text import Share
    from titanlite.features.tasks.harness import HarnessTask
    from titanlite.features.tasks.run import Task, TaskRun
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.run.config import RunConfig


class TaskEvaluation(Feature):
    """Tasks in a run that names some."""

    key = entries.KEY

    def __init__(self, config: Config) -> None:
        self.section = config.eval

    # Before the ranks start

    def contradictions(self, config: LoadedConfig) -> Iterator[Problem]:
        """Find entries that cannot be told apart, and keys for tasks that are not there."""
        section = config.sections.eval
        yield from entries.entry_problems(section.tasks)
        if entries.harness_names(section.tasks):
            return
        for name in ("num_fewshot", "include_path"):
            if getattr(section, name) is not None:
                message = "is for tasks of lm-evaluation-harness, and eval.tasks has files alone"
                yield Problem("conflict", f"eval.{name}", message, "leave it out")

    def missing_packages(self, is_installed: Callable[[str], bool]) -> Iterator[Problem]:
        """Find tasks whose package is not installed."""
        names = entries.harness_names(self.section.tasks)
        if names and not is_installed(entries.HARNESS):
            message = f"needs the package lm-eval for {', '.join(names)}, which is not installed"
            remedy = f"{pip_install(entries.HARNESS)}, or leave them out"
            yield Problem("missing-package", self.key, message, remedy)

    def model_problems(self, run: RunConfig, args: Any) -> Iterator[Problem]:
        """Check that padding changes nothing where ranks share sequences."""
        scaling = getattr(args, "rope_scaling", None)
        above = getattr(scaling, "varies_above", None)
        shared = run.mesh.tensor * run.mesh.context > 1
        if above is None or run.max_seq_len <= above or not shared:
            return
        message = (
            f"cannot be exact: above {above} tokens RoPE tables depend on the length, and these "
            "ranks pad a text"
        )
        yield Problem("conflict", self.key, message, "evaluate checkpoints by `titanlite eval`")

    # The tasks: `titanlite.assembly.datasets` calls this

    def load(self, run: RunConfig, share: Share) -> Sequence[Task]:
        """Read files and load tasks, on rank 0 alone; others get none.

        Raises DataError with file and record, ConfigError for tasks that cannot be loaded.
        """
        found: list[Task] = []
        share("the tasks", lambda: found.extend(self._loaded(run)))
        return found

    def _loaded(self, run: RunConfig) -> Iterator[Task]:
        """Yield the tasks in the order of the entries."""
        from titanlite.features.tasks.own_files import read_own

        section = self.section
        names = entries.harness_names(section.tasks)
        by_name: dict[str, Task] = {}
        for path in section.tasks:
            if path not in names:
                by_name[path] = read_own(path, run.data.text_key or "text", section.limit)
        if names:
            import datasets

            from titanlite.features.tasks.harness import load_tasks

            logging.getLogger(entries.HARNESS).setLevel(logging.ERROR)
            datasets.disable_progress_bars()
            tasks = load_tasks(names, section.include_path, section.num_fewshot, section.limit)
            _refuse_unfit(tasks, run)
            by_name |= {task.name: task for task in tasks}
        for entry in section.tasks:
            yield by_name[entry]

    # The run: `titanlite.assembly.callbacks` calls this

    def begin(
        self, parts: TrainingComponents, write: Callable[[int, Mapping[str, float]], object]
    ) -> TaskRun:
        """Return what runs the tasks on this rank. write: takes a step and figures."""
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
            run.spec.head,
            frozenset(parts.datasets.tokenizer.stop_ids),
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
        return TaskRun(self.section, parts.datasets.tasks, scorer, weights, write)

    # The start report

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        names = ", ".join(map(entries.name_of, self.section.tasks))
        when = f"every {self.section.freq:,} steps"
        if self.section.at_end:
            when += " and at the end"
        weights = ", with the average of the weights" if self.section.ema else ""
        yield "tasks", f"{names}: {when}{weights}"


def _refuse_unfit(tasks: Sequence[HarnessTask], run: RunConfig) -> None:
    """Raise ConfigError for tasks that cannot be run beside training, or not on these ranks."""
    problems = []
    for task in tasks:
        if task.runs_code:
            message = f"the task {task.name} runs code that the model writes"
            hint = "run it apart from training"
            problems.append(Problem("conflict", entries.KEY, message, hint))
        if task.writes and run.mesh.pipeline * run.mesh.context > 1:
            message = (
                f"the task {task.name} continues texts, and ranks that share layers or sequences "
                "cannot"
            )
            hint = "run it by `titanlite eval`"
            problems.append(Problem("conflict", entries.KEY, message, hint))
    refuse(problems)
