"""Plans and World → Parts: the one place that knows all rooms.

Order: tokenizer → text → model on the meta device → `fully_shard` → memory → initial weights → optimizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.plans import Plans, ShardPlan
from titanlite.data.loader import Batch, TrainLoader, ValidationLoader
from titanlite.data.packing import PackedDataset, build_dataset, build_validation_dataset
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.models import LlamaArgs, ModelSpec, get_spec
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.fsdp import shard
from titanlite.parallel.init import init_weights, materialize
from titanlite.parallel.world import World
from titanlite.prepare import model_args


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
    optimizer: torch.optim.Optimizer
    loader: TrainLoader
    validation: ValidationLoader | None


def build_model(
    spec: ModelSpec, args: LlamaArgs, mesh: DeviceMesh, plan: ShardPlan, device: torch.device, seed: int
) -> nn.Module:
    """The sharded model on `device` with its initial weights; no rank ever holds a full copy."""
    with torch.device("meta"):
        model = spec.build(args)
    modules = dict(model.named_modules())
    shard(model, [[modules[name] for name in unit] for unit in spec.fsdp_units(args)], mesh, plan)

    def initialize(_: nn.Module) -> None:
        init_weights(model, lambda name: spec.init_rule(name, args), seed)
        model.init_buffers()  # type: ignore[operator]

    materialize(model, device, initialize)
    return model


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
    return Text(
        tokenizer, train, build_validation_dataset(plans.validation, tokenizer, vocabulary) if enabled else None
    )


def build(plans: Plans, world: World, text: Text) -> Parts:
    """Everything a loop needs, on this rank's device."""
    spec = get_spec(plans.model.name)
    args = model_args(plans.model, text.tokenizer.vocab_size)
    mesh = world.build_mesh(plans.mesh)
    model = build_model(spec, args, mesh, plans.shard, world.device, plans.train.seed or 0)
    rank = data_parallel_rank(mesh)
    validation = None
    if text.validation is not None:
        validation = ValidationLoader(
            text.validation, plans.validation.batch_size, plans.validation.steps, rank, plans.mesh.dp_degree
        )
    return Parts(
        spec=spec,
        args=args,
        mesh=mesh,
        model=model,
        optimizer=build_optimizer(model.parameters(), plans.optimizer, world.device),
        loader=TrainLoader(text.train, plans.batch, rank, plans.mesh.dp_degree),
        validation=validation,
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
    """The micro-batches on `device`, without waiting for it."""
    if device.type == "cuda":
        # From pageable memory even a non-blocking copy may wait for the stream.
        micro_batches = [Batch(b.tokens.pin_memory(), b.labels.pin_memory()) for b in micro_batches]
    return [
        Batch(b.tokens.to(device, non_blocking=True), b.labels.to(device, non_blocking=True)) for b in micro_batches
    ]
