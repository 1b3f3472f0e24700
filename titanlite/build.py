"""Config and ranks → components of a training loop: the one place that knows all rooms.

Order: tokenizer → text → model (`titanlite.parallel.parallelize`) → data → step → checkpoints →
callbacks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite import __version__
from titanlite.callbacks import Callback, Callbacks, load_callbacks
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import digest_of
from titanlite.checkpoint.paths import StorePath, to_path
from titanlite.checkpoint.resume_check import FILE as RESUME_FILE
from titanlite.checkpoint.resume_check import ResumeCheck
from titanlite.checkpoint.schedule import SaveSchedule
from titanlite.checkpoint.storage import gather
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.extensions import load_function
from titanlite.config.urls import public_name
from titanlite.data.loader import TrainLoader, ValidationLoader
from titanlite.data.prefetch import PassLoader, Prefetcher, StepLoader, ValidationPrefetcher
from titanlite.data.rows import Rows
from titanlite.data.skip_ranges import ranges_of_steps
from titanlite.data.text_report import checks_of
from titanlite.guard import FiniteGuard
from titanlite.loss import LossFunction
from titanlite.metrics.console import ensure_console
from titanlite.metrics.figures import ExpertFigures, RowLosses, SourceFigures
from titanlite.metrics.float8_error import Float8ErrorCheck
from titanlite.metrics.observer import MetricsLogger
from titanlite.metrics.profiler import Profiler
from titanlite.metrics.throughput import Throughput, device_name, total_memory_bytes
from titanlite.metrics.watchdog import HangWatchdog
from titanlite.models.args import as_record
from titanlite.models.spec import ModelSpec
from titanlite.optim.average import WeightAverage
from titanlite.optim.gradients import StepInBackward
from titanlite.optim.optimizer import build_optimizer, state_bytes
from titanlite.optim.schedule import LearningRate
from titanlite.parallel.activation_checkpoint import ActivationStats
from titanlite.parallel.compile import prepare_compile
from titanlite.parallel.context import CPLoader
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.float8 import ScalePrecompute
from titanlite.parallel.fsdp import DTYPES
from titanlite.parallel.init import fix_workspace, seed_generators, use_deterministic
from titanlite.parallel.lazy_dynamo import defer_dynamo
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.parallel.pipeline import PipelineModel
from titanlite.plan.hardware import peak_flops
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.runtime import PeakCheck, start_rows
from titanlite.runs.provenance import public_config
from titanlite.start import report as rep
from titanlite.start.derive import RunConfig, with_steps
from titanlite.start.fingerprints import fingerprints
from titanlite.start.fit import tensor_problems
from titanlite.start.preflight import (
    async_tp_problems,
    float8_problems,
    fsdp_problems,
    loss_problems,
    mask_problems,
    optimizer_problems,
)
from titanlite.start.rank_checks import check_ranks
from titanlite.start.run_text import Datasets, phases_of, read_datasets
from titanlite.step import PlainRunner, ReplicationFactors, Runner, TrainStep
from titanlite.training.anomalies import AnomalyLog
from titanlite.training.run_callbacks import (
    AttemptRecord,
    CompileReport,
    DocumentLog,
    GarbageCollection,
    Timeouts,
    TokenHashes,
    VerifyResume,
    Watchdog,
)
from titanlite.training.validation import ValidationSet
from titanlite.utils import is_dotted, public

if TYPE_CHECKING:
    from titanlite.data.phases import Phases
    from titanlite.trainer import Trainer


#: Steps kept back for the case that a stream ends: on a GPU all ranks stop within two steps.
_RESERVE = 2


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
    #: Sequences and tokens per step, over all ranks.
    global_batch_size: int
    tokens_per_step: int
    #: Type of the weights in the last save, which holds nothing else; None: it is as all others.
    last_save_dtype: str | None = None
    exclude_from_loading: Sequence[str] = ()
    #: The `[[data.phase]]` tables; None: there are none, and no mixture.
    phases: Phases | None = None

    def close(self) -> None:
        """End the threads; what cannot be closed does not keep the rest open."""
        with contextlib.ExitStack() as stack:
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.close)
            if self.validation is not None:
                stack.callback(self.validation.close)
            stack.callback(self.loader.close)


def check_model(run: RunConfig, tokenizer_size: int) -> None:
    """Check that ranks can divide this model and vocabulary, and that this machine has its
    products.

    It needs no process group. Raises ConfigError.
    """
    spec, args = run.spec, run.model_args(tokenizer_size)
    problems = [*tensor_problems(args, run), *loss_problems(spec, args, run.training)]
    problems += mask_problems(spec, args, run.data)
    problems += optimizer_problems(spec, args, run.optimizer)
    problems += float8_problems(run.float8)
    problems += fsdp_problems(spec, args, run.training, run.compile, run.activation_checkpoint)
    if run.experimental.enable_async_tensor_parallel:
        problems += async_tp_problems(run.mesh.tensor)
    if problems:
        raise ConfigError(problems)


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """This rank's place among those that read different data."""
    replicate, shard_rank = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    return replicate * mesh["dp_shard"].size() + shard_rank


