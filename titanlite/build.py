"""Config and ranks → components of a training loop: the one place that knows all rooms.

Order: tokenizer → text → model (`titanlite.parallel.parallelize`) → data → step → checkpoints → callbacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite import start_report as rep
from titanlite._version import __version__
from titanlite.anomalies import AnomalyLog
from titanlite.callbacks import Callback, load_callbacks
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.resume_check import FILE as RESUME_FILE
from titanlite.checkpoint.resume_check import ResumeCheck
from titanlite.checkpoint.retention import SaveSchedule
from titanlite.config.errors import ConfigError
from titanlite.config.extensions import load_function
from titanlite.config.sections import DataPhase
from titanlite.data import DataError
from titanlite.data.loader import TrainLoader, ValidationLoader
from titanlite.data.mixture import MixedRows
from titanlite.data.prefetch import PassLoader, Prefetcher, StepLoader, ValidationPrefetcher
from titanlite.data.rows import Rows
from titanlite.data.skip_ranges import ranges_of_steps
from titanlite.data.text import Share, TextReader, alone
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.derive import RunConfig, with_steps
from titanlite.fit import tensor_problems
from titanlite.guard import FiniteGuard
from titanlite.metrics.float8_error import Float8ErrorCheck
from titanlite.metrics.garbage import GarbageCollection
from titanlite.metrics.observer import MetricsLogger
from titanlite.metrics.profiler import Profiler
from titanlite.metrics.throughput import device_name, peak_flops, total_memory_bytes
from titanlite.metrics.watchdog import HangWatchdog
from titanlite.models.spec import ModelSpec, as_record
from titanlite.optim.learning_rate import LearningRate
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.activation_checkpoint import ActivationStats
from titanlite.parallel.compile import prepare_compile
from titanlite.parallel.context import CPLoader
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.float8 import ScalePrecompute
from titanlite.parallel.float8_choice import tokens_per_product
from titanlite.parallel.init import seed_generators
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.parallel.pipeline import PipelineModel
from titanlite.parallel.tensor import enable_async
from titanlite.preflight import async_tp_problems, fsdp_problems, loss_problems
from titanlite.run_callbacks import (
    AttemptRecord,
    CompileReport,
    SlowSaveWarning,
    SourceShares,
    Timeouts,
    VerifyResume,
    Watchdog,
)
from titanlite.runs.provenance import config_text
from titanlite.step import PlainRunner, ReplicationFactors, Runner, TrainStep
from titanlite.utils import is_dotted

if TYPE_CHECKING:
    from titanlite.trainer import Trainer


#: Keys that change how sums are rounded.
_ROUNDING = (
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.gradient_sync",
    "training.fsdp_units",
    "training.fsdp_min_params",
    "training.reshard_after_forward",
    "training.loss_chunks",
    "training.enable_loss_parallel",
    "training.enable_cpu_offload",
    "training.compile",
    "compile.components",
    "compile.backend",
    "experimental.enable_async_tensor_parallel",
    "experimental.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_split_points",
    "experimental.pipeline_parallel_microbatches",
    "activation_checkpoint.mode",
    "activation_checkpoint.selective_ac_option",
    "float8.enable_float8_linear",
    "float8.recipe_name",
    "float8.enable_fsdp_float8_all_gather",
    "float8.filter_fqns",
    "float8.min_features",
    "float8.emulate",
)


#: Steps kept back for the case that a stream ends: on a GPU all ranks stop within two steps.
_RESERVE = 2


@dataclass(frozen=True)
class Datasets:
    """What is read before anything is built."""

    tokenizer: Tokenizer
    train: Rows
    validation: Rows | None


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
    validation: ValidationPrefetcher | None
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
    #: Steps between validations.
    validation_freq: int
    #: Type of the weights in the last save, which holds nothing else; None: it is as all others.
    last_save_dtype: str | None = None
    exclude_from_loading: Sequence[str] = ()

    def close(self) -> None:
        """End the threads; what cannot be closed does not keep the rest open."""
        with contextlib.ExitStack() as stack:
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.close)
            if self.validation is not None:
                stack.callback(self.validation.close)
            stack.callback(self.loader.close)


def check_model(run: RunConfig, datasets: Datasets) -> None:
    """Check that ranks can divide this model and vocabulary; no process group is needed. Raises ConfigError."""
    spec, args = run.spec, run.model_args(datasets.tokenizer.vocab_size)
    problems = [*tensor_problems(args, run), *loss_problems(spec, args, run.training)]
    problems += fsdp_problems(spec, args, run.training, run.compile, run.activation_checkpoint)
    if run.experimental.enable_async_tensor_parallel:
        problems += async_tp_problems(run.mesh.tensor)
    if problems:
        raise ConfigError(problems)


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """This rank's place among those that read different data."""
    replicate, shard_rank = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    return replicate * mesh["dp_shard"].size() + shard_rank


