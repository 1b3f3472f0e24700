"""Plans and DistEnv → Parts: the one place that knows all rooms.

Order: tokenizer → text → model on the meta device → pipeline stages → float8 → tensor and context parallelism →
activation checkpointing → `torch.compile` → `fully_shard` → memory → initial weights → optimizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.errors import ConfigError
from titanlite.config.plans import Plans
from titanlite.data.background import PassLoader, Prefetcher, StepLoader, ValidationPrefetcher
from titanlite.data.left_out import of_steps
from titanlite.data.loader import Batch, TrainLoader, ValidationLoader
from titanlite.data.packing import PackedDataset, build_dataset, build_validation_dataset
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.models import LlamaArgs, ModelSpec, get_spec
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.activation_checkpoint import ActivationStats
from titanlite.parallel.compile import CompileWatch, LossFunction, prepare_compile
from titanlite.parallel.context import CPLoader
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.float8 import ScalePrecompute
from titanlite.parallel.float8_choice import Float8Choice
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.parallel.pipeline import Pipeline, PipelineModel
from titanlite.parallel.tensor import enable_async
from titanlite.preflight import async_tp_problems, fsdp_problems
from titanlite.prepare import model_args, undivided


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
    kept: ActivationStats
    optimizer: torch.optim.Optimizer
    loader: Prefetcher
    validation: ValidationPrefetcher | None
    #: Runs the stages of `model` where ranks share the layers.
    pipeline: Pipeline | None = None
    #: What float8 makes of each kind of linear; empty where it is off.
    float8: Sequence[Float8Choice] = ()
    #: For `train_step`.
    after_update: Callable[[], None] | None = None


def check_model(plans: Plans, text: Text) -> None:
    """Check that ranks can divide this model and vocabulary; no process group is needed. Raises ConfigError."""
    config, tp = plans.config, plans.mesh.tensor
    spec, args = get_spec(plans.model.name), model_args(plans.model, text.tokenizer.vocab_size)
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


def read_text(plans: Plans) -> Text:
    """Tokenizer and texts. Read before any process group or model exists, so that bad ones end a run early.

    Raises DataError naming file and record, ShapeError when the tokenizer has more entries than the model.
    """
    tokenizer = load_tokenizer(plans.tokenizer)
    vocabulary = model_args(plans.model, tokenizer.vocab_size).n_vocab
    train = build_dataset(plans.data, tokenizer, vocabulary)
    enabled = plans.validation.enable
    validation = build_validation_dataset(plans.validation, tokenizer, vocabulary, plans.data) if enabled else None
    return Text(tokenizer, train, validation)


def build(plans: Plans, world: DistEnv, text: Text) -> Parts:
    """Everything a loop needs, on this rank's device."""
    config, degrees, batch = plans.config, plans.mesh, plans.batch
    spec = get_spec(plans.model.name)
    args = model_args(plans.model, text.tokenizer.vocab_size)
    if config.training.compile:
        prepare_compile(config.compile.backend, world.device.type, config.compile.cache_dir)
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
        world.device,
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
    pipeline = None
    if isinstance(model, PipelineModel):
        pipeline = builder.pipeline(model, loss, accumulation=batch.accumulation, **sizes)
    rank = data_parallel_rank(mesh)
    data = plans.data
    pin = data.pin_memory and world.device.type == "cuda"
    shared = degrees.context > 1
    left_out = of_steps(data.skip_steps, plans.batch.global_batch_size)
    loader: StepLoader = TrainLoader(text.train, plans.batch, rank, plans.mesh.dp_degree, left_out)
    if shared:
        loader = CPLoader(loader, mesh)
    validation = None
    if text.validation is not None:
        held_out: PassLoader = ValidationLoader(
            text.validation, plans.validation.batch_size, plans.validation.steps, rank, plans.mesh.dp_degree
        )
        if shared:
            held_out = CPLoader(held_out, mesh)
        validation = ValidationPrefetcher(held_out, data.prefetch, pin, data.persistent_workers)
    return Parts(
        spec=spec,
        args=args,
        mesh=mesh,
        model=model,
        loss=loss,
        compile_watch=builder.watch_compilation(model),
        kept=builder.trace_activations(**sizes),
        optimizer=build_optimizer(model.parameters(), plans.optimizer, world.device),
        loader=Prefetcher(loader, data.prefetch, pin),
        validation=validation,
        pipeline=pipeline,
        float8=builder.float8_choices(),
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
