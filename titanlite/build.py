"""Config and ranks → components of a training loop: the one place that knows all rooms.

Order: tokenizer → text → model (`titanlite.parallel.parallelize`) → data → step → checkpoints → callbacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite._version import __version__
from titanlite.anomalies import AnomalyLog
from titanlite.callbacks import Callback, load_callbacks
from titanlite.checkpoint import Checkpointer, ResumeGuard
from titanlite.checkpoint.resume_guard import FILE as RESUME_FILE
from titanlite.checkpoint.schedule import SaveSchedule
from titanlite.config.errors import ConfigError
from titanlite.config.plans import Plans
from titanlite.data.background import PassLoader, Prefetcher, StepLoader, ValidationPrefetcher
from titanlite.data.left_out import of_steps
from titanlite.data.loader import TrainLoader, ValidationLoader
from titanlite.data.packing import PackedDataset, build_dataset, build_validation_dataset
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.guard import FiniteGuard
from titanlite.metrics import startup_report as rep
from titanlite.metrics.float8_error import Float8ErrorCheck
from titanlite.metrics.garbage import GarbageCollection
from titanlite.metrics.jsonl import FILE as METRICS
from titanlite.metrics.observer import MetricsLogger
from titanlite.metrics.profiler import Profiler
from titanlite.metrics.throughput import device_name, peak_flops, total_memory_bytes
from titanlite.metrics.watchdog import HangWatchdog
from titanlite.models import LlamaArgs, ModelSpec, get_spec
from titanlite.models.shapes import as_record, flops_per_token
from titanlite.optim.learning_rate import LearningRate
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.activation_checkpoint import ActivationStats
from titanlite.parallel.compile import prepare_compile
from titanlite.parallel.context import CPLoader
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.float8 import ScalePrecompute
from titanlite.parallel.float8_choice import Float8Choice, tokens_per_product
from titanlite.parallel.init import seed_generators
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.parallel.pipeline import PipelineModel
from titanlite.parallel.tensor import enable_async
from titanlite.preflight import async_tp_problems, fsdp_problems
from titanlite.prepare import model_args, undivided
from titanlite.run_callbacks import (
    AttemptRecord,
    CompileReport,
    ProcessSettings,
    ResumeCheck,
    SaveWarnings,
    Timeouts,
    Watchdog,
)
from titanlite.runs.provenance import config_text
from titanlite.start_report import StartReport
from titanlite.step import PlainRunner, ReplicationFactors, Runner, TrainStep

if TYPE_CHECKING:
    from titanlite.trainer import Trainer


@dataclass(frozen=True)
class Datasets:
    """What is read before anything is built."""

    tokenizer: Tokenizer
    train: PackedDataset
    validation: PackedDataset | None


@dataclass
class TrainingComponents:
    """What a training loop is made of, on this rank."""

    world: DistEnv
    mesh: DeviceMesh
    spec: ModelSpec
    args: LlamaArgs
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


def check_model(plans: Plans, datasets: Datasets) -> None:
    """Check that ranks can divide this model and vocabulary; no process group is needed. Raises ConfigError."""
    config, tp = plans.config, plans.mesh.tensor
    spec, args = get_spec(plans.model.name), model_args(plans.model, datasets.tokenizer.vocab_size)
    problems = undivided(args, plans)
    problems += fsdp_problems(spec, args, config.training, config.compile, config.activation_checkpoint)
    if config.experimental.enable_async_tensor_parallel:
        problems += async_tp_problems(tp)
    if problems:
        raise ConfigError(problems)


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """This rank's place among those that read different data."""
    replicate, shard_rank = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    return replicate * mesh["dp_shard"].size() + shard_rank


def read_datasets(plans: Plans) -> Datasets:
    """Read tokenizer and texts. Before any process group or model exists, so that bad ones end a run early.

    Raises DataError naming file and record, ShapeError when the tokenizer has more entries than the model.
    """
    tokenizer = load_tokenizer(plans.tokenizer)
    vocabulary = model_args(plans.model, tokenizer.vocab_size).n_vocab
    train = build_dataset(plans.data, tokenizer, vocabulary)
    enabled = plans.validation.enable
    validation = build_validation_dataset(plans.validation, tokenizer, vocabulary, plans.data) if enabled else None
    return Datasets(tokenizer, train, validation)


