"""Expert parallelism on real ranks: the same losses, gradients, weights and checkpoints as on one
rank.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import run_of as sections
from tests.support.checkpoints import assert_equal, hand_on, unequal
from tests.support.checkpoints import train as train_and_save
from tests.support.compare import LABELS, TOKENS
from tests.support.grid import (
    BY_OPERATION,
    CP,
    MODE,
    PP,
    RESHARD,
    SCHEDULE,
    TP,
    run_of,
)
from tests.support.harness import Run, build_tiny, train, train_afresh
from tests.support.pool import Pools
from tests.support.reference import Curve
from tests.support.watch import Operations, Operators
from titanlite.config.load import load_file
from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import DistEnv
from titanlite.features.experts.sharding import apply_ep, expert_mesh
from titanlite.models import mixtral
from titanlite.models.experts.layer import MoE
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.resolve.load import load_config, smallest_world
from titanlite.run.config import MeshSizes

#: Without the loss that balances experts: it depends on how sequences are cut into calls.
SIZE = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "n_experts": 4,
    "aux_loss": 0.0,
}
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
EP = "parallelism.expert_parallel_degree"
LAYERS = "model.overrides.n_layers"
COMPILE = "training.compile"
OPTIMIZER = "optimizer.name"
PIPELINE = {EP: 2, PP: 2, "training.batch_size": 2}
STEPS = 3


def run_on(ranks: int, **flags: Any) -> Run:
    words = [f"--{key}={value}" for key, value in {**SHARED, **flags}.items()]
    config = load_config("debug_model.toml", ranks, words)
    return replace(run_of(config), settings=config.optimizer, rates=[1e-3] * STEPS)


CASES = {
    "ep 2": (2, {EP: 2}),
    "ep 2 over tp 2": (2, {EP: 2, TP: 2}),
    "ep 2, fsdp 2, fused, freed": (
        4,
        {EP: 2, "optimizer.implementation": "fused", RESHARD: "always"},
    ),
    "recomputed by operation": (2, {EP: 2, **BY_OPERATION}),
    "ep 2 over a half of tp 4": (4, {EP: 2, TP: 4, "model.overrides.n_kv_heads": 4}),
    "ep 2 over tp 2, compiled": (2, {EP: 2, TP: 2, COMPILE: "true"}),
    "compiled, by operation": (2, {EP: 2, **BY_OPERATION, COMPILE: "true"}),
    "cp 2, fsdp 2, over 2": (4, {EP: 2, CP: 2, RESHARD: 2}),
    "pp 2, zero bubble": (4, {**PIPELINE, SCHEDULE: "ZBVZeroBubble", LAYERS: 4}),
    "one group": (2, {EP: 2, "training.fsdp_units": "root"}),
}


@pytest.fixture(scope="module")
def alone(pool: Pools) -> Callable[[Run], Curve]:
    """A run's curve on one rank that has no other feature."""
    curves: dict[str, Curve] = {}

    def curve(run: Run) -> Curve:
        plain = Run(
            TOKENS,
            LABELS,
            run.rates,
            family="mixtral",
            args=run.args,
            settings=run.settings,
            accumulation=8,
        )
        key = f"{plain.args} {plain.settings}"
        if key not in curves:
            curves[key] = pool(1).run(train, plain)[0]
        return curves[key]

    return curve


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("ranks", "flags"), CASES.values(), ids=CASES)
def test_trains_as_one_rank(pool, alone, ranks, flags):
    run = run_on(ranks, **flags)
    expected = alone(run)
    found = pool(ranks).run(train_afresh, run)[0]
    # Other orders of float32 sums change 1e-7 of the largest terms.
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_muon_makes_each_expert_orthogonal(pool, alone):
    run = run_on(4, **{EP: 2, TP: 2, OPTIMIZER: "Muon"})
    expected = alone(run).weights
    found = pool(4).run(train_afresh, run)[0].weights
    # A router's gradient has no full rank, so the iterations make noise of the rest orthogonal:
    # only experts compare.
    experts = [name for name in found if ".experts." in name]
    assert len(experts) == 3 * SIZE["n_layers"]
    for name in experts:
        # bfloat16 iterations: 1 % of three updates of 1e-3 * 0.2 * sqrt(64) * 0.1 to 0.2 each. The
        # largest of 12,288 differences depends on the processor's rounding.
        apart = found[name] - expected[name]
        assert apart.square().mean().sqrt() < 5e-6 and apart.abs().max() < 3e-5, name


# The exchange by itself


