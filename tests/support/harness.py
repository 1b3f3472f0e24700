"""Trains a tiny model with titanlite's own pieces on dumped batches; runs inside a rank of the
pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace as changed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support.reference import Curve
from tests.support.run_of import run_of
from tests.support.steps import train_step
from titanlite.assembly.loaders import data_parallel_rank
from titanlite.config.model_sections import Optimizer
from titanlite.config.sections import ActivationCheckpoint, Compile, Experimental, Float8, Training
from titanlite.data.loader import Batch, to_device
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import plain
from titanlite.features.float8.gathered import ScalePrecompute
from titanlite.features.pipeline.runner import Pipeline
from titanlite.features.pipeline.stages import PipelineModel
from titanlite.loss import LossFunction
from titanlite.models import LlamaArgs
from titanlite.optim.guard import FiniteGuard
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.run.config import BatchSizes, MeshSizes
from titanlite.step import ReplicationFactors, StepResult

TINY = LlamaArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=192, multiple_of=32, max_seq_len=64
)

#: Ways to recompute.
NONE = ActivationCheckpoint(mode="none")
FULL = ActivationCheckpoint(mode="full")
EVERY_2 = ActivationCheckpoint(selective_ac_option="2")
OP = ActivationCheckpoint(selective_ac_option="op")
MODES = {"none": NONE, "every": EVERY_2, "op": OP, "full": FULL}
#: A linear in the middle of the model.
W2 = "layers.1.feed_forward.w2"


def full_precision(**changes: Any) -> Training:
    return Training(mixed_precision_param="float32", **changes)


@dataclass
class Run:
    """One training run: what varies between the cells of a comparison."""

    tokens: torch.Tensor
    labels: torch.Tensor
    rates: list[float]
    #: Number of each token's document; None: no masks.
    documents: torch.Tensor | None = None
    family: str = "llama3"
    args: LlamaArgs = TINY
    training: Training = full_precision()
    optimizer: str = "AdamW"
    implementation: str | None = None
    weight_decay: float = 0.1
    #: The section of the optimizer; None: one of the three fields above.
    settings: Optimizer | None = None
    accumulation: int = 1
    max_norm: float = 1.0
    seed: int = 7
    #: Ranks that hold the same shard (HSDP; all of them: DDP).
    replicas: int = 1
    activations: ActivationCheckpoint = NONE
    #: None: nothing is compiled.
    compile: Compile | None = None
    #: Ranks that share each product, and whether the loss is computed on sharded logits.
    tensor: int = 1
    loss_parallel: bool = True
    #: Ranks that share each sequence.
    context: int = 1
    #: Ranks that share the layers, how they take turns, and pieces of each micro-batch.
    pipeline: int = 1
    schedule: str = "1F1B"
    split_points: tuple[str, ...] = ()
    pieces: int = 2
    float8: Float8 = Float8()
    #: Pieces of the tokens in which the loss is computed.
    loss_chunks: int = 1
    #: Ranks that share the experts of an MoE layer.
    expert: int = 1

    def mesh(self, ranks: int) -> MeshSizes:
        """The degrees on so many ranks; those left over share the weights."""
        degrees = (self.context, self.tensor, self.pipeline)
        rest = ranks // (self.replicas * math.prod(degrees))
        return MeshSizes(ranks, self.replicas, rest, *degrees, self.expert)

    def builder(self, world: DistEnv) -> ModelBuilder:
        training = changed(
            self.training,
            compile=self.compile is not None,
            loss_chunks=self.loss_chunks,
            enable_loss_parallel=self.loss_parallel,
        )
        experimental = Experimental(
            pipeline_parallel_schedule=self.schedule,
            pipeline_parallel_split_points=list(self.split_points),
            pipeline_parallel_microbatches=self.pieces,
        )
        sizes = self.mesh(world.size)
        run = run_of(
            self.family,
            sizes,
            training=training,
            experimental=experimental,
            activation_checkpoint=self.activations,
            compile=self.compile or Compile(),
            float8=self.float8,
        )
        return ModelBuilder(run, self.args, world.build_mesh(**sizes.dimensions), world.device)

    def alone(self) -> Run:
        """The same run on one rank."""
        return replace(self, replicas=1, tensor=1, context=1, pipeline=1, expert=1)


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = plain(tensor.detach())
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def micro_batches(run: Run, step: int, rank: int, degree: int) -> list[Batch]:
    """This rank's share of a global batch, dealt out as the loader deals: sequence i goes to rank i
    mod degree.
    """
    tokens = run.tokens[step, rank::degree]
    labels = run.labels[step, rank::degree]
    whole = (
        [tokens, labels]
        if run.documents is None
        else [tokens, labels, run.documents[step, rank::degree]]
    )
    return [Batch(*part) for part in zip(*(t.chunk(run.accumulation) for t in whole), strict=True)]


def sequence_part(run: Run, batches: list[Batch], rank: int) -> list[Batch]:
    """What a rank keeps of sequences that `run.context` ranks share: one chunk from the front, one
    from the back.
    """
    if run.context == 1:
        return batches
    place = rank // run.tensor % run.context

    def part(x: torch.Tensor) -> torch.Tensor:
        chunks = x.chunk(2 * run.context, dim=1)
        return torch.cat((chunks[place], chunks[-1 - place]), dim=1)

    return [Batch(part(batch.tokens), part(batch.labels), batch.documents) for batch in batches]


def alone(
    tokens: torch.Tensor, labels: torch.Tensor, documents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [steps, rows, seq] with each document in a row of its own, filled up
    without targets.
    """
    most = int(documents.max()) + 1
    size = torch.Size([len(tokens), tokens.size(1) * most, tokens.size(2)])
    apart = torch.zeros(size, dtype=torch.int64)
    targets = torch.full(size, -100)
    for step, row in torch.cartesian_prod(
        torch.arange(size[0]), torch.arange(tokens.size(1))
    ).tolist():
        for number in range(most):
            own = documents[step, row] == number
            apart[step, row * most + number, : int(own.sum())] = tokens[step, row, own]
            targets[step, row * most + number, : int(own.sum())] = labels[step, row, own]
    return apart, targets