@dataclass(frozen=True)
class ModelParts:
    """A model with its initial weights on this rank, and what runs it."""

    mesh: DeviceMesh
    #: The model's arguments.
    args: Any
    builder: ModelBuilder
    model: nn.Module
    runner: Runner
    factors: ReplicationFactors
    loss: LossFunction


def build_model(
    run: RunConfig,
    world: DistEnv,
    tokenizer_size: int,
    make: Callable[[ModelBuilder], nn.Module] | None = None,
) -> ModelParts:
    """Build the model as the run divides it.

    All ranks call it together. tokenizer_size: entries of its vocabulary.

    make: returns the builder's model with memory; None: with the initial weights of the run's seed.
    """
    device, degrees, batch = world.device, run.mesh, run.batch
    spec, args = run.spec, run.model_args(tokenizer_size)
    if run.training.compile:
        prepare_compile(run.compile.backend, device.type, run.compile.cache_dir)
    else:
        defer_dynamo()
    mesh = world.build_mesh(**degrees.dimensions)
    builder = ModelBuilder(
        spec,
        args,
        mesh,
        device,
        run.training,
        run.experimental,
        run.activation_checkpoint,
        run.compile,
        run.float8,
        load_function("training.loss", run.training.loss) if is_dotted(run.training.loss) else None,
        degrees.expert,
    )
    loss = builder.loss()
    if run.data.source:
        loss = RowLosses(loss, batch.seq_len // degrees.context)
    if run.experimental.enable_async_tensor_parallel and degrees.tensor > 1:
        from titanlite.parallel.async_tp import enable_async

        enable_async(mesh["tp"])
    model = make(builder) if make else builder.build(run.training.seed or 0)
    world.apply_timeout()
    runner: Runner = PlainRunner(model, loss, run.training.gradient_sync == "every")
    if isinstance(model, PipelineModel):
        sizes = {"batch_size": batch.micro_batch_size, "seq_len": batch.seq_len}
        runner = builder.pipeline(model, loss, accumulation=batch.accumulation, **sizes)
    if (
        run.training.seed is not None
    ):  # of torch's own generators; the weights and the data order have their own
        seed_generators(run.training.seed, mesh)
    modules: dict[str, Any] = dict(model.named_modules())
    for name in (spec.experts(args) if spec.experts else {}).keys() & modules.keys():
        modules[name].step_tokens = batch.tokens_per_step
    factors = ReplicationFactors(degrees.tensor * degrees.pipeline, degrees.tensor)
    return ModelParts(mesh, args, builder, model, runner, factors, loss)


def build_step(run: RunConfig, parts: ModelParts) -> tuple[torch.optim.Optimizer, TrainStep]:
    """Build the optimizer and the step of a model."""
    model, device, policy = parts.model, parts.builder.device, run.guard
    blocks = run.spec.block_names(parts.args)
    optimizer = build_optimizer(dict(model.named_parameters()), run.optimizer, device, blocks)
    train_step = TrainStep(
        model,
        optimizer,
        parts.runner,
        FiniteGuard(device, policy.policy, policy.max_skips, policy.spike_sigmas, policy.window),
        run.training.max_norm,
        parts.factors,
    )
    if run.optimizer.early_step_in_backward:
        train_step.in_backward = StepInBackward(model, optimizer)
        train_step.guard.applied = True
    if run.float8.enable_float8_linear and run.float8.precompute_float8_dynamic_scale_for_fsdp:
        train_step.after_update = ScalePrecompute(model, parts.mesh)
    return optimizer, train_step


def build_validation(run: RunConfig, mesh: DeviceMesh, texts: Mapping[str, Rows]) -> ValidationSet:
    """Build this rank's part of the held-out texts, see `read_held_out`."""
    section, rank, ranks = run.validation, data_parallel_rank(mesh), run.mesh.dp_degree
    size, pin = section.batch_size or run.batch.micro_batch_size, _pins(run, mesh)
    loaders, measured = {}, []
    for name, rows in texts.items():
        passes: PassLoader = ValidationLoader(rows, size, section.steps, rank, ranks)
        if run.mesh.context > 1:
            passes = CPLoader(passes, mesh)
        loaders[name] = ValidationPrefetcher(
            passes, run.data.prefetch, pin, run.data.persistent_workers
        )
        # A part of the text depends on the size of a batch over all ranks; all of it does not.
        part = None if section.steps == -1 else section.steps * size * ranks
        measured.append([name, rows.fingerprint, rows.settings, part])
    fingerprint = digest_of(
        json.dumps([measured, section.ema], sort_keys=True, default=str).encode()
    )
    return ValidationSet(loaders, section.freq, section.first, fingerprint=fingerprint)


def _pins(run: RunConfig, mesh: DeviceMesh) -> bool:
    return run.data.pin_memory and mesh.device_type == "cuda"


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
    device = world.device
    ensure_console(world.rank)
    if callbacks is None:
        callbacks = load_callbacks(run.job.callbacks)
    datasets = datasets or read_datasets(run)
    if run.steps is None:
        raise ValueError("the run's length is not known yet: derive it with the length of the text")
    check_model(run, datasets.tokenizer.vocab_size)
    samples, folder = None, Path(run.job.dump_folder)
    if run.launch.preflight:
        if run.debug.deterministic:
            fix_workspace()
        saves = run.checkpoint.enable_checkpoint
        place = to_path(run.checkpoint.folder) if saves else folder
        shared = None if isinstance(place, StorePath) else place
        held_out = {
            f"validation {name}".strip(): rows.fingerprint
            for name, rows in datasets.validation.items()
        }
        texts = {"training": datasets.train.fingerprint, **held_out}
        check_ranks(world, config=run.toml, texts=texts, folder=shared, needs_folder=saves)
    if run.sample.prompts:
        from titanlite.metrics.samples import PromptSampler

        longest = run.model_args(datasets.tokenizer.vocab_size).max_seq_len // run.mesh.context
        samples = PromptSampler(run.sample, datasets.tokenizer, longest, run.mesh.tensor, folder)

    spec, batch = run.spec, run.batch
    parts = build_model(run, world, datasets.tokenizer.vocab_size)
    mesh, args, builder, model = parts.mesh, parts.args, parts.builder, parts.model

    # Data
    rank, ranks = data_parallel_rank(mesh), run.mesh.dp_degree
    phases = phases_of(run)
    factors = () if phases is None else phases.rates()
    skip = ranges_of_steps(run.data.skip_steps, batch.global_batch_size)
    steps: StepLoader = TrainLoader(
        datasets.train, batch.global_batch_size, batch.micro_batch_size, rank, ranks, skip
    )
    if run.mesh.context > 1:
        steps = CPLoader(steps, mesh)
    validation = build_validation(run, mesh, datasets.validation) if datasets.validation else None

    optimizer, train_step = build_step(run, parts)
    if train_step.in_backward and Callbacks(callbacks).have("before_update"):
        message = (
            "excludes callbacks with before_update: there is no moment at which all gradients exist"
        )
        raise ConfigError([Problem("", "optimizer.early_step_in_backward", message)])

    average = (
        WeightAverage(model, gather(model), run.optimizer.ema_decay)
        if run.optimizer.ema_decay
        else None
    )
    if average and validation and run.validation.ema:
        validation = replace(validation, weights=average.applied)

    # Checkpoints
    checkpointer = save_schedule = None
    if run.checkpoint.enable_checkpoint:
        if run.checkpoint.last_save_in_hf:
            try:
                spec.hf_names(args), spec.hf_config(args)
            except ValueError as error:
                raise ConfigError([Problem("", "checkpoint.last_save_in_hf", str(error))]) from None
        from titanlite.data.tokenizer.files import hf_files, tokenizer_path

        prints = fingerprints(run.model.name, args, datasets)
        tokenizer = tokenizer_path(run.model.tokenizer_path, run.model.name)
        about: dict[str, Any] = {
            "toml": public_config(run.toml),
            "model": as_record(run.model.name, args),
        }
        about["tokenizer"] = {"path": tokenizer and public(tokenizer)}
        files = functools.partial(hf_files, tokenizer)
        averages = average.tensors if average else None
        checkpointer = Checkpointer(run.checkpoint, world, prints, about, files, averages=averages)
        held_out_text = validation.fingerprint if validation else ""
        save_schedule = SaveSchedule(run.checkpoint, world, prints, held_out=held_out_text)

    # Callbacks
    in_float8 = run.float8.enable_float8_linear
    name, flops = device_name(device), spec.flops_per_token(args, batch.seq_len)
    peak = run.metrics.peak_tflops and run.metrics.peak_tflops * 1e12
    peak = peak or (peak_flops(name) if device.type == "cuda" else None)
    masked = run.data.mask_documents
    kept = builder.trace_activations(
        batch_size=batch.micro_batch_size, seq_len=batch.seq_len, masked=masked
    )
    compiled = builder.watch_compilation(model)
    resume_check = ResumeCheck(
        folder / RESUME_FILE,
        world.rank,
        {
            "device": name,
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
            **run.rounding,
        },
        # Rounding is told from a difference by this share of a number; lower precisions round more.
        tolerance=1e-4
        if {run.training.mixed_precision_param, run.training.dtype} == {"float32"} and not in_float8
        else 2e-2,
        exact=device.type == "cpu" or run.debug.deterministic,
    )
    attempts = AttemptRecord(folder, run.toml, run.job.description, name, watchdog)
    gc = GarbageCollection(run.training.gc_freq)
    sources = None
    mixture = datasets.train.mixture
    if mixture is not None and isinstance(parts.loss, RowLosses):
        sources = SourceFigures(
            mixture, parts.loss, batch.global_batch_size, (rank, ranks), parts.factors
        )
    experts = ExpertFigures(model, spec.experts(args), device) if spec.experts else None
    metrics = MetricsLogger(
        run.metrics,
        run.job,
        world,
        public_config(run.toml),
        Throughput(batch.tokens_per_step, batch.global_batch_size, world.size, flops, peak),
        gc.read,
        [figures for figures in (sources, experts) if figures is not None],
    )
    if samples:
        samples.show = metrics.write_texts

    token_checks = checks_of([datasets.train, *datasets.validation.values()])
    documents = None
    if run.data.log_documents:
        # No rank has read the other ranks' part of a stream: each writes its own.
        part = (rank, ranks) if datasets.train.lanes is not None else None
        leads = all(mesh.get_local_rank(name) == 0 for name in ("pp", "cp", "tp"))
        file = folder / ("documents.jsonl" if rank == 0 else f"documents-rank_{rank}.jsonl")
        text = public_name(run.training.dataset_path or run.training.dataset)
        writes = leads and (rank == 0 or part is not None)
        documents = DocumentLog(
            file if writes else None, datasets.train, text, batch.global_batch_size, part
        )

    def report(trainer: Trainer) -> list[str]:
        return startup_lines(
            with_steps(run, trainer.steps), datasets, builder, flops, peak, kept, model, planned
        )

    in_epochs, planned = (
        run.training.epochs is not None,
        with_vocabulary(run, datasets.tokenizer.vocab_size),
    )
    drift = run.float8.drift_check if in_float8 else 0
    profiles = run.profiling.enable_profiling or run.profiling.enable_memory_snapshot
    # Every callback of a run, in the order in which it is called. The watchdog is first: other
    # ranks wait for it.
    every: list[Callback | None] = [
        Watchdog(
            watchdog or HangWatchdog(run.stall, run.comm, end=None), entered=watchdog is not None
        ),
        Timeouts(run.comm.init_timeout_seconds, run.comm.train_timeout_seconds)
        if world.timeout
        else None,
        TokenHashes(token_checks) if token_checks else None,
        gc,
        attempts,
        average,
        rep.StartReport(report, run.checkpoint, skip, attempts, in_epochs),
        # Before the metrics, which begin a new peak.
        PeakCheck(planned, torch.cuda.max_memory_allocated) if device.type == "cuda" else None,
        sources,
        experts,
        metrics,
        CompileReport(compiled) if compiled else None,
        Float8ErrorCheck(drift, builder.param_dtype, metrics.write) if drift else None,
        Profiler(run.profiling, world.rank, device) if profiles else None,
        VerifyResume(resume_check, skip, (rank, ranks)),
        documents,
        samples,
        *callbacks,
    ]
    if run.debug.deterministic:
        use_deterministic(run.debug.deterministic_warn_only)
    return TrainingComponents(
        world=world,
        mesh=mesh,
        spec=spec,
        args=args,
        model=model,
        optimizer=optimizer,
        learning_rate=LearningRate(run.schedule, run.optimizer.peak_lr, phases=factors),
        train_step=train_step,
        loader=Prefetcher(
            steps,
            run.data.prefetch,
            _pins(run, mesh),
            _RESERVE if datasets.train.state_dict() else 0,
        ),
        validation=validation,
        datasets=datasets,
        checkpointer=checkpointer,
        save_schedule=save_schedule,
        anomalies=AnomalyLog(
            folder if world.rank == 0 else None,
            datasets.train,
            batch.global_batch_size,
            (rank, ranks),
        ),
        callbacks=[callback for callback in every if callback is not None],
        trackers=metrics.run_ids,
        steps=run.steps,
        global_batch_size=batch.global_batch_size,
        tokens_per_step=batch.tokens_per_step,
        phases=phases,
        last_save_dtype=run.checkpoint.export_dtype if run.checkpoint.model_weights_only else None,
        exclude_from_loading=run.checkpoint.exclude_from_loading,
    )


def startup_lines(
    run: RunConfig,
    datasets: Datasets,
    builder: ModelBuilder,
    flops: int,
    peak: float | None,
    kept: ActivationStats,
    model: nn.Module,
    planned: RunConfig,
) -> list[str]:
    """Return the lines of the startup report. planned: the run with its vocabulary's size."""
    on_meta, blocks = (
        builder.spec.build_on_meta(builder.args),
        builder.spec.block_names(builder.args),
    )
    parameters = rep.parameter_counts(on_meta)
    state = state_bytes(
        dict(on_meta.named_parameters()), run.optimizer, DTYPES[run.training.dtype], blocks
    )
    device, float8 = builder.device, builder.float8_choices()
    mesh, batch, schedule = run.mesh, run.batch, run.schedule
    degrees = {"pp": mesh.pipeline, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    setup = rep.Setup(
        device=device_name(device),
        cpu=device.type == "cpu",
        degrees={**degrees, "cp": mesh.context, "tp": mesh.tensor},
        parameters=parameters,
        micro_batch=batch.micro_batch_size,
        accumulation=batch.accumulation,
        seq_len=batch.seq_len,
        # Tensor-parallel ranks gather the sequence before a product.
        tokens=batch.micro_batch_size
        // run.pipeline.microbatches
        * (batch.seq_len // mesh.context),
        text=datasets.train.describe(),
        tokens_per_epoch=datasets.train.tokens_per_epoch,
    )
    ranks, memory = mesh.world_size, total_memory_bytes(device)
    floor = max(schedule.min_lr_factor * run.optimizer.peak_lr, schedule.min_lr or 0.0)
    lengths = (
        schedule.warmup_steps,
        schedule.plateau_steps,
        schedule.decay_steps,
        schedule.total_steps,
    )
    rows = [("run", run.job.description)] if run.job.description else []
    versions = (
        f"titanlite {__version__}, torch {torch.__version__}, python {platform.python_version()}"
    )
    rows += [("versions", versions), *rep.model_rows(run.model, setup)]
    rows += rep.compute_rows(run.metrics, run.float8, setup, ranks, flops, peak, memory)
    rows.append(rep.mesh_row(setup, ranks, mesh.expert))
    if isinstance(model, PipelineModel):
        rows.append(rep.pipeline_row(run.experimental.pipeline_parallel_schedule, model.layout))
    if run.float8.enable_float8_linear:
        rows += rep.float8_rows(run.float8, float8, setup, builder.compiles("model"))
    rows += rep.sharding_rows(run.training, setup)
    if kept:
        window = getattr(builder.args, "window", None)
        rows.append(rep.attention_row(kept, setup, window))
        rows.append(rep.activations_row(run.activation_checkpoint, kept, setup))
    rows += start_rows(planned, device.type, memory)
    rows += [
        rep.data_row(run.training, run.data, setup),
        *rep.file_rows(datasets.train, datasets.validation),
    ]
    rows += rep.batch_rows(setup, run.steps, run.training.epochs)
    rows += rep.optimizer_rows(run.optimizer, run.training, state)
    rows.append(rep.schedule_row(schedule.decay_type, floor, *lengths))
    text = public_name(run.training.dataset_path or run.training.dataset)
    sequences = None if run.steps is None else run.steps * batch.global_batch_size
    doubts = rep.text_warnings(datasets.train, datasets.validation, text, sequences)
    warnings = [*run.warnings, *(one for one in doubts if not rep.is_told(one, run.warnings))]
    rows += [("note", note) for note in run.notes] + [("warning", warning) for warning in warnings]
    return rep.startup_report(rows)


class _CallableModule(types.ModuleType):
    """Lets `from titanlite import build` give something to call: the import of this file puts the
    module there.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> TrainingComponents:
        return build(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
