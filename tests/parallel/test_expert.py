"""Expert parallelism on real ranks: the same losses, gradients, weights and checkpoints as on one rank."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.checkpoint.runs import PRINTS, assert_equal, options, unequal
from tests.pool import Pools
from tests.steps import train_step
from tests.training.compare import LABELS, TOKENS
from tests.training.harness import all_stages, full
from tests.training.test_quiet_step import Calls, Operations
from titanlite.build import data_parallel_rank
from titanlite.checkpoint.manager import Checkpointer
from titanlite.config.errors import ConfigError
from titanlite.config.load import load_file
from titanlite.data.loader import Batch
from titanlite.derive import RunConfig, smallest_world
from titanlite.fit import load_config
from titanlite.guard import FiniteGuard
from titanlite.models import mixtral
from titanlite.models.llama import tensor_plan
from titanlite.models.moe import MoE
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel import ParallelismError
from titanlite.parallel.context import split_batch
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.expert import apply_ep, expert_mesh
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.parallel.pipeline import PipelineModel
from titanlite.step import ReplicationFactors

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
    # AdamW divides gradients by their size: those as small as rounding should not count as others.
    "optimizer.eps": 1e-6,
    "compile.backend": "aot_eager",
}
EP, FSDP = "parallelism.expert_parallel_degree", "training.data_parallel_shard_degree"
REPLICAS, TP = "training.data_parallel_replicate_degree", "training.tensor_parallel_degree"
CP, PP = "experimental.context_parallel_degree", "experimental.pipeline_parallel_degree"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
SCHEDULE, LAYERS = "experimental.pipeline_parallel_schedule", "model.overrides.n_layers"
RESHARD, OPTIMIZER, COMPILE = "training.reshard_after_forward", "optimizer.name", "training.compile"
VARIANCE = "optimizer.variance_dtype"
PIPELINE = {EP: 2, PP: 2, "training.batch_size": 2}
BY_OPERATION = {EP: 2, MODE: "selective", OPTION: "op"}
STEPS = 3
#: What one rank computes too, but with other sums.
OWN_REFERENCE = (LAYERS, OPTIMIZER, VARIANCE)


def config_of(ranks: int, **flags: Any) -> RunConfig:
    every = {**SHARED, **flags}
    return load_config("debug_model.toml", ranks, [f"--{key}={value}" for key, value in every.items()])


def build(world: DistEnv, run: RunConfig, seed: int = 7) -> tuple[ModelBuilder, nn.Module, torch.optim.Optimizer]:
    m = run.mesh
    mesh = world.build_mesh(pp=m.pipeline, dp_replicate=m.dp_replicate, dp_shard=m.dp_shard, cp=m.context, tp=m.tensor)
    sections = run.training, run.experimental, run.activation_checkpoint, run.compile, run.float8
    builder = ModelBuilder(run.spec, run.model_args(), mesh, world.device, *sections, ep=m.expert)
    model = builder.build(seed)
    blocks = builder.spec.block_names(builder.args)
    return builder, model, build_optimizer(dict(model.named_parameters()), run.optimizer, world.device, blocks)


def train(world: DistEnv, run: RunConfig, folder: Path | None = None, first: int = 1) -> dict[str, Any]:
    """Train from step `first` to STEPS. folder: resume from it when first > 1, and save there after each step."""
    builder, model, optimizer = build(world, run)
    checkpointer = Checkpointer(options(folder), world, PRINTS) if folder else None
    if checkpointer and first > 1:
        loaded = checkpointer.load(model, optimizer)
        assert loaded is not None and loaded.step == first - 1
    found: dict[str, Any] = {"losses": [], "norms": []}
    rank, degree, loss = data_parallel_rank(builder.mesh), run.mesh.dp_degree, builder.loss()
    sizes = {"batch_size": run.batch.micro_batch_size, "seq_len": run.batch.seq_len}
    pipeline = None
    if isinstance(model, PipelineModel):
        pipeline = builder.pipeline(model, loss, accumulation=run.batch.accumulation, **sizes)

    def keep(*_: Any) -> None:
        found["gradients"] = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        hook.remove()

    hook = optimizer.register_step_pre_hook(keep)
    for step in range(first, STEPS + 1):
        pieces = (part[step, rank::degree].chunk(run.batch.accumulation) for part in (TOKENS, LABELS))
        batches = [split_batch(Batch(*piece), builder.mesh) for piece in zip(*pieces, strict=True)]
        result = train_step(
            model,
            optimizer,
            batches,
            step=step,
            lr=1e-3,
            max_norm=1.0,
            guard=FiniteGuard(world.device),
            loss_function=loss,
            factors=ReplicationFactors(run.mesh.pipeline),
            pipeline=pipeline,
            layer_norms=True,
        )
        found["layers"] = {name: norm.item() for name, norm in result.layer_norms.items()}
        found["losses"].append(result.loss.item())
        found["norms"].append(result.grad_norm.item())
        if checkpointer:
            checkpointer.save(step, model, optimizer, {})
    found["gradients"] = all_stages(model, found["gradients"])
    found["weights"] = all_stages(model, {n: full(p) for n, p in model.named_parameters()})
    return found


CASES = {
    "ep 2": (2, {EP: 2}),
    "ep 2, fsdp 2, fused, freed": (4, {EP: 2, "optimizer.implementation": "fused", RESHARD: "always"}),
    "recomputed by operation": (2, BY_OPERATION),
}
MORE = {
    "ep 2, replicas 2": (4, {EP: 2, REPLICAS: 2, FSDP: 2}),
    "cp 2": (2, {EP: 2, CP: 2}),
    "compiled": (2, {EP: 2, COMPILE: "true"}),
    "ep 4": (4, {EP: 4}),
    "recomputed": (2, {EP: 2, MODE: "full"}),
    "compiled, by operation": (2, {**BY_OPERATION, COMPILE: "true"}),
    "cp 2, fsdp 2, over 2": (4, {EP: 2, CP: 2, RESHARD: 2}),
    "cp 2, fsdp 2, ep 4": (4, {EP: 4, CP: 2}),
    "pp 2": (4, PIPELINE),
    "pp 2, zero bubble": (4, {**PIPELINE, SCHEDULE: "ZBVZeroBubble", LAYERS: 4}),
    "one group": (2, {EP: 2, "training.fsdp_units": "root"}),
    "prefetch": (4, {EP: 2, "training.prefetch": 1, RESHARD: "always"}),
    "any precision": (4, {EP: 2, OPTIMIZER: "AnyPrecisionAdamW", VARIANCE: "float32"}),
}


@pytest.fixture(scope="module")
def reference(pool: Pools) -> Callable[..., dict[str, Any]]:
    """The run on one rank with the same flags, as far as they are its own."""
    alone = functools.cache(lambda flags: pool(1).run(train, config_of(1, **dict(flags)))[0])
    return lambda flags: alone(tuple((key, flags[key]) for key in OWN_REFERENCE if key in flags))


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_trains_as_one_rank(pool: Pools, reference: Callable[..., dict[str, Any]], case: str) -> None:
    ranks, flags = {**CASES, **MORE}[case]
    expected, found = reference(flags), pool(ranks).run(train, config_of(ranks, **flags))[0]
    # Other orders of float32 sums change 1e-7 of the largest terms.
    for kind, near in (("gradients", {"rtol": 2e-5, "atol": 1e-7}), ("weights", {"rtol": 1e-5, "atol": 1e-6})):
        assert found[kind].keys() == expected[kind].keys()
        for name, tensor in found[kind].items():
            label = f"{kind} {name}: "
            torch.testing.assert_close(tensor, expected[kind][name], **near, msg=label.__add__)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-6, atol=0)
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-5, atol=0)
    assert found["layers"] == pytest.approx(expected["layers"], rel=1e-4)


@pytest.mark.slow
def test_muon_makes_each_expert_orthogonal(pool: Pools, reference: Callable[..., dict[str, Any]]) -> None:
    flags = {EP: 2, OPTIMIZER: "Muon"}
    expected, found = reference(flags), pool(4).run(train, config_of(4, **flags))[0]
    # A router's gradient has no full rank, so the iterations make noise of the rest orthogonal: only experts compare.
    experts = [name for name in found["weights"] if ".experts." in name]
    assert len(experts) == 3 * SIZE["n_layers"]
    for name in experts:
        # bfloat16 iterations: 1 % of three updates of 1e-3 * 0.2 * sqrt(64) * 0.1 to 0.2 each.
        torch.testing.assert_close(found["weights"][name], expected["weights"][name], rtol=0, atol=2e-5)


# The exchange by itself


def _uneven(world: DistEnv, skew: float, recompute: bool) -> tuple[list[int], float]:
    """Return the rows that each rank got, and the largest relative error of outputs and gradients."""
    args = mixtral.MixtralArgs(16, 1, 2, ffn_dim=24, vocab_size=32, n_experts=4, aux_loss=0.0)
    whole, parted = MoE(args), MoE(args)
    for module in (whole, parted):
        for number, parameter in enumerate(module.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            module.gate.weight.mul_(1 - skew)  # of 0 all experts are equal, and the first two are taken
    mesh = expert_mesh(world.build_mesh(dp_shard=world.size), world.size)["ep"]
    apply_ep(parted, mesh)
    rows: list[int] = []
    dispatch = parted.experts.exchange.dispatch  # type: ignore[union-attr]

    def counted(x: torch.Tensor, counts: torch.Tensor) -> Any:
        result = dispatch(x, counts)
        rows.append(len(result[0]))
        return result

    parted.experts.exchange.dispatch = counted  # type: ignore[union-attr]
    results = []
    for module in (whole, parted):
        x = torch.randn(2, 3 + world.rank, 16, generator=torch.Generator().manual_seed(world.rank)).requires_grad_()
        y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
        y.square().sum().backward()
        own = [p.grad for p in module.experts.parameters()]
        if module is whole:
            for gradient in own:
                dist.all_reduce(gradient)
            own = [gradient.chunk(world.size)[world.rank] for gradient in own]
        else:
            own = [gradient.to_local() for gradient in own]  # type: ignore[union-attr]
        results.append([y.detach(), x.grad, module.gate.weight.grad, *own])
    errors = [(a - b).norm() / a.norm().clamp(min=1e-6) for a, b in zip(*results, strict=True)]
    return rows, max(errors).item()


@pytest.mark.parametrize(("skew", "recompute"), [(0.0, False), (1.0, False), (1.0, True)])
def test_one_rank_gets_all_rows_and_another_none(pool: Pools, skew: float, recompute: bool) -> None:
    (first, error), (second, other) = pool(2).run(_uneven, skew, recompute)
    assert max(error, other) < 1e-6
    all_rows = 2 * 2 * (3 + 4)
    assert [a + b for a, b in zip(first, second, strict=True)] == [all_rows] * (1 + recompute)
    assert (0 in (first[0], second[0])) == (skew == 1.0)


def _sent(world: DistEnv, run: RunConfig) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Return the collectives of a micro-batch, and the reads of the host."""
    builder, model, _ = build(world, run)
    batch, loss = Batch(TOKENS[0, :1], LABELS[0, :1]), builder.loss()
    for _ in range(2):  # the first sets FSDP up
        with Operations() as operations, Calls() as calls:
            loss(model(batch.tokens), batch.labels).backward()
    return operations.sent, calls.reads


