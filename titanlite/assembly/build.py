"""Config and ranks → components of a training loop.

    parts = build(load_config("debug_model.toml", world.size), world)

`titanlite.start` has a file for each part: model and step, loaders, checkpoints, callbacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.assembly.callbacks import build_callbacks, prompt_sampler
from titanlite.assembly.datasets import Datasets, read_datasets
from titanlite.assembly.loaders import LoaderParts, build_loaders
from titanlite.assembly.model import ModelParts, build_model, build_step
from titanlite.assembly.own_callbacks import load_callbacks
from titanlite.assembly.preflight import check_model
from titanlite.callbacks import Callback, Callbacks
from titanlite.config.errors import ConfigError, Problem
from titanlite.data.course import Course, StepSize
from titanlite.data.prefetch import Prefetcher
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics.anomalies import AnomalyLog
from titanlite.metrics.console import ensure_console
from titanlite.models.spec import ModelSpec
from titanlite.optim.schedule import LearningRate
from titanlite.parallel.init import fix_workspace, use_deterministic
from titanlite.run.config import RunConfig
from titanlite.run.length import with_length
from titanlite.step import TrainStep, do_nothing
from titanlite.validation import ValidationSet

if TYPE_CHECKING:
    from titanlite.assembly.saves import SaveParts
    from titanlite.checkpoint.manager import Checkpointer
    from titanlite.checkpoint.schedule import SaveSchedule
    from titanlite.data.phases import Phases
    from titanlite.features.ema.average import WeightAverage
    from titanlite.metrics.watchdog import HangWatchdog


@dataclass
class TrainingComponents:
    """What a training loop is made of, on this rank."""

    world: DistEnv
    mesh: DeviceMesh
    spec: ModelSpec
    #: The model's arguments.
    args: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    train_step: TrainStep
    loader: Prefetcher
    validation: ValidationSet | None
    datasets: Datasets
    #: None where checkpoints are off.
    checkpointer: Checkpointer | None
    save_schedule: SaveSchedule | None
    anomalies: AnomalyLog
    callbacks: list[Callback]
    #: Service → id of the run there, for checkpoints.
    trackers: Callable[[], dict[str, str]]
    #: Of the whole run.
    steps: int
    #: Sequences and tokens of the first step, over all ranks.
    global_batch_size: int
    tokens_per_step: int
    #: The sizes of the steps from where the run started or went back to.
    course: Course
    #: Type of the weights in the last save, which holds nothing else; None: it is as all others.
    last_save_dtype: str | None = None
    exclude_from_loading: Sequence[str] = ()
    #: The `[[data.phase]]` tables; None: there are none, no mixture, and a schedule in steps.
    phases: Phases | None = None
    #: Fits the model's parts to the size of a step.
    resize: Callable[[StepSize], object] = do_nothing

    def close(self) -> None:
        """End the threads; what cannot be closed does not keep the rest open."""
        with contextlib.ExitStack() as stack:
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.close)
            if self.validation is not None:
                stack.callback(self.validation.close)
            stack.callback(self.loader.close)


@dataclass(frozen=True)
class Built:
    """What a run has before its callbacks."""

    run: RunConfig
    #: Steps of the run.
    steps: int
    world: DistEnv
    datasets: Datasets
    model: ModelParts
    optimizer: torch.optim.Optimizer
    train_step: TrainStep
    #: None where no average is kept.
    average: WeightAverage | None
    loaders: LoaderParts
    #: None where checkpoints are off.
    saves: SaveParts | None


def build(
    run: RunConfig,
    world: DistEnv,
    datasets: Datasets | None = None,
    watchdog: HangWatchdog | None = None,
    callbacks: Sequence[Callback] | None = None,
) -> TrainingComponents:
    """Build everything that a loop needs, on this rank's device. All ranks call it together.

    datasets: of `read_datasets`; None: read here. watchdog: entered by the caller; None: one that
    only logs. callbacks: run after titanlite's own; None: those of `job.callbacks`. Raises
    ConfigError as `check_model` does.
    """
    ensure_console(world.rank)
    own = load_callbacks(run.job.callbacks) if callbacks is None else callbacks
    datasets = datasets or read_datasets(run)
    if run.steps is None:
        run = with_length(run, datasets.train.total_sequences or 0)
    assert run.steps is not None
    check_model(run, datasets.tokenizer.vocab_size)
    if run.launch.preflight and run.debug.deterministic:
        fix_workspace()
    if run.launch.preflight and world.size > 1:
        from titanlite.assembly.rank_checks import compare_ranks

        compare_ranks(run, world, datasets)
    sampler = prompt_sampler(run, datasets)
    model = build_model(run, world, datasets.tokenizer.vocab_size)
    optimizer, step = build_step(run, model)
    _check_updates(step, own)
    ema = run.features.ema
    average = None if ema is None else ema.begin(model.model)
    loaders = build_loaders(run, model.mesh, datasets, average)
    saves = _saves(run, world, model, datasets, loaders, average)
    built = Built(run, run.steps, world, datasets, model, optimizer, step, average, loaders, saves)
    every, trackers = build_callbacks(built, watchdog, sampler, own)
    if run.debug.deterministic:
        use_deterministic(run.debug.deterministic_warn_only)
    return _components(built, every, trackers)


def _check_updates(step: TrainStep, callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError where a callback needs a moment that the step does not have."""
    if step.in_backward is not None and Callbacks(callbacks).have("before_update"):
        reason = (
            "excludes callbacks with before_update: there is no moment at which all gradients exist"
        )
        raise ConfigError([Problem("", "optimizer.early_step_in_backward", reason)])


