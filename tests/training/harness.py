"""Trains a tiny Llama with titanlite's own pieces on dumped batches; runs inside a rank of the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from tests.training.reference import Curve
from titanlite.build import build_model, data_parallel_rank, to_device
from titanlite.config.plans import ActivationCheckpointPlan, CompilePlan, MeshPlan, OptimizerPlan, ShardPlan
from titanlite.data.loader import Batch
from titanlite.guard import FiniteGuard
from titanlite.loss import cross_entropy_sum
from titanlite.models import LlamaArgs, get_spec
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.compile import compile_loss
from titanlite.parallel.world import World
from titanlite.step import train_step

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


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def micro_batches(run: Run, step: int, rank: int, degree: int) -> list[Batch]:
    """This rank's share of a global batch, dealt out as the loader deals: sequence i goes to rank i mod degree."""
    tokens, labels = run.tokens[step, rank::degree], run.labels[step, rank::degree]
    parts = zip(tokens.chunk(run.accumulation), labels.chunk(run.accumulation), strict=True)
    return [Batch(t, y) for t, y in parts]


def build_tiny(world: World, run: Run) -> tuple[torch.nn.Module, torch.optim.Optimizer, int]:
    mesh = world.build_mesh(MeshPlan(world.size, run.replicas, world.size // run.replicas))
    spec = get_spec("llama3")
    model = build_model(spec, run.args, mesh, run.shard, world.device, run.seed, run.compile, run.activations)
    if run.optimizer == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    else:
        plan = OptimizerPlan(implementation=run.implementation, weight_decay=run.weight_decay)  # type: ignore[arg-type]
        optimizer = build_optimizer(model.parameters(), plan, world.device)
    return model, optimizer, data_parallel_rank(mesh)


def train(world: World, run: Run) -> Curve:
    """The run on this world; the curve holds full tensors under titanlite's names."""
    model, optimizer, rank = build_tiny(world, run)
    loss = compile_loss(cross_entropy_sum, run.compile.backend) if run.compile.loss else cross_entropy_sum
    guard = FiniteGuard(world.device)
    curve = Curve([], [], {}, {})
    for step, rate in enumerate(run.rates, start=1):
        batches = to_device(micro_batches(run, step - 1, rank, world.size), world.device)
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
            sync_every=run.shard.gradient_sync == "every",
            loss_function=loss,
        )
        keep.remove()
        curve.losses.append(result.loss.item())
        curve.norms.append(result.norm.item())
    curve.weights = {n: full(p) for n, p in model.named_parameters()}
    return curve


def initial_weights(world: World, run: Run) -> dict[str, torch.Tensor]:
    model, _, _ = build_tiny(world, run)
    return {n: full(p) for n, p in model.named_parameters()}


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