@pytest.mark.parametrize(("flags", "forward"), [({}, 1), ({MODE: "full"}, 2), (BY_OPERATION, 1)])
def test_a_layer_sends_counts_once_and_rows_twice_each_way(pool: Pools, flags: dict[str, Any], forward: int) -> None:
    sent, reads = pool(2).run(_sent, config_of(2, **{EP: 2, **flags}))[0]
    layers = SIZE["n_layers"]
    moved = {kind: number for (name, kind), number in sent.items() if name == "all_to_all_single"}
    assert moved == {"torch.int64": layers * forward, "torch.float32": layers * (2 * forward + 2)}
    assert reads == {"tolist": layers}, "Python sees no reads of a recomputation"


# Checkpoints


def _hand_on(world: DistEnv, run: RunConfig, source: Path, target: Path) -> None:
    """Load a checkpoint into a model with other weights, and save it again."""
    _, model, optimizer = build(world, run, seed=99)
    loaded = Checkpointer(options(source), world, PRINTS).load(model, optimizer)
    assert loaded is not None
    Checkpointer(options(target), world, PRINTS).save(loaded.step, model, optimizer, loaded.train)


def test_resumes_exactly_and_passes_through_other_ranks_bit_for_bit(pool: Pools, tmp_path: Path) -> None:
    run = config_of(2, **{EP: 2})
    straight = pool(2).run(train, run, tmp_path / "straight")[0]
    shutil.copytree(tmp_path / "straight" / "step-1", tmp_path / "resumed" / "step-1")
    resumed = pool(2).run(train, run, tmp_path / "resumed", 2)[0]
    assert resumed["losses"] == straight["losses"][1:]
    assert_equal(resumed["weights"], straight["weights"])
    last = f"step-{STEPS}"
    assert unequal(tmp_path / "straight" / last, tmp_path / "resumed" / last) == []
    before = "straight"
    for ranks, ep in ((4, 2), (1, 1)):
        pool(ranks).run(_hand_on, config_of(ranks, **{EP: ep}), tmp_path / before, tmp_path / f"{ranks}-{ep}")
        before = f"{ranks}-{ep}"
        assert set(unequal(tmp_path / "straight" / last, tmp_path / before / last)) <= {"rng.torch"}


