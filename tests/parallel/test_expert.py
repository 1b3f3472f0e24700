"""Expert parallelism on real ranks: the same losses, gradients, weights and checkpoints as on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.pool import Pools
from tests.steps import train_step
from titanlite.build import data_parallel_rank
from titanlite.data.loader import Batch
from titanlite.fit import load_config
from titanlite.guard import FiniteGuard
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.step import ReplicationFactors
from tests.training.compare import LABELS, TOKENS
from tests.training.harness import all_stages, full

SIZE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "n_experts": 4}
SHARED = {
    "model.name": "mixtral",
    **{f"model.overrides.{key}": value for key, value in SIZE.items()},
    "model.vocab_size": 192,
    "training.seq_len": 32,
    "training.batch_size": 1,
    "training.global_batch_size": 8,
    "training.mixed_precision_param": "float32",
    "validation.enable": "false",
    "compile.backend": "aot_eager",
}
EP, FSDP = "parallelism.expert_parallel_degree", "training.data_parallel_shard_degree"
REPLICAS = "training.data_parallel_replicate_degree"
STEPS = 3


def config_of(ranks: int, **flags: Any) -> Any:
    every = {**SHARED, **flags}
    return load_config("debug_model.toml", ranks, [f"--{key}={value}" for key, value in every.items()])


def build(world: DistEnv, run: Any) -> tuple[ModelBuilder, torch.nn.Module, torch.optim.Optimizer]:
    m = run.mesh
    mesh = world.build_mesh(pp=m.pipeline, dp_replicate=m.dp_replicate, dp_shard=m.dp_shard, cp=m.context, tp=m.tensor)
    sections = run.training, run.experimental, run.activation_checkpoint, run.compile, run.float8
    builder = ModelBuilder(run.spec, run.model_args(), mesh, world.device, *sections, ep=m.expert)
    model = builder.build(7)
    blocks = builder.spec.block_names(builder.args)
    return builder, model, build_optimizer(dict(model.named_parameters()), run.optimizer, world.device, blocks)


def train(world: DistEnv, run: Any) -> dict[str, Any]:
    builder, model, optimizer = build(world, run)
    found: dict[str, Any] = {"losses": [], "norms": []}
    rank, degree = data_parallel_rank(builder.mesh), run.mesh.dp_degree

    def keep(*_: Any) -> None:
        # Before clipping in place, all ranks gather together: full_tensor is a collective.
        found.setdefault("gradients", {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        hook.remove()

    hook = optimizer.register_step_pre_hook(keep)
    for step in range(STEPS):
        tokens, labels = TOKENS[step, rank::degree], LABELS[step, rank::degree]
        pieces = zip(tokens.chunk(run.batch.accumulation), labels.chunk(run.batch.accumulation), strict=True)
        result = train_step(
            model,
            optimizer,
            [Batch(*piece) for piece in pieces],
            step=step + 1,
            lr=1e-3,
            max_norm=1.0,
            guard=FiniteGuard(world.device),
            loss_function=builder.loss(),
            factors=ReplicationFactors(),
        )
        found["losses"].append(result.loss.item())
        found["norms"].append(result.grad_norm.item())
    found["weights"] = {n: full(p) for n, p in model.named_parameters()}
    return found


CASES = {
    "ep 2": (2, {EP: 2}),
    "ep 2, fsdp 2": (4, {EP: 2}),
    "ep 4": (4, {EP: 4}),
    "ep 2, replicas 2": (4, {EP: 2, REPLICAS: 2, FSDP: 2}),
}


@pytest.fixture(scope="module")
def reference(pool: Pools) -> dict[str, Any]:
    return pool(1).run(train, config_of(1))[0]


@pytest.mark.parametrize("case", CASES)
def test_trains_as_one_rank(pool: Pools, reference: dict[str, Any], case: str) -> None:
    ranks, flags = CASES[case]
    found = pool(ranks).run(train, config_of(ranks, **flags))[0]
    assert found["gradients"].keys() == reference["gradients"].keys()
    for kind in ("gradients", "weights"):
        for name, tensor in found[kind].items():
            torch.testing.assert_close(
                tensor, reference[kind][name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{kind} {n}: {m}"
            )
    torch.testing.assert_close(found["losses"], reference["losses"], rtol=1e-6, atol=0)
    torch.testing.assert_close(found["norms"], reference["norms"], rtol=1e-5, atol=0)
