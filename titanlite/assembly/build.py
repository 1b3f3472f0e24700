"""Config and ranks → components of a training loop.

    parts = build(load_config("debug_model.toml", world.size), world)

`titanlite.assembly` has a file for each part: model and step, loaders, checkpoints, callbacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.assembly.callbacks import build_callbacks
from titanlite.assembly.datasets import Datasets, read_datasets
from titanlite.assembly.loaders import LoaderParts, build_loaders
from titanlite.assembly.model import ModelParts, build_model, build_step
from titanlite.assembly.preflight import check_model
from titanlite.callbacks import Callback, Callbacks
from titanlite.config.errors import unfit
from titanlite.data.prefetch import Prefetcher
from titanlite.data.step_sizes import FRESH, Course, StepSize
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics.console import ensure_console
from titanlite.optim.schedule import LearningRate
from titanlite.parallel.init import fix_workspace, use_deterministic
from titanlite.run.config import RunConfig
from titanlite.run.length import with_length
from titanlite.step import TrainStep, do_nothing
from titanlite.validation import ValidationSet

if TYPE_CHECKING:
    from titanlite.assembly.saves import SaveParts
    from titanlite.checkpoint.manager import Checkpointer
    from titanlite.data.phases import Phases
    from titanlite.features.ema.average import WeightAverage
    from titanlite.metrics.bad_step_log import AnomalyLog
    from titanlite.metrics.phase_tracker import Position


@dataclass
class TrainingComponents:
    """The parts of a training loop, on this rank."""

    run: RunConfig
    world: DistEnv
    datasets: Datasets
    #: The model with what built it and what runs it.
    model_parts: ModelParts
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    train_step: TrainStep
    #: None where no average is kept.
    average: WeightAverage | None
    loaders: LoaderParts
    #: None where checkpoints are off.
    saves: SaveParts | None
    #: The sizes of the steps from where the run started or went back to.
    course: Course
    callbacks: list[Callback] = field(default_factory=list)
    #: Service → id of the run there, for checkpoints.
    trackers: Callable[[], dict[str, str]] = dict

    @property
    def mesh(self) -> DeviceMesh:
        """All dimensions, also those of one rank."""
        return self.model_parts.mesh

    @property
    def args(self) -> Any:
        """The model's arguments."""
        return self.model_parts.args

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        return self.model_parts.model

    @property
    def loader(self) -> Prefetcher:
        """The batches of this rank."""
        return self.loaders.train

    @property
    def validation(self) -> ValidationSet | None:
        """The held-out batches of this rank."""
        return self.loaders.validation

    @property
    def phases(self) -> Phases | None:
        """The `[[data.phase]]` tables; None: there are none, no mixture, no schedule in tokens."""
        return self.loaders.phases

    @property
    def checkpointer(self) -> Checkpointer | None:
        """None where checkpoints are off."""
        return None if self.saves is None else self.saves.checkpointer

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        assert self.run.steps is not None
        return self.run.steps

    @cached_property
    def resize(self) -> Callable[[StepSize], object]:
        """The object that fits the model's parts to the size of a step."""
        if not self.run.data.phase:
            return do_nothing
        from titanlite.assembly.phase_resize import Resizer

        return Resizer(self.run, self.model_parts, self.loaders.course.size(1))

    @cached_property
    def anomalies(self) -> AnomalyLog:
        """Parts that report bad steps."""
        from titanlite.metrics.bad_step_log import AnomalyLog

        return AnomalyLog(self)

    def close(self) -> None:
        """End the threads; what cannot be closed does not keep the rest open."""
        with contextlib.ExitStack() as stack:
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.close)
            stack.callback(self.loader.close)


def build(
    run: RunConfig,
    world: DistEnv,
    datasets: Datasets | None = None,
    watchdog: Position | None = None,
    callbacks: Sequence[Callback] | None = None,
) -> TrainingComponents:
    """Build everything that a loop needs, on this rank's device. All ranks call it together.

    datasets: None: of `read_datasets`. watchdog: entered by the caller; None: one that only logs.
    callbacks: run after titanlite's own; None: those of `job.callbacks`. Raises ConfigError.
    """
    ensure_console(world.rank)
    own = callbacks or ()
    if callbacks is None and run.job.callbacks:
        from titanlite.assembly.own_callbacks import load_callbacks

        own = load_callbacks(run.job.callbacks)
    if run.optimizer.early_step_in_backward and Callbacks(own).have("before_update"):
        key = "optimizer.early_step_in_backward"
        raise unfit(key, "excludes callbacks with before_update: gradients never exist all at once")
    datasets = datasets or read_datasets(run)
    if run.steps is None:
        run = with_length(run, datasets.train.total_sequences or 0)
    check_model(run, datasets.tokenizer.vocab_size)
    if run.debug.deterministic:
        fix_workspace()
    if run.launch.preflight and world.size > 1:
        from titanlite.assembly.rank_checks import compare_ranks

        compare_ranks(run, world, datasets)
    model = build_model(run, world, datasets.tokenizer.vocab_size)
    optimizer, step = build_step(run, model)
    average = ema.begin(model.model) if (ema := run.features.ema) else None
    loaders = build_loaders(run, model.mesh, datasets, average)
    rate = LearningRate(run.schedule, run.optimizer.peak_lr, course=loaders.course)
    if loaders.phases is not None:
        rate.follow(loaders.phases, FRESH)
    saves = None
    if run.checkpoint.enable_checkpoint:
        from titanlite.assembly.saves import build_saves

        saves = build_saves(run, world, model.args, datasets, average)
    parts = TrainingComponents(
        run=run,
        world=world,
        datasets=datasets,
        model_parts=model,
        optimizer=optimizer,
        learning_rate=rate,
        train_step=step,
        average=average,
        loaders=loaders,
        saves=saves,
        course=loaders.course,
    )
    parts.callbacks, parts.trackers = build_callbacks(parts, watchdog, own)
    if run.debug.deterministic:
        use_deterministic(run.debug.deterministic_warn_only)
    return parts