def _saves(
    run: RunConfig,
    world: DistEnv,
    model: ModelParts,
    datasets: Datasets,
    loaders: LoaderParts,
    average: WeightAverage | None,
) -> SaveParts | None:
    if not run.checkpoint.enable_checkpoint:
        return None
    from titanlite.assembly.saves import build_saves

    held_out = "" if loaders.validation is None else loaders.validation.fingerprint
    return build_saves(run, world, model.args, datasets, held_out, average)


def _components(
    built: Built, callbacks: list[Callback], trackers: Callable[[], dict[str, str]]
) -> TrainingComponents:
    run, model, loaders, saves = built.run, built.model, built.loaders, built.saves
    batch = run.batch
    folder = Path(run.job.dump_folder) if built.world.rank == 0 else None
    weights_only = run.checkpoint.model_weights_only
    rate = LearningRate(run.schedule, run.optimizer.peak_lr, course=loaders.course)
    resize: Callable[[StepSize], object] = do_nothing
    if loaders.phases is not None:
        rate.phases = loaders.phases.rates()
        rate.peaks = loaders.phases.peaks()
    if run.data.phase:
        from titanlite.assembly.resize import Resizer

        resize = Resizer(run, model, loaders.course.size(1))
    return TrainingComponents(
        world=built.world,
        mesh=model.mesh,
        spec=run.spec,
        args=model.args,
        model=model.model,
        optimizer=built.optimizer,
        learning_rate=rate,
        train_step=built.train_step,
        loader=loaders.train,
        validation=loaders.validation,
        datasets=built.datasets,
        checkpointer=None if saves is None else saves.checkpointer,
        save_schedule=None if saves is None else saves.schedule,
        anomalies=AnomalyLog(folder, built.datasets.train, run.course, loaders.share),
        callbacks=callbacks,
        trackers=trackers,
        steps=built.steps,
        global_batch_size=batch.global_batch_size,
        tokens_per_step=batch.tokens_per_step,
        last_save_dtype=run.checkpoint.export_dtype if weights_only else None,
        exclude_from_loading=run.checkpoint.exclude_from_loading,
        phases=loaders.phases,
        course=loaders.course,
        resize=resize,
    )
