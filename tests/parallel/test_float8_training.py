"""Training in float8: as good as bf16, the same in every division of the work, resumable, and measured."""

from __future__ import annotations

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
    REAL,
    RECIPES,
    RUN,
    Seen,
    distance,
    drift_of,
    recipe,
    resumed,
    spread,
)
from tests.pool import Pools
from tests.training.harness import TINY, Run, build_tiny, changed, micro_batches, train, train_afresh
from tests.training.test_run import _run
from titanlite.config.sections import ActivationCheckpoint, Compile, Float8
from titanlite.metrics.nan_finder import diagnose_nonfinite
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.float8 import float8_linears, high_precision

soak = pytest.mark.soak
pytestmark = pytest.mark.slow
FOUR = replace(TINY, n_layers=4)
PP: dict[str, Any] = {"pipeline": 2, "args": FOUR}
FULL, EVERY_2 = ActivationCheckpoint(mode="full"), ActivationCheckpoint(selective_ac_option="2")
OP = ActivationCheckpoint(selective_ac_option="op")


# Losses


@pytest.fixture(scope="module")
def seeds(pool: Pools) -> list[list[float]]:
    """Losses of 40 steps in bf16 from three seeds."""
    long = replace(RUN, rates=RATES)
    return [pool(1).run(train, replace(long, seed=seed))[0].losses for seed in (7, 8, 9)]


@pytest.mark.parametrize("name", RECIPES)
def test_losses_stay_within_the_spread_of_seeds(pool: Pools, seeds: list[list[float]], name: str) -> None:
    """Mean distance from bf16: at most twice that of another seed; and the model learns."""
    ours = pool(1).run(train, replace(RUN, rates=RATES, float8=recipe(name)))[0].losses
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
    for name in RECIPES:
        float8 = ["--float8.enable_float8_linear", "--float8.emulate", f"--float8.recipe_name={name}"]
        ours = losses(name, "--training.seed=0", *float8)
        assert 0 < distance(ours, plain) < 2 * spread(plain, others), name
        assert abs(ours[-1] - plain[-1]) < 2 * max(abs(plain[-1] - other[-1]) for other in others), name


# Divisions of the work


def test_seeds_differ_by_more_than_divisions_may(seeds: list[list[float]]) -> None:
    first, *others = [losses[:10] for losses in seeds]
    assert spread(first, others) > 0.02


@pytest.mark.parametrize(
    ("float8", "changes", "ranks"),
    [
        pytest.param(GATHERED, {}, 2, id="fsdp 2"),
        pytest.param(PRECOMPUTED, {"context": 2}, 2, id="cp 2"),
        pytest.param(EMULATED, {"tensor": 2}, 2, id="tp 2"),
        pytest.param(changed(EMULATED, filter_fqns=["wk", "w2"]), {"tensor": 2}, 2, id="tp 2, some kept"),
        pytest.param(PRECOMPUTED, {"tensor": 2}, 4, id="tp 2, fsdp 2, gathered"),
        pytest.param(PRECOMPUTED, PP, 2, id="pp 2"),
        # Rows of activations are scaled one by one, so nothing depends on how they are divided.
        pytest.param(recipe("rowwise"), {}, 2, id="rowwise"),
        pytest.param(recipe("rowwise_with_gw_hp"), {}, 2, id="rowwise, gw_hp"),
        *(
            pytest.param(*row, marks=soak, id=name)
            for name, row in {
                "fsdp 4": (EMULATED, {"accumulation": 2}, 4),
                "hsdp 2 x 2": (PRECOMPUTED, {"replicas": 2}, 4),
                "ddp 2": (PRECOMPUTED, {"replicas": 2}, 2),
                "tp 2, whole logits": (EMULATED, {"tensor": 2, "loss_parallel": False}, 2),
                "tp 2, gathered": (PRECOMPUTED, {"tensor": 2}, 2),
                "tp 2, ddp 2, gathered": (PRECOMPUTED, {"tensor": 2, "replicas": 2}, 4),
                "tp 2, cp 2, gathered": (PRECOMPUTED, {"tensor": 2, "context": 2}, 4),
                "pp 2, tp 2": (PRECOMPUTED, {**PP, "tensor": 2}, 4),
                "pp 2, fsdp 2, interleaved": (PRECOMPUTED, {**PP, "schedule": "Interleaved1F1B"}, 4),
            }.items()
        ),
    ],
)
def test_the_losses_are_those_of_one_rank(pool: Pools, float8: Float8, changes: dict[str, Any], ranks: int) -> None:
    """Ten steps, but for rounding; three seeds differ by more."""
    run = replace(RUN, float8=float8, **changes)
    alone, ours = pool(1).run(train, run.alone())[0].losses, pool(ranks).run(train, run)[0].losses
    assert distance(ours, alone) < 0.02, (ours, alone)


