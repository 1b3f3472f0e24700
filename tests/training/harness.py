"""Trains a tiny Llama with titanlite's own pieces on dumped batches; runs inside a rank of the pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.training.reference import Curve
from titanlite.build import build_model, build_pipeline, data_parallel_rank, to_device
from titanlite.config.pipeline import stage_count
from titanlite.config.plans import (
    ActivationCheckpointPlan,
    BatchPlan,
    CompilePlan,
    Float8Plan,
    LossPlan,
    MeshPlan,
    PipelinePlan,
    ShardPlan,
    TensorParallelPlan,
)
from titanlite.config.sections import Optimizer
from titanlite.data.loader import Batch
from titanlite.guard import FiniteGuard
from titanlite.loss import cross_entropy_sum
from titanlite.models import LlamaArgs, get_spec
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.compile import LossFunction, compile_loss
from titanlite.parallel.float8 import ScalePrecompute, plain
from titanlite.parallel.fsdp import DTYPES
from titanlite.parallel.pipeline import Pipeline, PipelineModel
from titanlite.parallel.tensor import tensor_loss
from titanlite.parallel.world import World
from titanlite.step import Duplicates, train_step

TINY = LlamaArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=192, multiple_of=32, max_seq_len=64)
FULL_PRECISION = ShardPlan(param_dtype="float32")


@dataclass
class Run:
    """One training run: what varies between the cells of a comparison."""

    tokens: torch.Tensor
    labels: torch.Tensor
    rates: list[float]
    args: LlamaArgs = TINY
    shard: ShardPlan = FULL_PRECISION
    optimizer: str = "AdamW"
    implementation: str | None = None
    weight_decay: float = 0.1
    accumulation: int = 1
    max_norm: float = 1.0
    seed: int = 7
    #: Ranks that hold the same shard (HSDP; all of them: DDP).
    replicas: int = 1
    activations: ActivationCheckpointPlan | None = None
    compile: CompilePlan = CompilePlan()
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
    float8: Float8Plan = Float8Plan()
    #: Pieces of the tokens in which the loss is computed.
    loss_chunks: int = 1

    def mesh(self, ranks: int) -> MeshPlan:
        """The degrees on so many ranks; those left over share the weights."""
        rest = ranks // (self.replicas * self.tensor * self.context * self.pipeline)
        return MeshPlan(ranks, self.replicas, rest, self.context, self.tensor, self.pipeline)

    def pipeline_plan(self) -> PipelinePlan:
        stages = stage_count(self.schedule, self.pipeline, self.split_points)
        return PipelinePlan(self.schedule, stages, self.split_points, self.pieces)

    def batch(self, ranks: int) -> BatchPlan:
        """What a rank is given in a step."""
        _, whole, seq_len = self.tokens.shape
        rows = whole // self.mesh(ranks).dp_degree // self.accumulation
        return BatchPlan(rows, self.accumulation, whole, seq_len, whole * seq_len)

    def alone(self) -> Run:
        """The same run on one rank."""
        return replace(self, replicas=1, tensor=1, context=1, pipeline=1)


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = plain(tensor.detach())
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def micro_batches(run: Run, step: int, rank: int, degree: int) -> list[Batch]:
    """This rank's share of a global batch, dealt out as the loader deals: sequence i goes to rank i mod degree."""
    tokens, labels = run.tokens[step, rank::degree], run.labels[step, rank::degree]
    parts = zip(tokens.chunk(run.accumulation), labels.chunk(run.accumulation), strict=True)
    return [Batch(t, y) for t, y in parts]


def sequence_part(run: Run, batches: list[Batch], rank: int) -> list[Batch]:
    """What a rank keeps of sequences that `run.context` ranks share: one chunk from the front, one from the back."""
    if run.context == 1:
        return batches
    place = rank // run.tensor % run.context

    def part(x: torch.Tensor) -> torch.Tensor:
        chunks = x.chunk(2 * run.context, dim=1)
        return torch.cat((chunks[place], chunks[-1 - place]), dim=1)

    return [Batch(part(batch.tokens), part(batch.labels)) for batch in batches]


