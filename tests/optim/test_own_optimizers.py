"""titanlite's own optimizers: against torch's on whole tensors, in bfloat16, sharded, saved and
resumed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import assert_equal, two_and_two
from tests.support.checkpoints import train as train_and_save
from tests.support.harness import TINY, Run, batches, build_tiny, full_precision, train
from tests.support.pool import Pools
from titanlite.assembly.preflight import optimizer_problems
from titanlite.config.model_sections import Optimizer, OptimizerGroup
from titanlite.config.sections import Training
from titanlite.dist.dist_env import DistEnv
from titanlite.models import get_spec
from titanlite.optim.adamw import AnyPrecisionAdamW
from titanlite.optim.groups import parameter_groups
from titanlite.optim.muon import Muon, orthogonalize
from titanlite.optim.optimizer import build_optimizer, gated_step

CPU = torch.device("cpu")
PURE_BF16 = Training(dtype="bfloat16", mixed_precision_reduce="bfloat16")
KAHAN = Optimizer(name="AnyPrecisionAdamW", kahan=True, momentum_dtype="bfloat16", weight_decay=0.0)
MUON = Optimizer(name="Muon", weight_decay=0.1)


def two(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return the same random parameter twice."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return [nn.Parameter(values.to(dtype, copy=True)) for _ in range(2)]


def follow(ours: Any, theirs: torch.optim.Optimizer, steps: int) -> None:
    """Give both optimizers the same gradients, some steps of ours held back, and compare the
    parameters.
    """
    (mine,), (other,) = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        gradient = torch.randn(other.shape, generator=generator)
        if step % 3 == 1:
            mine.grad = torch.full_like(mine, float("nan"))
            gated_step(ours, torch.tensor(False), ours.param_groups[0]["lr"])
        mine.grad = gradient.to(mine.dtype)
        other.grad = gradient.to(other.dtype)
        gated_step(ours, torch.tensor(True), ours.param_groups[0]["lr"])
        theirs.step()
    torch.testing.assert_close(mine, other.float(), rtol=1e-6, atol=1e-6)


def test_any_precision_in_float32_is_adamw() -> None:
    mine, other = two((40, 30))
    other.data = (
        other.data.double()
    )  # torch's decay, a factor 1 - lr * decay, loses 3e-6 in float32 by itself
    hyper: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    ours = AnyPrecisionAdamW([mine], **hyper, variance_dtype=torch.float32)
    follow(ours, torch.optim.AdamW([other], **hyper), 100)
    assert {k: v.dtype for k, v in ours.state[mine].items()} == dict.fromkeys(
        ["step", "exp_avg", "exp_avg_sq"], torch.float32
    )


def test_a_gradient_scaler_changes_no_number() -> None:
    mine, other = two((8, 8))
    hyper: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}  # which the scaled gradients would hide
    ours = AnyPrecisionAdamW([mine], **hyper)
    theirs = AnyPrecisionAdamW([other], **hyper)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, math.inf, 2.0):
        scaler.scale((mine.square() * factor).sum()).backward()
        scaler.step(ours)
        scaler.update()
        if factor < math.inf:
            (other.square() * factor).sum().backward()
            theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    assert torch.equal(mine, other)


def test_a_state_goes_to_the_device_of_its_parameter_in_its_own_dtype() -> None:
    mine, other = two((8, 8), torch.bfloat16)
    ours = AnyPrecisionAdamW([mine])
    theirs = AnyPrecisionAdamW([nn.Parameter(other.to("meta"))])
    mine.grad = torch.ones_like(mine)
    ours.step()
    theirs.load_state_dict(ours.state_dict())
    (state,) = theirs.state.values()
    assert {(v.device.type, v.dtype) for k, v in state.items() if k != "exp_avg_sq"} == {
        ("meta", torch.float32)
    }
    assert state["exp_avg_sq"].device.type == "meta"
    assert state["exp_avg_sq"].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_on_a_whole_matrix_is_torchs(shape: tuple[int, int]) -> None:
    mine, other = two(shape)
    ours = Muon([{"params": [mine], "muon": True}], lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon([other], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    (one,), (two_,) = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        one.grad = two_.grad = torch.randn(shape, generator=generator)
        gated_step(ours, torch.tensor(True), 0.02)
        theirs.step()
    # The iteration is in bfloat16, and torch rounds its intermediate sums otherwise.
    torch.testing.assert_close(one, two_, rtol=0, atol=5 * 0.02 * 0.2 * 40**0.5 * 2**-8)


def test_kahan_keeps_updates_that_round_away() -> None:
    """1,000 updates of 1e-5 on weights of 1.0: 2^-9 of a weight is the least that bfloat16
    takes.
    """
    moved = {}
    for kahan in (False, True):
        weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        optimizer = AnyPrecisionAdamW([weight], lr=1e-5, kahan=kahan, momentum_dtype=torch.bfloat16)
        for _ in range(1000):
            weight.grad = torch.ones_like(weight)
            gated_step(optimizer, torch.tensor(True), 1e-5)
        moved[kahan] = 1 - weight.float().mean().item()
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(0.01, rel=0.25)


def bytes_per_parameter(world: DistEnv, run: Run) -> float:
    """Return the bytes of weights, gradients and state, by parameter, on this rank's shards."""
    model, optimizer, _ = build_tiny(world, run)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gated_step(optimizer, torch.tensor(True), 0.0)
    state = [t for p in model.parameters() for t in optimizer.state[p].values() if t.ndim]
    weights = [t for p in model.parameters() for t in (p, p.grad)]
    count = sum(p.to_local().numel() for p in model.parameters())
    return sum(t.to_local().nbytes for t in [*state, *weights]) / count


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("settings", "training", "expected"),
    [
        (Optimizer(), full_precision(), 16),
        (Optimizer(name="AnyPrecisionAdamW"), full_precision(), 14),
        (KAHAN, PURE_BF16, 10),
        (Optimizer(), PURE_BF16, 8),
        (Optimizer(name="Muon"), full_precision(), 12),
    ],
)
def test_bytes_per_parameter(
    pool: Pools, settings: Optimizer, training: Training, expected: float
) -> None:
    args = replace(TINY, vocab_size=8) if settings.name == "Muon" else TINY
    run = Run(*batches(1, 8, 16, 8), [0.0], args=args, training=training, settings=settings)
    # The few norms and the embedding of 8 entries are what AdamW updates beside Muon.
    assert pool(2).run(bytes_per_parameter, run) == [pytest.approx(expected, rel=0.02)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"replicas": 2}], ids=str)