def _converted(world: DistEnv, run: Run) -> list[str]:
    model, _, _ = build_tiny(world, run)
    linears = float8_linears(model)
    return [name for name, module in model.named_modules() if module in linears]


def test_every_part_of_a_pipeline_is_converted(pool: Pools) -> None:
    ranks = pool(2).run(_converted, replace(RUN, float8=EMULATED, **PP))
    linears = [
        *(f"attention.{w}" for w in ("wq", "wk", "wv", "wo")),
        *(f"feed_forward.{w}" for w in ("w1", "w2", "w3")),
    ]
    assert set(ranks[0]) | set(ranks[1]) == {f"layers.{i}.{name}" for i in range(4) for name in linears}
    assert not set(ranks[0]) & set(ranks[1]) and all(ranks)


# Activation checkpointing and compilation


@pytest.mark.parametrize(
    ("float8", "settings", "ranks", "steps"),
    [
        (EMULATED, EVERY_2, 2, 4),
        (PRECOMPUTED, FULL, 2, 4),
        (PRECOMPUTED, OP, 2, 4),
        *(pytest.param(EMULATED, settings, 2, 4, marks=soak) for settings in (FULL, OP)),
        *(pytest.param(recipe(name, REAL), s, 1, 2, marks=soak) for name in RECIPES for s in (FULL, OP)),
    ],
)
def test_recomputation_gives_the_same_numbers(
    pool: Pools, float8: Float8, settings: ActivationCheckpoint, ranks: int, steps: int
) -> None:
    """Bit for bit."""
    run = replace(RUN, rates=RATES[:steps], float8=float8)
    plain = pool(ranks).run(train, run)[0]
    ours = pool(ranks).run(train, replace(run, activations=settings))[0]
    assert ours.losses == plain.losses and ours.norms == plain.norms
    assert all(torch.equal(ours.weights[name], weight) for name, weight in plain.weights.items())


BUDGET = ActivationCheckpoint(mode="budget", memory_budget=0.5)
EAGER, INDUCTOR = Compile(backend="aot_eager"), Compile()


@soak
@pytest.mark.parametrize(
    ("compile", "float8", "changes", "ranks", "within"),
    [
        pytest.param(EAGER, PRECOMPUTED, {}, 2, 5e-3, id="all-gather"),
        pytest.param(EAGER, REAL, {}, 1, 5e-3, id="scaled_mm"),
        pytest.param(EAGER, recipe("rowwise"), {}, 1, 5e-3, id="rowwise"),
        pytest.param(EAGER, recipe("rowwise_with_gw_hp"), {}, 1, 5e-3, id="gw_hp"),
        pytest.param(EAGER, EMULATED, {"activations": OP}, 1, 5e-3, id="op"),
        pytest.param(EAGER, EMULATED, {"activations": FULL}, 1, 5e-3, id="full"),
        pytest.param(EAGER, EMULATED, {"tensor": 2}, 2, 5e-3, id="tp 2"),
        pytest.param(EAGER, PRECOMPUTED, {"tensor": 2}, 4, 5e-3, id="tp 2, fsdp 2"),
        pytest.param(EAGER, PRECOMPUTED, PP, 2, 5e-3, id="pp 2"),
        pytest.param(INDUCTOR, PRECOMPUTED, {}, 2, 2e-2, id="inductor, all-gather"),
        pytest.param(INDUCTOR, EMULATED, {"activations": OP}, 2, 2e-2, id="inductor, op"),
        pytest.param(INDUCTOR, EMULATED, {"activations": BUDGET}, 2, 2e-2, id="inductor, budget"),
        pytest.param(INDUCTOR, recipe("rowwise"), {}, 2, 2e-2, id="inductor, rowwise"),
    ],
)
def test_compiled_blocks_compute_the_same(
    pool: Pools, compile: Compile, float8: Float8, changes: dict[str, Any], ranks: int, within: float
) -> None:
    run = replace(RUN, rates=RATES[:5], float8=float8, **changes)
    eager = replace(run, activations=RUN.activations) if run.activations == BUDGET else run
    plain = pool(ranks).run(train, eager)[0].losses
    ours = pool(ranks).run(train_afresh, replace(run, compile=compile), timeout=900)[0].losses
    assert distance(ours, plain) < within, (ours, plain)