def read_datasets(run: RunConfig, share: Share = alone) -> Datasets:
    """Read tokenizer and texts. Before any process group or model exists, so that bad ones end a run early.

    share: gives all ranks what a function returns on rank 0, under a name; by default each rank lists files itself.
    Raises DataError naming file and record, ShapeError when the tokenizer has more entries than the model.
    """
    tokenizer = load_tokenizer(run.model.tokenizer_path, run.model.name)
    vocabulary = run.model_args(tokenizer.vocab_size).vocab_size
    patience = run.data.retry_seconds
    if run.mesh.world_size > 1:  # the other ranks wait in a collective
        patience = min(patience, run.comm.train_timeout_seconds / 2)
    reader = TextReader(run.data, tokenizer, vocabulary, run.mesh.dp_degree, share, patience)
    train = reader.train(run.training, {start: phase.weights for start, phase in _phases(run) if phase.weights})
    total = train.total_sequences
    if run.data.source and total is not None and run.steps and total < run.steps * run.batch.global_batch_size:
        last = total // run.batch.global_batch_size
        raise DataError(
            f"training.steps: the epochs of all sources end after step {last} of {run.steps}; set it to {last} at "
            "most, or give one source no epochs"
        )
    if not run.validation.enable:
        return Datasets(tokenizer, train, None)
    seq_len = run.validation.seq_len or run.training.seq_len
    return Datasets(tokenizer, train, reader.held_out(run.validation, seq_len))


