"""Expert parallelism on real ranks: the same losses, gradients, weights and checkpoints as on one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from titanlite.parallel.context import split_batch
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.parallel.pipeline import PipelineModel
from titanlite.step import ReplicationFactors
from tests.training.compare import LABELS, TOKENS
from tests.training.harness import all_stages, full

#: Without the loss that balances experts: it depends on how sequences are cut into calls.
SIZE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "n_experts": 4, "aux_loss": 0.0}
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
CP, PP = "experimental.context_parallel_degree", "experimental.pipeline_parallel_degree"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
SCHEDULE, N_LAYERS = "experimental.pipeline_parallel_schedule", "model.overrides.n_layers"
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
    sizes = {"batch_size": run.batch.micro_batch_size, "seq_len": run.batch.seq_len}
    pipeline = None
    if isinstance(model, PipelineModel):
        pipeline = builder.pipeline(model, builder.loss(), accumulation=run.batch.accumulation, **sizes)

    def keep(*_: Any) -> None:
        # Before clipping in place, all ranks gather together: full_tensor is a collective.
        found.setdefault("gradients", {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        hook.remove()

    hook = optimizer.register_step_pre_hook(keep)
    for step in range(STEPS):
        pieces = (part[step, rank::degree].chunk(run.batch.accumulation) for part in (TOKENS, LABELS))
        batches = [Batch(*piece) for piece in zip(*pieces, strict=True)]
        if run.mesh.context > 1:
            batches = [split_batch(batch, builder.mesh) for batch in batches]
        result = train_step(
            model,
            optimizer,
            batches,
            step=step + 1,
            lr=1e-3,
            max_norm=1.0,
            guard=FiniteGuard(world.device),
            loss_function=builder.loss(),
            factors=ReplicationFactors(run.mesh.pipeline),
            pipeline=pipeline,
        )
        found["losses"].append(result.loss.item())
        found["norms"].append(result.grad_norm.item())
    found["gradients"] = all_stages(model, found["gradients"])
    found["weights"] = all_stages(model, {n: full(p) for n, p in model.named_parameters()})
    return found


CASES = {
    "ep 2": (2, {EP: 2}),
    "ep 2, fsdp 2": (4, {EP: 2}),
    "ep 4": (4, {EP: 4}),
    "ep 2, replicas 2": (4, {EP: 2, REPLICAS: 2, FSDP: 2}),
    "fused, freed": (4, {EP: 2, "optimizer.implementation": "fused", "training.reshard_after_forward": "always"}),
    "recomputed": (2, {EP: 2, MODE: "full"}),
    "recomputed by operation": (2, {EP: 2, MODE: "selective", OPTION: "op"}),
    "compiled": (2, {EP: 2, "training.compile": "true"}),
    "compiled, by operation": (2, {EP: 2, "training.compile": "true", MODE: "selective", OPTION: "op"}),
    "cp 2": (2, {EP: 2, CP: 2}),
    "cp 2, fsdp 2": (4, {EP: 2, CP: 2}),
    "cp 2, fsdp 2, ep 4": (4, {EP: 4, CP: 2}),
    "one group": (2, {EP: 2, "training.fsdp_units": "root"}),
    "pp 2": (4, {EP: 2, PP: 2, "training.batch_size": 2}),
    "pp 2, zero bubble": (4, {EP: 2, PP: 2, "training.batch_size": 2, SCHEDULE: "ZBVZeroBubble", N_LAYERS: 4}),
    "prefetch": (4, {EP: 2, "training.prefetch": 1, "training.reshard_after_forward": "always"}),
}


@pytest.fixture(scope="module")
def references(pool: Pools) -> Callable[[int], dict[str, Any]]:
    return functools.cache(lambda layers: pool(1).run(train, config_of(1, **{N_LAYERS: layers}))[0])


@pytest.mark.parametrize("case", CASES)
def test_trains_as_one_rank(pool: Pools, references: Callable[[int], dict[str, Any]], case: str) -> None:
    ranks, flags = CASES[case]
    reference = references(flags.get(N_LAYERS, 2))
    found = pool(ranks).run(train, config_of(ranks, **flags))[0]
    assert found["gradients"].keys() == reference["gradients"].keys()
    for kind in ("gradients", "weights"):
        for name, tensor in found[kind].items():
            torch.testing.assert_close(
                tensor, reference[kind][name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{kind} {n}: {m}"
            )
    torch.testing.assert_close(found["losses"], reference["losses"], rtol=1e-6, atol=0)
    torch.testing.assert_close(found["norms"], reference["norms"], rtol=1e-5, atol=0)