def test_muon_on_shards_is_muon_on_whole_matrices(pool: Pools, mesh: dict[str, Any]) -> None:
    tokens, labels = batches(3, 8, 16, 192)
    args = replace(Run(tokens, labels, []).args, n_kv_heads=4)
    # Two numbers of the embedding have gradients near 0. With an epsilon of 1e-8 AdamW steps by the
    # sign of their rounding, and a kernel that rounds otherwise moves them by a whole rate.
    settings = Optimizer(name="Muon", weight_decay=0.1, eps=1e-6)
    run = Run(tokens, labels, [3e-3] * 3, args=args, settings=settings, **mesh)
    curve = pool(4).run(train, run)[0]
    alone = pool(1).run(train, run.alone())[0]
    torch.testing.assert_close(curve.losses, alone.losses, rtol=1e-4, atol=1e-4)
    for name, weight in curve.weights.items():
        torch.testing.assert_close(weight, alone.weights[name], rtol=0, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "training"),
    [(MUON, full_precision()), (KAHAN, PURE_BF16)],
    ids=["muon", "kahan"],
)
def test_two_and_two_equal_four(
    pool: Pools, tmp_path: Path, settings: Optimizer, training: Training
) -> None:
    run = Run(*batches(4, 8, 16, 192), [3e-3] * 4, training=training, settings=settings)
    straight = two_and_two(pool, run, tmp_path)
    other = pool(4).run(train_and_save, run, tmp_path / "run", 5, 4)  # only loads
    assert_equal(other[0]["state"], straight["state"])


def names_of(groups: list[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> list[set[str]]:
    ids = {id(parameter): name for name, parameter in parameters.items()}
    return [{ids[id(parameter)] for parameter in group["params"]} for group in groups]


def test_groups_take_the_first_pattern_and_keep_their_ratio() -> None:
    parameters = {
        "tok_embeddings.weight": two((8, 4))[0],
        "layers.0._orig_mod.attention.wq.weight": two((4, 4))[0],
        "layers.0.attention_norm.weight": two((4,))[0],
        "output.weight": two((8, 4))[0],
    }
    settings = Optimizer(
        lr=1e-3,
        no_decay_on_norms=True,
        groups=[
            OptimizerGroup(pattern="^layers.0.attention", lr=5e-4, beta2=0.99, weight_decay=0.1),
            OptimizerGroup(pattern="wq|embed", weight_decay=0.5),
        ],
    )
    groups = parameter_groups(parameters, settings)
    embed, wq, norm, output = parameters
    assert names_of(groups, parameters) == [{embed}, {wq}, {norm}, {output}]
    optimizer = build_optimizer(parameters, settings, CPU)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    gated_step(optimizer, torch.tensor(True), 1e-4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [1e-4, 5e-5, 5e-5, 1e-4]
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.1, 0.0, 0.1]
    assert [group["betas"] for group in optimizer.param_groups] == [
        (0.9, 0.95),
        (0.9, 0.99),
        (0.9, 0.99),
        (0.9, 0.95),
    ]


def test_a_group_keeps_its_rate_where_the_others_have_none() -> None:
    parameters = {"layers.0.w": two((4, 4))[0], "output.weight": two((8, 4))[0]}
    settings = Optimizer(lr=0.0, groups=[OptimizerGroup(pattern="output", lr=2e-4)])
    optimizer = build_optimizer(parameters, settings, CPU)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    gated_step(optimizer, torch.tensor(True), settings.peak_lr / 2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 1e-4]


def test_muon_takes_the_matrices_of_blocks() -> None:
    spec = get_spec("llama3")
    args = TINY
    parameters = dict(spec.build_on_meta(args).named_parameters())
    groups = parameter_groups(parameters, MUON, spec.block_names(args))
    (matrices,) = [
        names
        for names, group in zip(names_of(groups, parameters), groups, strict=True)
        if "muon" in group
    ]
    assert matrices == {n for n, p in parameters.items() if n.startswith("layers.") and p.ndim == 2}


def test_patterns_are_checked() -> None:
    settings = Optimizer(groups=[OptimizerGroup(pattern="norm"), OptimizerGroup(pattern="nowhere")])
    run: Any = SimpleNamespace(spec=get_spec("llama3"), optimizer=settings)
    (found,) = optimizer_problems(run, TINY)
    assert found.key == "optimizer.groups[1].pattern"
    assert "in no parameter's name" in str(found)


def test_many_matrices_in_one_parameter_are_made_orthogonal_one_by_one() -> None:
    stack = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(stack)
    assert found.shape == stack.shape
    assert torch.equal(found[1, 2], orthogonalize(stack[1, 2][None])[0])
    assert torch.linalg.svdvals(found.float()).sub(1).abs().max() < 0.4
