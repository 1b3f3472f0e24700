"""Config and ranks → components of a training loop: the one place that knows all rooms.

Order: tokenizer → text → model on the meta device → pipeline stages → float8 → tensor and context parallelism →
activation checkpointing → `torch.compile` → `fully_shard` → memory → initial weights → optimizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
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
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.plans import (
    ActivationCheckpointPlan,
    BatchPlan,
    CompilePlan,
    Float8Plan,
    LossPlan,
    PipelinePlan,
    Plans,
    ShardPlan,
    TensorParallelPlan,
)
from titanlite.config.sections.checkpoint import Checkpoint
from titanlite.config.sections.run import Job, Metrics
from titanlite.data.background import PassLoader, Prefetcher, StepLoader, ValidationPrefetcher
from titanlite.data.left_out import of_steps
from titanlite.data.loader import TrainLoader, ValidationLoader
from titanlite.data.packing import PackedDataset, build_dataset, build_validation_dataset
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.guard import FiniteGuard
from titanlite.loss import chunk_head, cross_entropy_sum
from titanlite.metrics.float8_error import Float8ErrorCheck
from titanlite.metrics.flops import device_name, peak_flops
from titanlite.metrics.garbage import GarbageCollection
from titanlite.metrics.jsonl import FILE as METRICS
from titanlite.metrics.memory import total_memory_bytes
from titanlite.metrics.observer import MetricsLogger
from titanlite.metrics.profiler import Profiler
from titanlite.metrics.startup_report import start_report
from titanlite.metrics.watchdog import StallWatch
from titanlite.models import LlamaArgs, ModelSpec, get_spec
from titanlite.models.shapes import as_record, flops_per_token
from titanlite.optim.learning_rate import LearningRate
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.activation_checkpoint import Kept, checkpoint_activations, trace_block
from titanlite.parallel.compile import CompileWatch, LossFunction, compile_loss, compile_units, prepare_compile
from titanlite.parallel.context import PartLoader, PartPasses, Share, apply_context_parallel
from titanlite.parallel.float8 import ScalePrecompute, convert
from titanlite.parallel.float8_choice import Choice, choose, converted_names
from titanlite.parallel.fsdp import DTYPES, offloads, shard
from titanlite.parallel.init import init_weights, materialize, seed_generators
from titanlite.parallel.pipeline import Piece, Pipeline, PipelineModel, cut, keep_gathered
from titanlite.parallel.pipeline_split import divide
from titanlite.parallel.tensor import ASYNC_OPTIONS, check_async, enable_async, split, tensor_loss
from titanlite.parallel.units import Unit, UnitError, choose_units
from titanlite.parallel.world import World, this_rank
from titanlite.prepare import model_args, undivided
from titanlite.run_callbacks import (
    AttemptRecord,
    CompileReport,
    ResumeCheck,
    SlowSaveWarning,
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

    world: World
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


def build_model(
    spec: ModelSpec,
    args: LlamaArgs,
    mesh: DeviceMesh,
    plan: ShardPlan,
    device: torch.device,
    seed: int,
    compile_plan: CompilePlan | None = None,
    activations: ActivationCheckpointPlan | None = None,
    tensor: TensorParallelPlan = TensorParallelPlan(),  # noqa: B008 (immutable)
    pipeline: PipelinePlan = PipelinePlan(),  # noqa: B008 (immutable)
    float8: Float8Plan = Float8Plan(),  # noqa: B008 (immutable)
    loss: LossPlan = LossPlan(),  # noqa: B008 (immutable)
) -> nn.Module:
    """The sharded model on `device` with its initial weights; no rank ever holds a full copy.

    Of a pipeline: this rank's stages, in a `PipelineModel`.
    """
    model = lay_out(spec, args, mesh, plan, device, compile_plan, activations, tensor, pipeline, float8, loss)

    def initialize(part: nn.Module) -> None:
        init_weights(part, lambda name: spec.init_rule(name, args), seed, device)
        part.init_buffers()  # type: ignore[operator]

    parameters_on = torch.device("cpu") if offloads(plan, device.type) else device
    for part in model.stages.values() if isinstance(model, PipelineModel) else [model]:
        materialize(part, device, initialize, parameters_on)
    return model


def lay_out(
    spec: ModelSpec,
    args: LlamaArgs,
    mesh: DeviceMesh,
    plan: ShardPlan,
    device: torch.device,
    compile_plan: CompilePlan | None = None,
    activations: ActivationCheckpointPlan | None = None,
    tensor: TensorParallelPlan = TensorParallelPlan(),  # noqa: B008 (immutable)
    pipeline: PipelinePlan = PipelinePlan(),  # noqa: B008 (immutable)
    float8: Float8Plan = Float8Plan(),  # noqa: B008 (immutable)
    loss: LossPlan = LossPlan(),  # noqa: B008 (immutable)
) -> nn.Module:
    """This rank's part of the model on the meta device: cut, divided and sharded, but without memory or weights.

    device: where it is to live. Of a pipeline: this rank's stages, in a `PipelineModel`.
    """

    def whole() -> nn.Module:
        return spec.build_on_meta(args)

    if mesh["pp"].size() > 1:
        plan = keep_gathered(plan, pipeline)
    # Of the whole model, so that they do not depend on where it is cut.
    units = choose_units(whole(), plan, spec.fsdp_units(args))
    if mesh["pp"].size() == 1:
        parts = {0: whole()}
    else:
        layout = divide(spec.pipeline_costs(args, args.max_seq_len), pipeline, mesh["pp"].size())
        parts = cut(whole, layout, mesh.get_local_rank("pp"))
    for part in parts.values():
        if loss.chunks > 1:
            chunk_head(part, loss.chunks)
        _parallelize(part, spec, args, mesh, units, plan, device, compile_plan, activations, tensor, float8)
    return parts[0] if mesh["pp"].size() == 1 else PipelineModel(parts, layout, mesh)


def _parallelize(
    model: nn.Module,
    spec: ModelSpec,
    args: LlamaArgs,
    mesh: DeviceMesh,
    units: Sequence[Unit],
    plan: ShardPlan,
    device: torch.device,
    compile_plan: CompilePlan | None,
    activations: ActivationCheckpointPlan | None,
    tensor: TensorParallelPlan,
    float8: Float8Plan,
) -> None:
    """Everything between the meta device and memory, for a model or one stage of it, in place."""
    if float8.enable:
        convert(model, converted_names(float8_choices(spec, args, float8, mesh["tp"].size())), float8)
    if mesh["tp"].size() > 1:
        split(model, spec.tensor_plan(args), mesh["tp"], tensor.loss_parallel)
    modules = dict(model.named_modules())
    if mesh["cp"].size() > 1 and any(name in modules for name in spec.block_names(args)):
        apply_context_parallel(model, mesh)
    if activations is not None:
        # What a graph computes is hidden from a policy by operation, so that is applied inside of the graphs.
        inside = activations.mode == "op" and compile_plan is not None and compile_plan.model
        names = compiled_names(spec, args, mesh["tp"].size()) if inside else spec.block_names(args)
        checkpoint_activations(model, names, activations, device)
    modules = dict(model.named_modules())
    if compile_plan is not None and compile_plan.model:
        names = compiled_names(spec, args, mesh["tp"].size())
        graphs = {name: modules[name] for name in names if name in modules}
        compile_units(graphs, compile_plan.backend, ASYNC_OPTIONS if tensor.asynchronous else None)
    held = [tuple(name for name in unit if name in modules) for unit in units]
    shard(model, [unit for unit in held if unit], mesh, plan)


def float8_choices(spec: ModelSpec, args: LlamaArgs, plan: Float8Plan, tensor: int) -> list[Choice]:
    """What float8 makes of each kind of linear of the whole model. tensor: ranks that share each product."""
    return choose(spec.linears(args), plan, spec.tensor_plan(args), tensor) if plan.enable else []


def build_pipeline(
    model: PipelineModel,
    args: LlamaArgs,
    plan: PipelinePlan,
    batch: BatchPlan,
    dtype: torch.dtype,
    device: torch.device,
    loss: LossFunction,
) -> Pipeline:
    """What runs the stages of a `PipelineModel`. dtype: of its activations."""
    mesh = model.mesh
    context, tensor = mesh["cp"].size(), mesh["tp"].size()
    length = batch.seq_len // context
    piece = Piece(batch.micro_batch_size // plan.microbatches, length, length // tensor, args.dim, args.n_vocab, dtype)

    def positions(seq_len: int) -> torch.Tensor:
        everywhere = torch.arange(seq_len * context, device=device)
        return everywhere if context == 1 else Share.of(mesh).part(everywhere, 0)

    return Pipeline(model, plan, piece, batch.accumulation, device, loss, positions if tensor > 1 else None)


def compiled_names(spec: ModelSpec, args: LlamaArgs, tensor: int) -> list[str]:
    """The modules that `torch.compile` makes one graph each.

    tensor: ranks that share each product. If they do, a graph of a whole block computes wrong gradients.
    """
    return spec.sublayer_names(args) if tensor > 1 else spec.block_names(args)


def check_tensor_parallel(plans: Plans, text: Datasets) -> None:
    """Whether ranks can share the products of this model and vocabulary; no process group is needed.

    Raises ConfigError.
    """
    if plans.mesh.tensor == 1:
        return
    if problems := undivided(model_args(plans.model, text.tokenizer.vocab_size), plans):
        raise ConfigError(problems)
    if plans.tensor_parallel.asynchronous:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        check_async(plans.mesh.tensor, device_type, this_rank().local_size)


def check_units(plans: Plans, text: Datasets) -> None:
    """Whether the model has the FSDP units that the plan asks for; no process group is needed. Raises ConfigError."""
    if plans.shard.units in ("block", "root"):
        return
    spec = get_spec(plans.model.name)
    args = model_args(plans.model, text.tokenizer.vocab_size)
    model = spec.build_on_meta(args)
    try:
        units = choose_units(model, plans.shard, spec.fsdp_units(args))
    except UnitError as error:
        key = "training.fsdp_min_params" if plans.shard.units == "size" else "training.fsdp_units"
        raise ConfigError([Problem("", key, str(error))]) from None
    blocks = tuple(f"{name}." for name in spec.block_names(args))
    within = next((name for unit in units for name in unit if name.startswith(blocks)), None)
    reasons = []
    if plans.compile.model:
        reasons.append("training.compile makes one graph of the block around it")
    if plans.activations.mode == "op":
        # torch matches a block's operators by their order, and the second time weights are gathered at other places.
        reasons.append('activation_checkpoint.selective_ac_option = "op" runs the block around it again, by operator')
    if plans.activations.offload:
        # Which weights stay on the device is read where the block begins; these are gathered later.
        reasons.append("activation_checkpoint.offload would send its gathered weights to host memory with the block's")
    if within and reasons:
        message = f"makes {within} a unit, but {' and '.join(reasons)}"
        hint = 'take units of a block or more: fsdp_units = "block", or a larger fsdp_min_params'
        raise ConfigError([Problem("", "training.fsdp_units", message, hint)])


def trace_activations(spec: ModelSpec, args: LlamaArgs, plans: Plans, device: torch.device, mesh: DeviceMesh) -> Kept:
    """What a block keeps for its backward, seen in a trace of one micro-batch without data."""
    model = spec.build_on_meta(args)
    if plans.float8.enable:
        names = converted_names(float8_choices(spec, args, plans.float8, plans.mesh.tensor))
        convert(model, names, replace(plans.float8, all_gather=False))  # nothing is gathered here
    if plans.mesh.context > 1:
        apply_context_parallel(model, mesh)
    tokens = plans.batch.micro_batch_size // plans.pipeline.microbatches, plans.batch.seq_len // plans.mesh.context
    dtype = DTYPES[plans.shard.param_dtype]
    return trace_block(model, spec.block_names(args), plans.activations, tokens, device, dtype)


def watch_compilation(
    spec: ModelSpec, args: LlamaArgs, model: nn.Module, plan: CompilePlan, tensor: int = 1
) -> CompileWatch | None:
    """Over what the plan compiles; None where that is nothing. tensor: ranks that share each product."""
    modules = dict(model.named_modules())  # a pipeline stage has some of the blocks
    names = [name for name in compiled_names(spec, args, tensor) if name in modules] if plan.model else []
    units = [modules[name] for name in names]
    functions = [cross_entropy_sum] if plan.loss else []
    return CompileWatch(units, functions, plan.backend) if units or functions else None


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
    world: World,
    datasets: Datasets | None = None,
    watchdog: StallWatch | None = None,
    callbacks: Sequence[Callback] | None = None,
) -> TrainingComponents:
    """Build everything that a loop needs, on this rank's device. All ranks call it together.

    datasets: of `read_datasets`; None: read here. watchdog: entered by the caller; None: one that only logs.
    callbacks: run after titanlite's own; None: those of `job.callbacks`, files relative to the working directory.
    """
    config, device = plans.config, world.device
    if callbacks is None:
        callbacks = load_callbacks(config.job.callbacks)
    datasets = datasets or read_datasets(plans)
    if plans.train.steps is None:
        raise ValueError("the run's length is not known yet: resolve the plans with the length of the text")

    # Model
    spec = get_spec(plans.model.name)
    args = model_args(plans.model, datasets.tokenizer.vocab_size)
    prepare_compile(plans.compile, device.type)
    mesh = world.build_mesh(plans.mesh)
    loss = compile_loss(cross_entropy_sum, plans.compile.backend) if plans.compile.loss else cross_entropy_sum
    if plans.mesh.tensor > 1:
        loss = tensor_loss(loss)
        if plans.tensor_parallel.asynchronous:
            enable_async(mesh["tp"])
    model = build_model(
        spec,
        args,
        mesh,
        plans.shard,
        device,
        plans.train.seed or 0,
        plans.compile,
        plans.activations,
        plans.tensor_parallel,
        plans.pipeline,
        plans.float8,
        plans.loss,
    )
    world.cover_groups()
    dtype = DTYPES[plans.shard.param_dtype]
    runner: Runner = PlainRunner(model, loss, plans.shard.gradient_sync == "every")
    if isinstance(model, PipelineModel):
        runner = build_pipeline(model, args, plans.pipeline, plans.batch, dtype, device, loss)
    if plans.train.seed is not None:  # of torch's own generators; the weights and the data order have their own
        seed_generators(plans.train.seed, mesh)

    # Data
    rank, ranks = data_parallel_rank(mesh), plans.mesh.dp_degree
    pin = plans.data.pin_memory and device.type == "cuda"
    skip = of_steps(plans.data.skip_steps, plans.batch.global_batch_size)
    steps: StepLoader = TrainLoader(datasets.train, plans.batch, rank, ranks, skip)
    if plans.mesh.context > 1:
        steps = PartLoader(steps, mesh)
    validation = None
    if datasets.validation is not None:
        section = plans.validation
        passes: PassLoader = ValidationLoader(datasets.validation, section.batch_size, section.steps, rank, ranks)
        if plans.mesh.context > 1:
            passes = PartPasses(passes, mesh)
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
    folder, batch = Path(config.job.dump_folder), plans.batch
    name, flops = device_name(device), flops_per_token(args, batch.seq_len)
    peak = plans.observe.peak_flops or (peak_flops(name) if device.type == "cuda" else None)
    kept = trace_activations(spec, args, plans, device, mesh)
    compiled = watch_compilation(spec, args, model, plans.compile, plans.mesh.tensor)
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
        return start_report(
            now,
            parameters=parameter_counts(spec.build_on_meta(args)),
            flops_per_token=flops,
            device=name,
            world_size=world.size,
            versions={"titanlite": __version__, "torch": torch.__version__, "python": platform.python_version()},
            tokenizer=plans.tokenizer.path or "bundled",
            documents=datasets.train.documents,
            tokens_per_epoch=datasets.train.tokens_per_epoch,
            memory_bytes=total_memory_bytes(device),
            peak_flops=peak,
            folders=_written_to(config.job, config.metrics, config.checkpoint),
            kept=kept,
            float8=float8_choices(spec, args, plans.float8, plans.mesh.tensor),
            stages=model.layout if isinstance(model, PipelineModel) else None,
        )

    in_epochs = plans.data.epochs is not None
    drift = plans.float8.drift_check if plans.float8.enable else 0
    profiles = config.profiling.enable_profiling or config.profiling.enable_memory_snapshot
    # Every callback of a run, in the order in which it is called. The watchdog is first: other ranks wait for it.
    every: list[Callback | None] = [
        Watchdog(watchdog or StallWatch(plans.stall, end=None), entered=watchdog is not None),
        Timeouts(config.comm.init_timeout_seconds, config.comm.train_timeout_seconds) if world.timeout else None,
        gc,
        attempts,
        StartReport(report, config.checkpoint, plans.config_toml, skip, attempts, in_epochs),
        metrics,
        CompileReport(compiled) if compiled else None,
        Float8ErrorCheck(drift, dtype, metrics.write) if drift else None,
        Profiler(config.profiling, world.rank, device) if profiles else None,
        ResumeCheck(resume_guard, datasets.train, batch.global_batch_size, skip, world),
        SlowSaveWarning(world.rank),
        *callbacks,
    ]
    if config.debug.deterministic:
        # cuBLAS is deterministic only with a fixed workspace, chosen before its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.debug.deterministic_warn_only)
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


def _written_to(job: Job, metrics: Metrics, checkpoint: Checkpoint) -> dict[str, str]:
    """Return what a run writes → where."""
    folders = {"metrics": str(Path(job.dump_folder) / METRICS)}
    if metrics.enable_tensorboard:
        folders["TensorBoard"] = metrics.save_tb_folder
    if checkpoint.enable_checkpoint:
        folders["checkpoints"] = checkpoint.folder
    return folders


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