# Resume


@pytest.mark.parametrize("float8", [EMULATED, PRECOMPUTED], ids=["", "all-gather"])
def test_resumed_steps_are_those_without_a_break_bit_for_bit(pool: Pools, tmp_path: Path, float8: Float8) -> None:
    """The scales of gathered weights are not in the checkpoint: the first step finds them again."""
    run = replace(SAVED, training=RUN.training, float8=float8)
    straight, losses = pool(2).run(resumed, run, str(tmp_path))[0]
    assert losses == straight["losses"] and len(set(losses)) == 6


# The error of float8


@pytest.mark.parametrize(
    ("float8", "changes", "ranks"),
    [
        pytest.param(EMULATED, {}, 1, id="1 rank"),
        pytest.param(PRECOMPUTED, {}, 2, id="all-gather"),
        pytest.param(recipe("rowwise"), {}, 1, id="rowwise"),
        pytest.param(EMULATED, {"tensor": 2}, 2, id="tp 2"),
        pytest.param(PRECOMPUTED, {"tensor": 2}, 4, id="tp 2, fsdp 2, all-gather", marks=soak),
        pytest.param(PRECOMPUTED, {"replicas": 2}, 4, id="hsdp, all-gather", marks=soak),
        pytest.param(PRECOMPUTED, PP, 2, id="pp 2, all-gather"),
    ],
)
def test_the_error_is_measured_against_the_model_without_float8(
    pool: Pools, float8: Float8, changes: dict[str, Any], ranks: int
) -> None:
    drift, exact, *repeated = pool(ranks).run(drift_of, replace(RUN, float8=float8, **changes))[0]
    assert drift.exact == exact, "bit for bit"
    assert 0 < abs(drift.difference) < 0.05
    assert drift.relative == pytest.approx(drift.difference / drift.exact)
    assert repeated[0] == repeated[1], "measuring leaves nothing behind"


def _gathers(world: DistEnv, run: Run) -> int:
    """All-gathers of DTensors in the pass in high precision."""
    model, _, _ = build_tiny(world, run)
    with torch.no_grad(), high_precision(model, torch.bfloat16), Seen() as seen:
        model(micro_batches(run, 0, 0, 1)[0].tokens)
    return seen.sent["all_gather_into_tensor"]


def test_the_pass_in_high_precision_gathers_each_weight_once_over_fsdps_ranks(pool: Pools) -> None:
    """And leaves the part of each tensor-parallel rank as it is."""
    gathered, plain = (pool(4).run(_gathers, replace(RUN, float8=float8, tensor=2)) for float8 in (GATHERED, EMULATED))
    assert plain[0] > 0 and gathered == [count + LINEARS for count in plain]


# Non-finite numbers


def _diagnosed(world: DistEnv, run: Run) -> str:
    model, _, rank = build_tiny(world, run)
    batch = micro_batches(run, 0, rank, run.mesh(world.size).dp_degree)[0]
    model.get_submodule("layers.1.ffn_norm").register_forward_hook(lambda module, args, output: output * float("nan"))
    return str(diagnose_nonfinite(model, [batch], loss_function=run.builder(world).loss()))


@soak
@pytest.mark.parametrize(
    ("float8", "tensor"), [(GATHERED, 1), (EMULATED, 2), (GATHERED, 2)], ids=["all-gather", "tp 2", "tp 2, all-gather"]
)
def test_the_origin_of_a_nan_is_found(pool: Pools, float8: Float8, tensor: int) -> None:
    found = pool(2).run(_diagnosed, replace(RUN, float8=float8, tensor=tensor))[0]
    assert "layers.1.ffn_norm" in found and found.startswith("first not finite: the output of")
