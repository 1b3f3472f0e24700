"""Training in float8: as good as bf16, the same in every division of the work, resumable, and measured."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import RUN as SAVED
from tests.parallel.float8_runs import (
    EMULATED,
    GATHERED,
    LINEARS,
    PRECOMPUTED,
    RATES,
    RECIPES,
    RUN,
    Seen,
    distance,
    drift_of,
    resumed,
    spread,
)
from tests.parallel.test_compile import _whole
from tests.pool import Pools
from tests.training.harness import TINY, Run, build_tiny, micro_batches, train, train_afresh
from tests.training.test_run import _losses, _run
from titanlite.build import data_parallel_rank
from titanlite.config.plans import ActivationCheckpointPlan, CompilePlan, Float8Plan, ShardPlan
from titanlite.loss import cross_entropy_sum
from titanlite.metrics.nan_finder import diagnose_nonfinite
from titanlite.parallel.float8 import float8_linears, high_precision
from titanlite.parallel.tensor import tensor_loss
from titanlite.parallel.world import World

soak = pytest.mark.soak
pytestmark = pytest.mark.slow
FLOAT8 = replace(RUN, float8=EMULATED)
FOUR = replace(TINY, n_layers=4)
PIPELINE = ShardPlan(reshard_after_forward=False)


# Losses


@pytest.fixture(scope="module")
def seeds(pool: Pools) -> list[list[float]]:
    """Losses of 40 steps in bf16 from three seeds."""
    long = replace(RUN, rates=RATES)
    return [pool(1).run(train, replace(long, seed=seed))[0].losses for seed in (7, 8, 9)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_stay_within_the_spread_of_seeds(pool: Pools, seeds: list[list[float]], recipe: Any) -> None:
    """Mean distance from bf16: at most twice what another seed makes of it; and the model learns."""
    ours = pool(1).run(train, replace(RUN, rates=RATES, float8=replace(EMULATED, recipe=recipe)))[0].losses
    assert 0 < distance(ours, seeds[0]) < 2 * spread(seeds[0], seeds[1:])
    assert ours[-1] < ours[0] - 1.0


@soak
def test_four_blocks_of_width_256_stay_within_the_spread_of_seeds(pool: Pools, tmp_path: Path) -> None:
    """200 steps on the bundled text, in each recipe; in bf16 where the processor has instructions for it."""
    precision = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    small = ["--training.seq_len=128", "--training.global_batch_size=8", "--model.overrides.n_layers=4"]
    flags = [
        *("--model.overrides.dim=256", "--model.overrides.n_heads=16", *small, "--training.steps=200"),
        *(f"--training.mixed_precision_param={precision}", "--optimizer.lr=1e-3", "--lr_scheduler.total_steps=200"),
        *("--training.warmup_steps=20", "--checkpoint.enable_checkpoint=false", "--validation.enable=false"),
    ]

    def losses(name: str, *more: str) -> list[float]:
        rows = pool(2).run(_run, str(tmp_path / name), *flags, *more, timeout=900)[0]["rows"]
        return [row["loss"] for row in rows if "loss" in row]

    plain, *others = [losses(f"seed{seed}", f"--training.seed={seed}") for seed in (0, 1, 2)]
    for recipe in RECIPES:
        float8 = ["--float8.enable_float8_linear", "--float8.emulate", f"--float8.recipe_name={recipe}"]
        ours = losses(recipe, "--training.seed=0", *float8)
        assert 0 < distance(ours, plain) < 2 * spread(plain, others), recipe
        assert abs(ours[-1] - plain[-1]) < 2 * max(abs(plain[-1] - other[-1]) for other in others), recipe


# Divisions of the work


def _agrees(pool: Pools, run: Run, ranks: int, within: float = 0.02) -> None:
    """Losses of ten steps are those of one rank but for rounding; three seeds differ by more (see below)."""
    alone, ours = pool(1).run(train, run.alone())[0].losses, pool(ranks).run(train, run)[0].losses
    assert distance(ours, alone) < within, (ours, alone)


def test_seeds_differ_by_more_than_divisions_may(seeds: list[list[float]]) -> None:
    first, *others = [losses[:10] for losses in seeds]
    assert spread(first, others) > 0.02


@pytest.mark.parametrize(
    ("plan", "changes", "ranks"),
    [
        pytest.param(GATHERED, {}, 2, id="fsdp 2"),
        pytest.param(EMULATED, {"accumulation": 2}, 4, id="fsdp 4", marks=soak),
        pytest.param(PRECOMPUTED, {"replicas": 2}, 4, id="hsdp 2 x 2", marks=soak),
        pytest.param(PRECOMPUTED, {"replicas": 2}, 2, id="ddp 2", marks=soak),
        pytest.param(PRECOMPUTED, {"context": 2}, 2, id="cp 2"),
        pytest.param(EMULATED, {"tensor": 2}, 2, id="tp 2"),
        pytest.param(EMULATED, {"tensor": 2, "loss_parallel": False}, 2, id="tp 2, whole logits", marks=soak),
        pytest.param(replace(EMULATED, keep=("wk", "w2")), {"tensor": 2}, 2, id="tp 2, some kept"),
        pytest.param(PRECOMPUTED, {"tensor": 2}, 2, id="tp 2, gathered", marks=soak),
        pytest.param(PRECOMPUTED, {"tensor": 2}, 4, id="tp 2, fsdp 2, gathered"),
        pytest.param(PRECOMPUTED, {"tensor": 2, "replicas": 2}, 4, id="tp 2, ddp 2, gathered", marks=soak),
        pytest.param(PRECOMPUTED, {"tensor": 2, "context": 2}, 4, id="tp 2, cp 2, gathered", marks=soak),
        pytest.param(PRECOMPUTED, {"pipeline": 2, "args": FOUR, "shard": PIPELINE}, 2, id="pp 2"),
        pytest.param(
            PRECOMPUTED, {"pipeline": 2, "args": FOUR, "shard": PIPELINE, "tensor": 2}, 4, id="pp 2, tp 2", marks=soak
        ),
        pytest.param(
            PRECOMPUTED,
            {"pipeline": 2, "args": FOUR, "shard": PIPELINE, "schedule": "Interleaved1F1B"},
            4,
            id="pp 2, fsdp 2, interleaved",
            marks=soak,
        ),
    ],
)
def test_the_losses_are_those_of_one_rank(pool: Pools, plan: Float8Plan, changes: dict[str, Any], ranks: int) -> None:
    _agrees(pool, replace(RUN, float8=plan, **changes), ranks)


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_rowwise_recipes_on_more_ranks(pool: Pools, recipe: Any) -> None:
    """Rows of activations are scaled one by one, so nothing depends on how they are divided."""
    _agrees(pool, replace(RUN, float8=replace(EMULATED, recipe=recipe)), 2)


def _converted(world: World, run: Run) -> list[str]:
    model, _, _ = build_tiny(world, run)
    linears = float8_linears(model)
    return [name for name, module in model.named_modules() if module in linears]


def test_every_part_of_a_pipeline_is_converted(pool: Pools) -> None:
    ranks = pool(2).run(_converted, replace(FLOAT8, pipeline=2, args=FOUR, shard=PIPELINE))
    names = {f"layers.{i}.{name}" for i in range(4) for name in _LINEARS}
    assert set(ranks[0]) | set(ranks[1]) == names and not set(ranks[0]) & set(ranks[1])
    assert all(ranks)


_LINEARS = [*(f"attention.{w}" for w in ("wq", "wk", "wv", "wo")), *(f"feed_forward.{w}" for w in ("w1", "w2", "w3"))]


# Activation checkpointing and compilation


@pytest.mark.parametrize("plan", [EMULATED, PRECOMPUTED], ids=["", "all-gather"])
@pytest.mark.parametrize("mode", ["full", "every", "op"])
def test_what_is_recomputed_comes_out_the_same(pool: Pools, plan: Float8Plan, mode: Any) -> None:
    """Bit for bit."""
    run = replace(RUN, rates=RATES[:4], float8=plan)
    plain = pool(2).run(train, run)[0]
    ours = pool(2).run(train, replace(run, activations=ActivationCheckpointPlan(mode)))[0]
    assert ours.losses == plain.losses and ours.norms == plain.norms
    assert all(torch.equal(ours.weights[name], weight) for name, weight in plain.weights.items())


@soak
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", ["full", "op"])
def test_what_is_recomputed_with_scaled_mm_comes_out_the_same(pool: Pools, recipe: Any, mode: Any) -> None:
    run = replace(RUN, rates=RATES[:2], float8=Float8Plan(enable=True, recipe=recipe))
    plain = pool(1).run(train, run)[0]
    ours = pool(1).run(train, replace(run, activations=ActivationCheckpointPlan(mode)))[0]
    assert ours.losses == plain.losses and ours.norms == plain.norms


EAGER = CompilePlan(model=True, loss=True, backend="aot_eager")


@soak
@pytest.mark.parametrize(
    ("plan", "changes", "ranks"),
    [
        pytest.param(PRECOMPUTED, {}, 2, id="all-gather"),
        pytest.param(Float8Plan(enable=True), {}, 1, id="scaled_mm", marks=soak),
        pytest.param(replace(EMULATED, recipe="rowwise"), {}, 1, id="rowwise", marks=soak),
        pytest.param(replace(EMULATED, recipe="rowwise_with_gw_hp"), {}, 1, id="gw_hp", marks=soak),
        pytest.param(EMULATED, {"activations": ActivationCheckpointPlan("op")}, 1, id="op", marks=soak),
        pytest.param(EMULATED, {"activations": ActivationCheckpointPlan("full")}, 1, id="full", marks=soak),
        pytest.param(EMULATED, {"tensor": 2}, 2, id="tp 2", marks=soak),
        pytest.param(PRECOMPUTED, {"tensor": 2}, 4, id="tp 2, fsdp 2", marks=soak),
        pytest.param(PRECOMPUTED, {"pipeline": 2, "args": FOUR, "shard": PIPELINE}, 2, id="pp 2", marks=soak),
    ],
)
def test_compiled_blocks_compute_the_same(pool: Pools, plan: Float8Plan, changes: dict[str, Any], ranks: int) -> None:
    run = replace(RUN, rates=RATES[:5], float8=plan, **changes)
    plain = pool(ranks).run(train, run)[0].losses
    ours = pool(ranks).run(train_afresh, replace(run, compile=EAGER), timeout=600)[0].losses
    assert distance(ours, plain) < 5e-3, (ours, plain)


@soak
@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (PRECOMPUTED, {}),
        (EMULATED, {"activations": ActivationCheckpointPlan("op")}),
        (EMULATED, {"activations": ActivationCheckpointPlan("budget", memory_budget=0.5)}),
        (replace(EMULATED, recipe="rowwise"), {}),
    ],
    ids=["all-gather", "op", "budget", "rowwise"],
)
def test_inductor_computes_the_same(pool: Pools, plan: Float8Plan, changes: dict[str, Any]) -> None:
    run = replace(RUN, rates=RATES[:5], float8=plan, **changes)
    compiled = replace(run, compile=CompilePlan(model=True, loss=True))
    budget = run.activations is not None and run.activations.mode == "budget"
    plain = pool(2).run(train, replace(run, activations=None) if budget else run)[0].losses
    ours = pool(2).run(train_afresh, compiled, timeout=900)[0].losses
    assert distance(ours, plain) < 2e-2, (ours, plain)


# Resume


SMALL = ["--training.mixed_precision_param=bfloat16", "--float8.emulate", "--validation.enable=false"]
ON = ["--float8.enable_float8_linear", "--float8.enable_fsdp_float8_all_gather"]
ON += ["--float8.precompute_float8_dynamic_scale_for_fsdp"]


def _flags(on: bool) -> list[str]:
    return [*SMALL, *ON] if on else [flag for flag in SMALL if "float8" not in flag]


@pytest.mark.parametrize("plan", [EMULATED, PRECOMPUTED], ids=["", "all-gather"])
def test_resumed_steps_are_those_without_a_break_bit_for_bit(pool: Pools, tmp_path: Path, plan: Float8Plan) -> None:
    """The scales of gathered weights are not in the checkpoint: the first step finds them again."""
    straight, losses = pool(2).run(resumed, replace(SAVED, shard=RUN.shard, float8=plan), str(tmp_path))[0]
    assert losses == straight["losses"] and len(set(losses)) == 6


@soak
def test_a_resumed_run_goes_on_bit_for_bit(pool: Pools, tmp_path: Path) -> None:
    straight = pool(2).run(_run, str(tmp_path / "a"), *_flags(True), "--training.steps=6")[0]["rows"]
    pool(2).run(_run, str(tmp_path / "b"), *_flags(True), "--training.steps=3")
    resumed = pool(2).run(_run, str(tmp_path / "b"), *_flags(True), "--training.steps=6")[0]["rows"]
    assert _losses(resumed) == _losses(straight)


@pytest.mark.parametrize("first", [False, True], ids=["bf16 to float8", "float8 to bf16"])
def test_float8_can_be_switched_at_a_resume(pool: Pools, tmp_path: Path, first: bool) -> None:
    """What is resumed has the same weights: its next losses are those of a resume that goes on as it was, but for
    rounding."""
    pool(2).run(_run, str(tmp_path / "same"), *_flags(first), "--training.steps=2")
    shutil.copytree(tmp_path / "same", tmp_path / "switched")
    switched, same = (
        pool(2).run(_run, str(tmp_path / name), *_flags(float8), "--training.steps=4")[0]
        for name, float8 in (("switched", not first), ("same", first))
    )
    assert all(any("resumed from step 2" in line for line in run["said"]) for run in (switched, same))
    ours, theirs = _losses(switched["rows"]), _losses(same["rows"])
    assert sorted(ours) == [1, 2, 3, 4] and all(ours[step] == theirs[step] for step in (1, 2))
    for step in (3, 4):
        assert 0 < abs(ours[step][0] - theirs[step][0]) < 0.03, step
    tables = [any(line.startswith("float8 ") for line in run["said"]) for run in (switched, same)]
    assert tables == [not first, first]


# Drift


@pytest.mark.parametrize(
    ("plan", "changes", "ranks"),
    [
        pytest.param(EMULATED, {}, 1, id="1 rank"),
        pytest.param(PRECOMPUTED, {}, 2, id="all-gather"),
        pytest.param(replace(EMULATED, recipe="rowwise"), {}, 1, id="rowwise"),
        pytest.param(EMULATED, {"tensor": 2}, 2, id="tp 2"),
        pytest.param(PRECOMPUTED, {"tensor": 2}, 4, id="tp 2, fsdp 2, all-gather", marks=soak),
        pytest.param(PRECOMPUTED, {"replicas": 2}, 4, id="hsdp, all-gather", marks=soak),
        pytest.param(PRECOMPUTED, {"pipeline": 2, "args": FOUR, "shard": PIPELINE}, 2, id="pp 2, all-gather"),
    ],
)
def test_drift_is_measured_against_the_model_without_float8(
    pool: Pools, plan: Float8Plan, changes: dict[str, Any], ranks: int
) -> None:
    drift, exact, *repeated = pool(ranks).run(drift_of, replace(RUN, float8=plan, **changes))[0]
    assert drift.exact == exact, "bit for bit"
    assert 0 < abs(drift.difference) < 0.05
    assert drift.relative == pytest.approx(drift.difference / drift.exact)
    assert repeated[0] == repeated[1], "measuring leaves nothing behind"


def _gathers(world: World, run: Run) -> int:
    """All-gathers of DTensors in the pass in high precision."""
    model, _, _ = build_tiny(world, run)
    with torch.no_grad(), high_precision(model, torch.bfloat16), Seen() as seen:
        model(micro_batches(run, 0, 0, 1)[0].tokens)
    return seen.sent["all_gather_into_tensor"]


def test_the_pass_in_high_precision_gathers_each_weight_once_over_fsdps_ranks(pool: Pools) -> None:
    """And leaves the part of each tensor-parallel rank as it is."""
    gathered, plain = (pool(4).run(_gathers, replace(RUN, float8=plan, tensor=2)) for plan in (GATHERED, EMULATED))
    assert plain[0] > 0 and gathered == [count + LINEARS for count in plain]


@soak
def test_drift_is_a_metric_and_changes_no_step(pool: Pools, tmp_path: Path) -> None:
    flags = [*_flags(True), "--training.steps=6", "--metrics.log_freq=1"]
    plain = pool(2).run(_run, str(tmp_path / "a"), *flags)[0]
    ours = pool(2).run(_run, str(tmp_path / "b"), *flags, "--float8.drift_check=2")[0]
    assert _losses(ours["rows"]) == _losses(plain["rows"])
    rows = {row["step"]: row for row in ours["rows"] if "float8_drift" in row}
    assert sorted(rows) == [2, 4, 6]
    assert not any("float8_drift" in row for row in plain["rows"])
    for row in rows.values():
        assert 0 < abs(row["float8_drift"]) < 0.05
        assert row["float8_drift_relative"] == pytest.approx(row["float8_drift"] / row["float8_exact_loss"])
    assert any(line.startswith("float8 drift at 2: ") for line in ours["said"])


@soak
def test_measuring_compiles_nothing_again(pool: Pools, tmp_path: Path) -> None:
    flags = [*_flags(True), "--training.steps=6", "--float8.drift_check=2"]
    said = pool(2).run(_whole, str(tmp_path), *flags, "--training.compile", "--compile.backend=aot_eager")[0]["said"]
    assert sum(line.startswith("float8 drift at ") for line in said) == 3
    assert any("torch.compile made 2 graphs for training" in line for line in said)
    assert not [line for line in said if "again" in line]


# What is not finite


def _diagnosed(world: World, run: Run) -> str:
    model, _, _ = build_tiny(world, run)
    plan = run.mesh(world.size)
    batch = micro_batches(run, 0, data_parallel_rank(world.build_mesh(plan)), plan.dp_degree)[0]
    loss = tensor_loss(cross_entropy_sum) if plan.tensor > 1 else cross_entropy_sum

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * float("nan")

    model.get_submodule("layers.1.ffn_norm").register_forward_hook(spoil)
    return str(diagnose_nonfinite(model, [batch], loss_function=loss))


@soak
@pytest.mark.parametrize(
    ("plan", "tensor"), [(GATHERED, 1), (EMULATED, 2), (GATHERED, 2)], ids=["all-gather", "tp 2", "tp 2, all-gather"]
)
def test_the_origin_of_a_nan_is_found(pool: Pools, plan: Float8Plan, tensor: int) -> None:
    found = pool(2).run(_diagnosed, replace(RUN, float8=plan, tensor=tensor))[0]
    assert "layers.1.ffn_norm" in found and found.startswith("first not finite: the output of")