def _uneven(world: DistEnv, skew: float, recompute: bool) -> tuple[int, float]:
    """Return the rows that this rank's experts got, and the largest relative error of outputs and
    gradients.
    """
    args = mixtral.MixtralArgs(16, 1, 2, ffn_dim=24, vocab_size=32, n_experts=4, aux_loss=0.0)
    whole, parted = MoE(args), MoE(args)
    for module in (whole, parted):
        for number, parameter in enumerate(module.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            # With logits of 0 all experts are equal, and the first two are taken.
            module.gate.weight.mul_(1 - skew)
    whole.load = torch.zeros(4, dtype=torch.int64)
    apply_ep(parted, expert_mesh(world.build_mesh(dp_shard=world.size), world.size)["ep"])
    data = torch.randn(2, 3 + world.rank, 16, generator=torch.Generator().manual_seed(world.rank))
    results = []
    for module in (whole, parted):
        x = data.clone().requires_grad_()
        y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
        y.square().sum().backward()
        own: list[Any] = [p.grad for p in module.experts.parameters()]
        if module is whole:
            for gradient in own:
                dist.all_reduce(gradient)
            own = [gradient.chunk(world.size)[world.rank] for gradient in own]
        else:
            own = [gradient.to_local() for gradient in own]
        results.append([y.detach(), x.grad, module.gate.weight.grad, *own])
    errors = [(a - b).norm() / a.norm().clamp(min=1e-6) for a, b in zip(*results, strict=True)]
    dist.all_reduce(whole.load)
    return int(whole.load.chunk(world.size)[world.rank].sum()), max(errors).item()


@pytest.mark.parametrize(("skew", "recompute"), [(0.0, False), (1.0, False), (1.0, True)])
def test_one_rank_gets_all_rows_and_another_none(pool, skew, recompute):
    (first, error), (second, other) = pool(2).run(_uneven, skew, recompute)
    assert max(error, other) < 1e-6
    assert (0 in (first, second)) == (skew == 1.0)


def _sent(world: DistEnv, run: Run) -> tuple[Counter[tuple[str, str]], int]:
    """Return the collectives of a micro-batch, and how many times the host waits for counts."""
    model = build_tiny(world, run)[0]
    loss = run.builder(world).loss()
    for _ in range(2):  # the first sets FSDP up
        with Operations() as operations, Operators() as counted:
            loss(model(TOKENS[0, :1]), LABELS[0, :1]).backward()
    return operations.sent, counted.seen["titanlite.sizes_on_host.default"]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("flags", "forward"), [({}, 1), ({MODE: "full"}, 2), (BY_OPERATION, 1)])
def test_a_layer_sends_and_reads_counts_once_and_sends_rows_twice_each_way(pool, flags, forward):
    sent, read = pool(2).run(_sent, run_on(2, **{EP: 2, **flags}))[0]
    layers = SIZE["n_layers"]
    moved = {kind: number for (name, kind), number in sent.items() if name == "all_to_all_single"}
    assert moved == {"torch.int64": layers, "torch.float32": layers * (2 * forward + 2)}
    assert read == layers, "a recomputation takes the numbers of the forward"


# Checkpoints


@pytest.mark.slow
def test_resumes_exactly_and_passes_through_other_ranks_bit_for_bit(pool, tmp_path):
    ranks = 4
    flags = {EP: 2, TP: 2}
    run = run_on(ranks, **flags)
    straight = pool(ranks).run(train_and_save, run, tmp_path / "straight", 1, STEPS, every=1)[0]
    shutil.copytree(tmp_path / "straight" / "step-1", tmp_path / "resumed" / "step-1")
    resumed = pool(ranks).run(train_and_save, run, tmp_path / "resumed", 2, STEPS)[0]
    assert resumed["losses"] == straight["losses"][1:]
    assert_equal(resumed["weights"], straight["weights"])
    last = f"step-{STEPS}"
    assert unequal(tmp_path / "straight" / last, tmp_path / "resumed" / last) == []
    before = "straight"
    others = {"alone": (1, {}), "experts": (2, {EP: 2}), "again": (ranks, flags)}
    for after, (count, changes) in others.items():
        other = replace(run_on(count, **changes), seed=99)
        pool(count).run(hand_on, other, tmp_path / before, tmp_path / after)
        assert set(unequal(tmp_path / "straight" / last, tmp_path / after / last)) <= {"rng.torch"}
        before = after


# Configs


def _parts(world: DistEnv) -> tuple[list[bool], list[str]]:
    """Return which parts of frozen experts need gradients, and why two models are refused."""
    mesh = world.build_mesh(dp_shard=world.size)
    args = mixtral.MixtralArgs(16, 1, 2, ffn_dim=24, vocab_size=32, n_experts=4)
    moe = MoE(args)
    moe.experts.w1.requires_grad_(False)
    apply_ep(moe, expert_mesh(mesh, world.size)["ep"])

    def build(args: mixtral.MixtralArgs) -> nn.Module:
        model = mixtral.SPEC.build(args)
        del model.get_submodule("layers.0.feed_forward.experts").exchange
        return model

    def divided(args: mixtral.MixtralArgs) -> dict[str, str]:
        assert mixtral.SPEC.tensor_plan is not None
        experts = {"layers.0.feed_forward.experts": "vector"}
        return {**mixtral.SPEC.tensor_plan(args), **experts}

    run = sections.run_of("mixtral", MeshSizes(expert=world.size))
    messages = []
    for spec, one in (
        (replace(mixtral.SPEC, build=build), mesh),
        (replace(mixtral.SPEC, tensor_plan=divided), world.build_mesh(tp=world.size)),
    ):
        with (
            mock.patch("titanlite.run.config.get_spec", return_value=spec),
            pytest.raises(ParallelismError) as caught,
        ):
            ModelBuilder(run, args, one, world.device).build_on_meta()
        messages.append(str(caught.value))
    return [p.requires_grad for p in moe.experts.parameters()], messages


def test_frozen_experts_stay_frozen_and_those_that_ranks_cannot_share_are_refused(pool):
    found, messages = pool(2).run(_parts)[0]
    assert found == [False, True, True]
    assert messages[0] == "ranks cannot share experts without an `exchange`: layers.0.feed_forward"
    assert messages[1].startswith(
        "tensor parallelism divides layers.0.feed_forward.experts.w1, and expert parallelism"
    )


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [([], 4), ([f"--{RESHARD}=2"], 8), ([f"--{TP}=8"], 8)],
)
def test_the_fewest_ranks_hold_the_experts(flags, ranks):
    assert smallest_world(load_file("debug_model.toml", [f"--{EP}=4", *flags])) == ranks
