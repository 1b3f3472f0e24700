"""Plans and World → Parts: the one place that knows all rooms.

Order: tokenizer → text → model on the meta device → pipeline stages → float8 → tensor and context parallelism →
activation checkpointing → `torch.compile` → `fully_shard` → memory → initial weights → optimizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.errors import ConfigError, Problem
from titanlite.config.fit import tensor_problems
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
from titanlite.data.loader import Batch, TrainLoader, ValidationLoader
from titanlite.data.packing import PackedDataset, build_dataset, build_validation_dataset
from titanlite.data.prefetch import PassLoader, Prefetcher, StepLoader, ValidationPrefetcher
from titanlite.data.skip_ranges import ranges_of_steps
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.loss import chunk_head, cross_entropy_sum
from titanlite.models import LlamaArgs, ModelSpec, get_spec
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.activation_checkpoint import Kept, checkpoint_activations, trace_block
from titanlite.parallel.compile import CompileWatch, LossFunction, compile_loss, compile_units, prepare_compile
from titanlite.parallel.context import PartLoader, PartPasses, Share, apply_context_parallel
from titanlite.parallel.float8 import ScalePrecompute, convert
from titanlite.parallel.float8_choice import Choice, choose, converted_names
from titanlite.parallel.fsdp import DTYPES, offloads, shard
from titanlite.parallel.init import init_weights, materialize
from titanlite.parallel.pipeline import Piece, Pipeline, PipelineModel, cut, keep_gathered
from titanlite.parallel.pipeline_split import divide
from titanlite.parallel.tensor import ASYNC_OPTIONS, check_async, enable_async, split, tensor_loss
from titanlite.parallel.units import Unit, UnitError, choose_units
from titanlite.parallel.world import World, this_rank


@dataclass(frozen=True)
class Text:
    """What is read before anything is built."""

    tokenizer: Tokenizer
    train: PackedDataset
    validation: PackedDataset | None


@dataclass
class Parts:
    """What a training loop is made of."""

    spec: ModelSpec
    args: LlamaArgs
    mesh: DeviceMesh
    model: nn.Module
    loss: LossFunction
    #: None where nothing is compiled.
    compile_watch: CompileWatch | None
    #: What the blocks keep for their backward.
    kept: Kept
    optimizer: torch.optim.Optimizer
    loader: Prefetcher
    validation: ValidationPrefetcher | None
    #: Runs the stages of `model` where ranks share the layers.
    pipeline: Pipeline | None = None
    #: What float8 makes of each kind of linear; empty where it is off.
    float8: Sequence[Choice] = ()
    #: For `train_step`.
    after_update: Callable[[], None] | None = None


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


def check_tensor_parallel(plans: Plans, text: Text) -> None:
    """Whether ranks can share the products of this model and vocabulary; no process group is needed.

    Raises ConfigError.
    """
    if plans.mesh.tensor == 1:
        return
    if problems := tensor_problems(plans.config.model_args(text.tokenizer.vocab_size), plans.config):
        raise ConfigError(problems)
    if plans.tensor_parallel.asynchronous:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        check_async(plans.mesh.tensor, device_type, this_rank().local_size)


def check_units(plans: Plans, text: Text) -> None:
    """Whether the model has the FSDP units that the plan asks for; no process group is needed. Raises ConfigError."""
    if plans.shard.units in ("block", "root"):
        return
    spec = get_spec(plans.model.name)
    args = plans.config.model_args(text.tokenizer.vocab_size)
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


def read_text(plans: Plans) -> Text:
    """Tokenizer and texts. Read before any process group or model exists, so that bad ones end a run early.

    Raises DataError naming file and record, ShapeError when the tokenizer has more entries than the model.
    """
    run = plans.config
    tokenizer = load_tokenizer(run.model.tokenizer_path, run.model.name)
    vocabulary = run.model_args(tokenizer.vocab_size).n_vocab
    train = build_dataset(run.training, run.data, tokenizer, vocabulary)
    if not run.validation.enable:
        return Text(tokenizer, train, None)
    seq_len = run.validation.seq_len or run.training.seq_len
    return Text(tokenizer, train, build_validation_dataset(run.validation, run.data, tokenizer, vocabulary, seq_len))


def build(plans: Plans, world: World, text: Text) -> Parts:
    """Everything a loop needs, on this rank's device."""
    spec = get_spec(plans.model.name)
    args = plans.config.model_args(text.tokenizer.vocab_size)
    prepare_compile(plans.compile, world.device.type)
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
        world.device,
        plans.train.seed or 0,
        plans.compile,
        plans.activations,
        plans.tensor_parallel,
        plans.pipeline,
        plans.float8,
        plans.loss,
    )
    world.cover_groups()
    pipeline = None
    if isinstance(model, PipelineModel):
        dtype = DTYPES[plans.shard.param_dtype]
        pipeline = build_pipeline(model, args, plans.pipeline, plans.batch, dtype, world.device, loss)
    rank = data_parallel_rank(mesh)
    data = plans.config.data
    pin = data.pin_memory and world.device.type == "cuda"
    shared = plans.mesh.context > 1
    batch = plans.batch
    skip = ranges_of_steps(data.skip_steps, batch.global_batch_size)
    loader: StepLoader = TrainLoader(
        text.train, batch.global_batch_size, batch.micro_batch_size, rank, plans.mesh.dp_degree, skip
    )
    if shared:
        loader = PartLoader(loader, mesh)
    validation = None
    if text.validation is not None:
        held_out: PassLoader = ValidationLoader(
            text.validation, plans.validation.batch_size, plans.validation.steps, rank, plans.mesh.dp_degree
        )
        if shared:
            held_out = PartPasses(held_out, mesh)
        validation = ValidationPrefetcher(held_out, data.prefetch, pin, data.persistent_workers)
    return Parts(
        spec=spec,
        args=args,
        mesh=mesh,
        model=model,
        loss=loss,
        compile_watch=watch_compilation(spec, args, model, plans.compile, plans.mesh.tensor),
        kept=trace_activations(spec, args, plans, world.device, mesh),
        optimizer=build_optimizer(model.parameters(), plans.config.optimizer, world.device),
        loader=Prefetcher(loader, data.prefetch, pin),
        validation=validation,
        pipeline=pipeline,
        float8=float8_choices(spec, args, plans.float8, plans.mesh.tensor),
        after_update=ScalePrecompute(model, mesh) if plans.float8.precompute else None,
    )


def fingerprints(args: LlamaArgs, text: Text) -> dict[str, str]:
    """What two runs must share for one to resume the other's checkpoints."""
    shape = asdict(args)
    shape.pop("max_seq_len")  # the length of the RoPE tables changes no weight
    order = {name: value for name, value in text.train.settings.items() if name != "epochs"}
    return {
        "model": _digest(shape),
        "tokenizer": text.tokenizer.fingerprint[:16],
        "data": text.train.fingerprint[:16],
        "data order": ", ".join(f"{name} {value}" for name, value in order.items()),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Parameters by top-level module, in order; a tied weight counts once."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        top = name.split(".")[0]
        counts[top] = counts.get(top, 0) + parameter.numel()
    return counts


def to_device(micro_batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """The micro-batches on `device`; without waiting for it if they are in page-locked memory (see `Prefetcher`)."""
    return [
        Batch(b.tokens.to(device, non_blocking=True), b.labels.to(device, non_blocking=True)) for b in micro_batches
    ]