def build_tiny(world: World, run: Run) -> tuple[torch.nn.Module, torch.optim.Optimizer, int]:
    mesh = world.build_mesh(run.mesh(world.size))
    spec = get_spec("llama3")
    model = build_model(
        spec,
        run.args,
        mesh,
        run.shard,
        world.device,
        run.seed,
        run.compile,
        run.activations,
        TensorParallelPlan(run.loss_parallel),
        run.pipeline_plan(),
        run.float8,
        LossPlan(run.loss_chunks),
    )
    if run.optimizer == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    else:
        settings = Optimizer(implementation=run.implementation, weight_decay=run.weight_decay)  # type: ignore[arg-type]
        optimizer = build_optimizer(model.parameters(), settings, world.device)
    return model, optimizer, data_parallel_rank(mesh)


def run_stages(model: torch.nn.Module, run: Run, world: World, loss: LossFunction) -> Pipeline | None:
    """What runs the model where ranks share its layers."""
    if not isinstance(model, PipelineModel):
        return None
    dtype = DTYPES[run.shard.param_dtype]
    return build_pipeline(model, run.args, run.pipeline_plan(), run.batch(world.size), dtype, world.device, loss)


def all_stages(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of this rank's layers, with those of the ranks that have the others."""
    if not isinstance(model, PipelineModel):
        return tensors
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size(model.group))]
    dist.all_gather_object(parts, tensors, model.group)
    return {name: tensor for part in parts for name, tensor in part.items()}


def train(world: World, run: Run) -> Curve:
    """The run on this world; the curve holds full tensors under titanlite's names."""
    model, optimizer, rank = build_tiny(world, run)
    plan = run.mesh(world.size)
    loss = compile_loss(cross_entropy_sum, run.compile.backend) if run.compile.loss else cross_entropy_sum
    if plan.tensor > 1:
        loss = tensor_loss(loss)
    pipeline = run_stages(model, run, world, loss)
    after_update = ScalePrecompute(model, world.build_mesh(plan)) if run.float8.precompute else None
    guard = FiniteGuard(world.device)
    curve = Curve([], [], {}, {})
    for step, rate in enumerate(run.rates, start=1):
        own = sequence_part(run, micro_batches(run, step - 1, rank, plan.dp_degree), world.rank)
        batches = to_device(own, world.device)
        if step == 1:
            # Clipping happens in place inside the step: the first gradients are caught on their way to the optimizer.
            keep = optimizer.register_step_pre_hook(
                lambda *_: curve.gradients.update(
                    {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
                )
            )
        result = train_step(
            model,
            optimizer,
            batches,
            step=step,
            lr=rate,
            max_norm=run.max_norm,
            guard=guard,
            duplicates=Duplicates(plan.tensor * plan.pipeline, plan.tensor),
            sync_every=run.shard.gradient_sync == "every",
            loss_function=loss,
            pipeline=pipeline,
            after_update=after_update,
        )
        keep.remove()
        curve.losses.append(result.loss.item())
        curve.norms.append(result.norm.item())
    curve.gradients = all_stages(model, curve.gradients)
    curve.weights = all_stages(model, {n: full(p) for n, p in model.named_parameters()})
    return curve


def train_afresh(world: World, run: Run) -> Curve:
    """`train` with nothing left of what earlier runs of this process compiled, nor anything for later ones."""
    if not (run.compile.model or run.compile.loss):
        return train(world, run)
    torch._dynamo.reset()
    try:
        return train(world, run)
    finally:
        torch._dynamo.reset()


def initial_weights(world: World, run: Run) -> dict[str, torch.Tensor]:
    model, _, _ = build_tiny(world, run)
    return all_stages(model, {n: full(p) for n, p in model.named_parameters()})


def batches(
    steps: int, global_batch: int, seq_len: int, vocab: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and shifted labels [steps, global batch, seq_len]; sequences end after very unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, vocab, (steps, global_batch, seq_len + 1), generator=generator)
    tokens, labels = window[..., :-1].contiguous(), window[..., 1:].clone()
    lengths = torch.randint(1, seq_len + 1, (steps, global_batch), generator=generator)
    lengths[:, 0] = 1
    labels[torch.arange(seq_len) >= lengths[..., None]] = -100
    return tokens, labels


class LateGuard(FiniteGuard):
    """Tells of a step when the next is under way, as it does on a GPU."""

    behind: torch.Tensor | None = None

    def watch(self) -> bool:
        record, self.behind = self.behind, self._record.clone() if self._unread else None
        self._unread = False
        if record is not None:
            self._read(record)
        wish, self._wish = self._wish, False
        return wish

    def check(self) -> None:
        record, self.behind = self.behind, None
        if record is not None:
            self._read(record)
        super().check()