def build(
    plans: Plans,
    world: DistEnv,
    datasets: Datasets | None = None,
    watchdog: HangWatchdog | None = None,
    callbacks: Sequence[Callback] | None = None,
) -> TrainingComponents:
    """Build everything that a loop needs, on this rank's device. All ranks call it together.

    datasets: of `read_datasets`; None: read here. watchdog: entered by the caller; None: one that only logs.
    callbacks: run after titanlite's own; None: those of `job.callbacks`, files relative to the working directory.
    """
    config, device = plans.config, world.device
    if callbacks is None:
        callbacks = load_callbacks(config.job.callbacks)
    settings = ProcessSettings(plans.train.deterministic, plans.train.deterministic_warn_only)
    datasets = datasets or read_datasets(plans)
    if plans.train.steps is None:
        raise ValueError("the run's length is not known yet: resolve the plans with the length of the text")

    # Model
    spec = get_spec(plans.model.name)
    args = model_args(plans.model, datasets.tokenizer.vocab_size)
    if config.training.compile:
        prepare_compile(config.compile.backend, device.type, config.compile.cache_dir)
    degrees, batch = plans.mesh, plans.batch
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
        config.training,
        config.experimental,
        config.activation_checkpoint,
        config.compile,
        config.float8,
    )
    loss = builder.loss()
    if config.experimental.enable_async_tensor_parallel and degrees.tensor > 1:
        enable_async(mesh["tp"])
    model = builder.build(plans.train.seed or 0)
    world.apply_timeout()
    sizes = {"batch_size": batch.micro_batch_size, "seq_len": batch.seq_len}
    runner: Runner = PlainRunner(model, loss, config.training.gradient_sync == "every")
    if isinstance(model, PipelineModel):
        runner = builder.pipeline(model, loss, accumulation=batch.accumulation, **sizes)
    if plans.train.seed is not None:  # of torch's own generators; the weights and the data order have their own
        seed_generators(plans.train.seed, mesh)

    # Data
    rank, ranks = data_parallel_rank(mesh), plans.mesh.dp_degree
    pin = plans.data.pin_memory and device.type == "cuda"
    skip = of_steps(plans.data.skip_steps, plans.batch.global_batch_size)
    steps: StepLoader = TrainLoader(datasets.train, plans.batch, rank, ranks, skip)
    if plans.mesh.context > 1:
        steps = CPLoader(steps, mesh)
    validation = None
    if datasets.validation is not None:
        section = plans.validation
        passes: PassLoader = ValidationLoader(datasets.validation, section.batch_size, section.steps, rank, ranks)
        if plans.mesh.context > 1:
            passes = CPLoader(passes, mesh)
        validation = ValidationPrefetcher(passes, plans.data.prefetch, pin, plans.data.persistent_workers)

    # Step
    optimizer = build_optimizer(model.parameters(), plans.optimizer, device)
    policy = config.guard
    train_step = TrainStep(
        model,
        optimizer,
        runner,
        FiniteGuard(device, policy.policy, policy.max_skips, policy.spike_sigmas, policy.window),
        plans.optimizer.max_norm,
        ReplicationFactors(plans.mesh.tensor * plans.mesh.pipeline, plans.mesh.tensor),
    )
    if plans.float8.precompute:
        train_step.after_update = ScalePrecompute(model, mesh)

    # Checkpoints
    checkpointer = save_schedule = None
    if plans.checkpoint.enable:
        prints = fingerprints(args, datasets)
        about = {"toml": config_text(plans.config_toml), "model": as_record(plans.model.name, args)}
        checkpointer = Checkpointer(plans.checkpoint, world, prints, about)
        save_schedule = SaveSchedule(plans.checkpoint, world, prints)
        train_step.before_update = checkpointer.await_copy

    # Callbacks
    folder = Path(config.job.dump_folder)
    name, flops = device_name(device), flops_per_token(args, batch.seq_len)
    peak = plans.observe.peak_flops or (peak_flops(name) if device.type == "cuda" else None)
    kept, compiled = builder.trace_activations(**sizes), builder.watch_compilation(model)
    resume_guard = ResumeGuard(
        folder / RESUME_FILE,
        world.rank,
        rounding_setting(plans, device),
        # Rounding is told from a difference by this share of a number; lower precisions round more.
        tolerance=2e-2 if plans.shard.param_dtype != "float32" or plans.float8.enable else 1e-4,
        exact=device.type == "cpu" or plans.train.deterministic,
    )
    attempts = AttemptRecord(
        folder, plans.config_toml, config.job.description, world, name, batch.tokens_per_step, watchdog
    )
    saves = SaveWarnings(checkpointer.root, world) if checkpointer else None
    gc = GarbageCollection(plans.train.gc_freq)
    metrics = MetricsLogger(
        config.metrics,
        config.job,
        world,
        plans.config_toml,
        tokens_per_step=batch.tokens_per_step,
        sequences_per_step=batch.global_batch_size,
        flops_per_token=flops,
        peak_flops=peak,
        gc_seconds=gc.read,
    )

    def report(trainer: Trainer) -> list[str]:
        now = replace(plans, schedule=trainer.parts.learning_rate.schedule)
        now = replace(now, train=replace(plans.train, steps=trainer.steps))
        return startup_lines(
            now,
            datasets,
            parameter_counts(spec.build_on_meta(args)),
            flops,
            peak,
            device,
            kept,
            builder.float8_choices(),
            model,
        )

    in_epochs = plans.data.epochs is not None
    drift = plans.float8.drift_check if plans.float8.enable else 0
    profiles = config.profiling.enable_profiling or config.profiling.enable_memory_snapshot
    # Every callback of a run, in the order in which it is called. The watchdog is first: other ranks wait for it.
    every: list[Callback | None] = [
        Watchdog(watchdog or HangWatchdog(config.stall, config.comm, end=None), entered=watchdog is not None),
        settings,
        Timeouts(config.comm.init_timeout_seconds, config.comm.train_timeout_seconds) if world.timeout else None,
        gc,
        attempts,
        StartReport(report, config.checkpoint, plans.config_toml, skip, attempts, saves, in_epochs),
        metrics,
        CompileReport(compiled) if compiled else None,
        Float8ErrorCheck(drift, builder.param_dtype, metrics.write) if drift else None,
        Profiler(config.profiling, world.rank, device) if profiles else None,
        ResumeCheck(resume_guard, datasets.train, batch.global_batch_size, skip, world),
        saves,
        *callbacks,
    ]
    return TrainingComponents(
        world=world,
        mesh=mesh,
        spec=spec,
        args=args,
        model=model,
        optimizer=optimizer,
        learning_rate=LearningRate(plans.schedule, plans.optimizer.lr),
        train_step=train_step,
        loader=Prefetcher(steps, plans.data.prefetch, pin),
        validation=validation,
        datasets=datasets,
        checkpointer=checkpointer,
        save_schedule=save_schedule,
        anomalies=AnomalyLog(folder if world.rank == 0 else None, datasets.train, batch.global_batch_size),
        callbacks=[callback for callback in every if callback is not None],
        trackers=metrics.run_ids,
        steps=plans.train.steps,
        global_batch_size=batch.global_batch_size,
        tokens_per_step=batch.tokens_per_step,
        validation_freq=plans.validation.freq,
        last_save_dtype=plans.checkpoint.weights_only,
        exclude_from_loading=plans.checkpoint.exclude_from_loading,
    )