def _phases(run: RunConfig) -> list[tuple[int, DataPhase]]:
    """Return each `[[data.phase]]` with its first sequence, in order."""
    size = run.batch.global_batch_size
    starts = (
        (phase.step - 1) * size if phase.step else -(-(phase.tokens or 0) // run.batch.tokens_per_step) * size
        for phase in run.data.phase
    )
    return sorted(zip(starts, run.data.phase, strict=True), key=lambda phase: phase[0])


def rate_phases(run: RunConfig) -> Iterator[tuple[int, float]]:
    """Yield first step and factor of the learning rate of each phase."""
    return ((start // run.batch.global_batch_size + 1, phase.lr_factor) for start, phase in _phases(run))


def build(
    run: RunConfig,
    world: DistEnv,
    datasets: Datasets | None = None,
    watchdog: HangWatchdog | None = None,
    callbacks: Sequence[Callback] | None = None,
) -> TrainingComponents:
    """Build everything that a loop needs, on this rank's device. All ranks call it together.

    datasets: of `read_datasets`; None: read here. watchdog: entered by the caller; None: one that only logs.
    callbacks: run after titanlite's own; None: those of `job.callbacks`.
    """
    device = world.device
    if callbacks is None:
        callbacks = load_callbacks(run.job.callbacks)
    datasets = datasets or read_datasets(run)
    if run.steps is None:
        raise ValueError("the run's length is not known yet: derive it with the length of the text")

    # Model
    spec = run.spec
    args = run.model_args(datasets.tokenizer.vocab_size)
    if run.training.compile:
        prepare_compile(run.compile.backend, device.type, run.compile.cache_dir)
    degrees, batch = run.mesh, run.batch
    mesh = world.build_mesh(
        pp=degrees.pipeline,
        dp_replicate=degrees.dp_replicate,
        dp_shard=degrees.dp_shard,
        cp=degrees.context,
        tp=degrees.tensor,
    )
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
    )
    loss = builder.loss()
    if run.experimental.enable_async_tensor_parallel and degrees.tensor > 1:
        enable_async(mesh["tp"])
    model = builder.build(run.training.seed or 0)
    world.apply_timeout()
    sizes = {"batch_size": batch.micro_batch_size, "seq_len": batch.seq_len}
    runner: Runner = PlainRunner(model, loss, run.training.gradient_sync == "every")
    if isinstance(model, PipelineModel):
        runner = builder.pipeline(model, loss, accumulation=batch.accumulation, **sizes)
    if run.training.seed is not None:  # of torch's own generators; the weights and the data order have their own
        seed_generators(run.training.seed, mesh)

    # Data
    rank, ranks = data_parallel_rank(mesh), degrees.dp_degree
    pin = run.data.pin_memory and device.type == "cuda"
    skip = ranges_of_steps(run.data.skip_steps, batch.global_batch_size)
    steps: StepLoader = TrainLoader(datasets.train, batch.global_batch_size, batch.micro_batch_size, rank, ranks, skip)
    if degrees.context > 1:
        steps = CPLoader(steps, mesh)
    validation = None
    if datasets.validation is not None:
        section = run.validation
        passes: PassLoader = ValidationLoader(
            datasets.validation, section.batch_size or batch.micro_batch_size, section.steps, rank, ranks
        )
        if degrees.context > 1:
            passes = CPLoader(passes, mesh)
        validation = ValidationPrefetcher(passes, run.data.prefetch, pin, run.data.persistent_workers)

    # Step
    optimizer = build_optimizer(dict(model.named_parameters()), run.optimizer, device)
    policy = run.guard
    train_step = TrainStep(
        model,
        optimizer,
        runner,
        FiniteGuard(device, policy.policy, policy.max_skips, policy.spike_sigmas, policy.window),
        run.training.max_norm,
        ReplicationFactors(degrees.tensor * degrees.pipeline, degrees.tensor),
    )
    in_float8 = run.float8.enable_float8_linear
    if in_float8 and run.float8.precompute_float8_dynamic_scale_for_fsdp:
        train_step.after_update = ScalePrecompute(model, mesh)

    # Checkpoints
    checkpointer = save_schedule = None
    if run.checkpoint.enable_checkpoint:
        prints = fingerprints(run.model.name, args, datasets)
        about = {"toml": config_text(run.toml), "model": as_record(run.model.name, args)}
        checkpointer = Checkpointer(run.checkpoint, world, prints, about)
        save_schedule = SaveSchedule(run.checkpoint, world, prints)
        train_step.before_update = checkpointer.await_copy

    # Callbacks
    folder = Path(run.job.dump_folder)
    name, flops = device_name(device), spec.flops_per_token(args, batch.seq_len)
    peak = run.metrics.peak_tflops and run.metrics.peak_tflops * 1e12
    peak = peak or (peak_flops(name) if device.type == "cuda" else None)
    kept, compiled = builder.trace_activations(**sizes), builder.watch_compilation(model)
    resume_check = ResumeCheck(
        folder / RESUME_FILE,
        world.rank,
        rounding_setting(run, device),
        # Rounding is told from a difference by this share of a number; lower precisions round more.
        tolerance=2e-2 if run.training.mixed_precision_param != "float32" or in_float8 else 1e-4,
        exact=device.type == "cpu" or run.debug.deterministic,
    )
    attempts = AttemptRecord(folder, run.toml, run.job.description, world, name, batch.tokens_per_step, watchdog)
    gc = GarbageCollection(run.training.gc_freq)
    metrics = MetricsLogger(
        run.metrics,
        run.job,
        world,
        config_text(run.toml),
        tokens_per_step=batch.tokens_per_step,
        sequences_per_step=batch.global_batch_size,
        flops_per_token=flops,
        peak_flops=peak,
        gc_seconds=gc.read,
    )

    def report(trainer: Trainer) -> list[str]:
        return startup_lines(with_steps(run, trainer.steps), datasets, builder, flops, peak, kept, model)

    in_epochs = run.training.epochs is not None
    drift = run.float8.drift_check if in_float8 else 0
    profiles = run.profiling.enable_profiling or run.profiling.enable_memory_snapshot
    # Every callback of a run, in the order in which it is called. The watchdog is first: other ranks wait for it.
    every: list[Callback | None] = [
        Watchdog(watchdog or HangWatchdog(run.stall, run.comm, end=None), entered=watchdog is not None),
        Timeouts(run.comm.init_timeout_seconds, run.comm.train_timeout_seconds) if world.timeout else None,
        gc,
        attempts,
        rep.StartReport(report, run.checkpoint, run.toml, skip, attempts, in_epochs),
        metrics,
        CompileReport(compiled) if compiled else None,
        Float8ErrorCheck(drift, builder.param_dtype, metrics.write) if drift else None,
        Profiler(run.profiling, world.rank, device) if profiles else None,
        VerifyResume(resume_check, datasets.train, batch.global_batch_size, skip, world, (rank, ranks)),
        SlowSaveWarning(world.rank),
        SourceShares(datasets.train, metrics.write) if isinstance(datasets.train, MixedRows) else None,
        *callbacks,
    ]
    if run.debug.deterministic:
        # cuBLAS is deterministic only with a fixed workspace, chosen before its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=run.debug.deterministic_warn_only)
    return TrainingComponents(
        world=world,
        mesh=mesh,
        spec=spec,
        args=args,
        model=model,
        optimizer=optimizer,
        learning_rate=LearningRate(run.schedule, run.optimizer.lr, phases=tuple(rate_phases(run))),
        train_step=train_step,
        loader=Prefetcher(steps, run.data.prefetch, pin, _RESERVE if datasets.train.state_dict() else 0),
        validation=validation,
        datasets=datasets,
        checkpointer=checkpointer,
        save_schedule=save_schedule,
        anomalies=AnomalyLog(
            folder if world.rank == 0 else None, datasets.train, batch.global_batch_size, (rank, ranks)
        ),
        callbacks=[callback for callback in every if callback is not None],
        trackers=metrics.run_ids,
        steps=run.steps,
        global_batch_size=batch.global_batch_size,
        tokens_per_step=batch.tokens_per_step,
        validation_freq=run.validation.freq,
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
) -> list[str]:
    """Return the lines of the startup report: what is about to run."""
    parameters = parameter_counts(builder.spec.build_on_meta(builder.args))
    device, float8 = builder.device, builder.float8_choices()
    mesh, batch, schedule = run.mesh, run.batch, run.schedule
    degrees = {"pp": mesh.pipeline, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    setup = rep.Setup(
        device=device_name(device),
        degrees={**degrees, "cp": mesh.context, "tp": mesh.tensor},
        parameters=parameters,
        micro_batch=batch.micro_batch_size,
        accumulation=batch.accumulation,
        seq_len=batch.seq_len,
        tokens=tokens_per_product(
            batch.micro_batch_size, batch.seq_len, cp=mesh.context, microbatches=run.pipeline.microbatches
        ),
        text=datasets.train.describe(),
        tokens_per_epoch=datasets.train.tokens_per_epoch,
    )
    ranks, memory = mesh.world_size, total_memory_bytes(device)
    floor = max(schedule.min_lr_factor * run.optimizer.lr, schedule.min_lr or 0.0)
    lengths = schedule.warmup_steps, schedule.plateau_steps, schedule.decay_steps, schedule.total_steps
    rows = [("run", run.job.description)] if run.job.description else []
    versions = f"titanlite {__version__}, torch {torch.__version__}, python {platform.python_version()}"
    rows += [("versions", versions), *rep.model_rows(run.model, setup)]
    rows += rep.compute_rows(run.metrics, run.float8, setup, ranks, flops, peak, memory)
    rows.append(rep.mesh_row(setup, ranks))
    if isinstance(model, PipelineModel):
        rows.append(rep.pipeline_row(run.experimental.pipeline_parallel_schedule, model.layout))
    if run.float8.enable_float8_linear:
        rows += rep.float8_rows(run.float8, float8, setup, builder.compiles("model"))
    rows += rep.sharding_rows(run.training, setup)
    if kept:
        rows.append(rep.activations_row(run.activation_checkpoint, kept, setup))
    rows += [rep.data_row(run.training, run.data, setup), *rep.batch_rows(setup, run.steps, run.training.epochs)]
    rows.append(rep.schedule_row(schedule.decay_type, floor, *lengths))
    rows += [("note", note) for note in run.notes] + [("warning", warning) for warning in run.warnings]
    return rep.startup_report(rows)


def rounding_setting(run: RunConfig, device: torch.device) -> dict[str, str]:
    """Return by name what the rounding of a step's loss and norm depends on."""
    found = {
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "batch.micro_batch_size": str(run.batch.micro_batch_size),
        "batch.accumulation": str(run.batch.accumulation),
        "deterministic": str(run.debug.deterministic),
    }
    found.update((f"mesh.{name}", str(value)) for name, value in asdict(run.mesh).items())
    for name in _ROUNDING:
        section, _, field = name.partition(".")
        found[name] = str(getattr(getattr(run, section), field))
    return found


def fingerprints(model: str, args: Any, datasets: Datasets) -> dict[str, str]:
    """Return what two runs must share for one to resume the other's checkpoints. model: `model.name`."""
    shape = asdict(args)
    shape.pop("max_seq_len")  # the length of the RoPE tables changes no weight
    if is_dotted(model):
        shape["model"] = os.path.basename(model)
    order = {name: value for name, value in datasets.train.settings.items() if name != "epochs"}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "model": digest[:16],
        "tokenizer": datasets.tokenizer.fingerprint[:16],
        "data": datasets.train.fingerprint[:16],
        "data order": ", ".join(f"{name} {value}" for name, value in order.items()),
    }


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return parameters by top-level module, in order; a tied weight counts once."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        top = name.split(".")[0]
        counts[top] = counts.get(top, 0) + parameter.numel()
    return counts


class _CallableModule(types.ModuleType):
    """Lets `from titanlite import build` give something to call: the import of this file puts the module there."""

    def __call__(self, *args: Any, **kwargs: Any) -> TrainingComponents:
        return build(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