# Configs

#: A mixture that tensor parallelism knows.
DIVIDED = replace(mixtral.SPEC, tensor_plan=tensor_plan)


@pytest.mark.parametrize(
    ("ranks", "flags", "message", "hint"),
    [
        (
            6,
            {EP: 3, "training.global_batch_size": 6},
            "both data_parallel_shard = 6 and the 4 experts",
            "these work: 1, 2",
        ),
        (2, {EP: 4}, "data_parallel_shard = 2", "1, 2"),
        (4, {EP: 2, REPLICAS: 4, FSDP: 1}, "data_parallel_shard = 1", "these work: 1"),
        (4, {EP: 2, TP: 2, "model.name": f"{__name__}:DIVIDED"}, "would send each of them more than once", TP),
    ],
)
def test_a_degree_that_does_not_fit_is_refused(ranks: int, flags: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(ranks, **flags)
    (problem,) = caught.value.problems
    assert problem.key == EP and message in problem.message and hint in problem.hint


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("debug_model.toml", 2, [f"--{EP}=2"])
    assert [(p.key, p.hint) for p in caught.value.problems] == [(EP, "leave the key out, or add it to the model")]


@pytest.mark.parametrize(
    ("ranks", "flags", "hint"),
    [
        (4, {EP: 2, RESHARD: 4}, '"never", or 2'),
        (8, {EP: 2, RESHARD: 2}, '"never", or 4'),
        (4, {EP: 4, RESHARD: 2}, '"never"'),
        (8, {RESHARD: 2}, '"never", or 8'),
    ],
)
def test_experts_stay_over_all_ranks_that_cut_them(ranks: int, flags: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match="stay over all their") as caught:
        config_of(ranks, **flags)
    (problem,) = caught.value.problems
    assert problem.key == RESHARD and problem.hint.endswith(hint)


def test_numbers_of_ranks_that_work_are_taken() -> None:
    for ranks, flags in ((4, {EP: 2, RESHARD: 2}), (8, {RESHARD: 8}), (4, {RESHARD: 2})):
        assert config_of(ranks, **flags).training.reshard_after_forward == flags[RESHARD]


def test_a_budget_covers_no_experts_of_other_ranks() -> None:
    budget = {MODE: "budget", COMPILE: "true"}
    assert config_of(2, **budget).activation_checkpoint.mode == "budget"
    with pytest.raises(ConfigError, match="are not compiled"):
        config_of(2, **{EP: 2, **budget})


def _parts(world: DistEnv) -> tuple[list[bool], str]:
    """Return which parts of frozen experts need gradients, and the refusal of a model without an exchange."""
    mesh = world.build_mesh(dp_shard=world.size)
    args = mixtral.MixtralArgs(16, 1, 2, ffn_dim=24, vocab_size=32, n_experts=4)
    moe = MoE(args)
    moe.experts.w1.requires_grad_(False)
    apply_ep(moe, expert_mesh(mesh, world.size)["ep"])

    def build(args: mixtral.MixtralArgs) -> nn.Module:
        model = mixtral.SPEC.build(args)
        del model.get_submodule("layers.0.feed_forward.experts").exchange
        return model

    with pytest.raises(ParallelismError) as caught:
        ModelBuilder(replace(mixtral.SPEC, build=build), args, mesh, world.device, ep=world.size).build_on_meta()
    return [p.requires_grad for p in moe.experts.parameters()], str(caught.value)


def test_frozen_experts_stay_frozen_and_one_without_an_exchange_is_refused(pool: Pools) -> None:
    found, message = pool(2).run(_parts)[0]
    assert found == [False, True, True]
    assert message == "ranks cannot share experts without an `exchange`: layers.0.feed_forward"


@pytest.mark.parametrize(("flags", "ranks"), [([], 4), ([f"--{CP}=2"], 4), ([f"--{RESHARD}=2"], 8)])
def test_the_fewest_ranks_hold_the_experts(flags: list[str], ranks: int) -> None:
    assert smallest_world(load_file("debug_model.toml", [f"--{EP}=4", *flags])) == ranks