def startup_lines(
    plans: Plans,
    datasets: Datasets,
    parameters: dict[str, int],
    flops: int,
    peak: float | None,
    device: torch.device,
    kept: ActivationStats,
    float8: Sequence[Float8Choice],
    model: nn.Module,
) -> list[str]:
    """Return the lines of the startup report: what is about to run."""
    c, batch, mesh, schedule = plans.config, plans.batch, plans.mesh, plans.schedule
    name, world_size = device_name(device), mesh.world_size
    peak_is_given, in_float8 = c.metrics.peak_tflops is not None, c.float8.enable_float8_linear
    degrees = {"pp": mesh.pipeline, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    degrees |= {"cp": mesh.context, "tp": mesh.tensor}
    tokens = tokens_per_product(
        batch.micro_batch_size, batch.seq_len, cp=mesh.context, microbatches=plans.pipeline.microbatches
    )
    rows = [("run", c.job.description)] if c.job.description else []
    versions = {"titanlite": __version__, "torch": torch.__version__, "python": platform.python_version()}
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    rows += rep.model_rows(f"{c.model.name} {c.model.flavor}", parameters)
    rows += rep.compute_rows(
        flops,
        name,
        world_size,
        total_memory_bytes(device),
        peak,
        peak_is_given,
        in_float8,
    )
    asynchronous = c.experimental.enable_async_tensor_parallel
    rows.append(rep.mesh_row(degrees, world_size, c.training.enable_loss_parallel, asynchronous))
    if isinstance(model, PipelineModel):
        rows.append(rep.pipeline_row(plans.pipeline.schedule, model.layout))
    rows.append(rep.precision_row(c.training))
    if in_float8:
        rows += rep.float8_rows(c.float8, float8, tokens, plans.compile.model, name)
    rows += [
        rep.sharding_row(
            c.training,
            plans.shard.reshard_after_forward,
            mesh.weight_shards,
            batch.accumulation,
            sum(parameters.values()),
            name,
        ),
        rep.compile_row(c.training.compile, c.compile, mesh.tensor),
    ]
    if kept:
        rows.append(rep.activations_row(c.activation_checkpoint, kept, mesh.tensor, name))
    if c.training.loss_chunks > 1:
        rows.append(rep.loss_row(c.training.loss_chunks, tokens))
    rows += [
        ("tokenizer", plans.tokenizer.path or "bundled"),
        rep.data_row(c.training, c.data, datasets.train.documents, datasets.train.tokens_per_epoch),
        *rep.batch_rows(batch.micro_batch_size, batch.accumulation, mesh.dp_degree, batch.seq_len),
        rep.length_row(plans.train.steps, c.training.epochs, batch.tokens_per_step, datasets.train.tokens_per_epoch),
        rep.optimizer_row(c.optimizer, c.training.max_norm),
        rep.schedule_row(
            warmup_steps=schedule.warmup_steps,
            plateau_steps=schedule.plateau_steps,
            decay_type=schedule.decay_type,
            decay_steps=schedule.decay_steps,
            floor=max(schedule.min_lr_factor * c.optimizer.lr, schedule.min_lr or 0.0),
            total_steps=schedule.total_steps,
        ),
        *rep.guard_rows(c.guard),
        rep.validation_row(c.validation),
        rep.checkpoints_row(c.checkpoint),
        ("metrics to", str(Path(c.job.dump_folder) / METRICS)),
    ]
    if c.metrics.enable_tensorboard:
        rows.append(("TensorBoard to", c.metrics.save_tb_folder))
    if c.checkpoint.enable_checkpoint:
        rows.append(("checkpoints to", c.checkpoint.folder))
    rows += [("note", note) for note in plans.notes] + [("warning", warning) for warning in plans.warnings]
    return rep.startup_report(rows)


def rounding_setting(plans: Plans, device: torch.device) -> dict[str, str]:
    """Return by name what the rounding of a step's loss and norm depends on."""
    found = {
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "batch.micro_batch_size": str(plans.batch.micro_batch_size),
        "batch.accumulation": str(plans.batch.accumulation),
        "deterministic": str(plans.train.deterministic),
    }
    for room in ("mesh", "tensor_parallel", "pipeline", "shard", "float8", "activations", "compile"):
        found.update((f"{room}.{name}", str(value)) for name, value in asdict(getattr(plans, room)).items())
    found.pop("compile.cache_dir")
    return found


def fingerprints(args: LlamaArgs, datasets: Datasets) -> dict[str, str]:
    """Return what two runs must share for one to resume the other's checkpoints."""
    shape = asdict(args)
    shape.pop("max_seq_len")  # the length of the RoPE tables changes no weight
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