def build_tiny(world: DistEnv, run: Run) -> tuple[torch.nn.Module, torch.optim.Optimizer, int]:
    builder = run.builder(world)
    model = builder.build(run.seed)
    if run.optimizer == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    else:
        settings = run.settings or Optimizer(
            implementation=run.implementation, weight_decay=run.weight_decay
        )  # type: ignore[arg-type]
        blocks = builder.spec.block_names(run.args)
        optimizer = build_optimizer(dict(model.named_parameters()), settings, world.device, blocks)
    return model, optimizer, data_parallel_rank(builder.mesh)


def stepper(
    world: DistEnv, run: Run, **common: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[..., StepResult]]:
    """The model, its optimizer, and `take(step, …)`: a step on this rank's share of a global batch,
    else the first.

    common: settings of each `train_step`.
    """
    model, optimizer, rank = build_tiny(world, run)
    plan = run.mesh(world.size)
    settings = {"max_norm": 1.0, "guard": FiniteGuard(world.device), **common}
    settings.setdefault("sync_every", run.training.gradient_sync == "every")
    settings.setdefault("factors", ReplicationFactors(plan.tensor * plan.pipeline, plan.tensor))
    if run.float8.precompute_float8_dynamic_scale_for_fsdp:
        settings["after_update"] = ScalePrecompute(model, run.builder(world).mesh)

    def take(step: int, lr: float = 1e-3, batch: int = 0, **more: Any) -> StepResult:
        own = sequence_part(run, micro_batches(run, batch, rank, plan.dp_degree), world.rank)
        data = to_device(own, world.device)
        return train_step(model, optimizer, data, step=step, lr=lr, **{**settings, **more})

    return model, optimizer, take


def run_stages(
    model: torch.nn.Module, run: Run, world: DistEnv, loss: LossFunction
) -> Pipeline | None:
    """What runs the model where ranks share its layers."""
    if not isinstance(model, PipelineModel):
        return None
    _, sequences, seq_len = run.tokens.shape
    rows = sequences // run.mesh(world.size).dp_degree // run.accumulation
    builder = run.builder(world)
    pipeline = builder.run.features.pipeline
    assert pipeline is not None
    batch = BatchSizes(rows, run.accumulation, sequences, seq_len, sequences * seq_len)
    return pipeline.runner(replace(builder, run=changed(builder.run, batch=batch)), model, loss)


def all_stages(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of this rank's layers, with those of the ranks that have the others."""
    if not isinstance(model, PipelineModel):
        return tensors
    parts: list[dict[str, torch.Tensor]] = [
        {} for _ in range(dist.get_world_size(model.pipeline_group))
    ]
    dist.all_gather_object(parts, tensors, model.pipeline_group)
    return {name: tensor for part in parts for name, tensor in part.items()}


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's layers: parameters, and the biases of experts, which are buffers."""
    found = {name: full(parameter) for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            found[name] = full(buffer)
    return found


def train(world: DistEnv, run: Run) -> Curve:
    """The run on this world; the curve holds full tensors under titanlite's names."""
    loss = run.builder(world).loss()
    model, optimizer, take = stepper(world, run, max_norm=run.max_norm, loss_function=loss)
    pipeline = run_stages(model, run, world, loss)
    curve = Curve([], [], {}, {})
    # Clipping happens in place inside the step: the first gradients are caught on their way to the
    # optimizer.
    keep = optimizer.register_step_pre_hook(
        lambda *_: curve.gradients.update(
            {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        )
    )
    for step, rate in enumerate(run.rates, start=1):
        result = take(step, rate, step - 1, pipeline=pipeline)
        keep.remove()
        curve.losses.append(result.loss.item())
        curve.norms.append(result.grad_norm.item())
    curve.gradients = all_stages(model, curve.gradients)
    curve.weights = all_stages(model, weights_of(model))
    return curve


def train_afresh(world: DistEnv, run: Run) -> Curve:
    """`train` with nothing left of what earlier runs of this process compiled, nor anything for
    later ones.
    """
    if run.compile is None:
        return train(world, run)
    torch._dynamo.reset()
    # A loss that ran op by op on sharded logits leaves entries with which the compiled one cannot
    # be partitioned.
    _clear_sharding_prop_cache()
    try:
        return train(world, run)
    finally:
        torch._dynamo.reset()


def initial_weights(world: DistEnv, run: Run) -> dict[str, torch.Tensor]:
    model, _, _ = build_tiny(world, run)
    return all_stages(model, weights_of(model))


def batches(
    steps: int, global_batch: int, seq_len: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and shifted labels [steps, global batch, seq_len]; sequences end after very
    unequal lengths.
    """
    generator = torch.Generator().manual_seed(0)
    window = torch.randint(0, vocab, (steps, global_batch, seq_len + 1), generator=generator)
    tokens = window[..., :-1].contiguous()
    labels = window[..., 1:].clone()
    lengths = torch.randint(1, seq_len + 1, (steps, global_batch), generator=generator)
    lengths[:, 0] = 1
    labels[torch.arange(seq_len) >= lengths[..., None]] = -100
    return tokens, labels


def moments_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What the optimizer holds of this rank's layers."""
    return {
        f"{name}.{key}": full(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, moments and the optimizer's count of steps."""
    return all_stages(model, {**weights_of(model), **moments_of(model, optimizer)})


def equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
