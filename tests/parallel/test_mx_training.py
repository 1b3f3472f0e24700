"""Training in MXFP8: as good as bf16, the same in every division of the work, and resumable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import RUN as SAVED
from tests.support.checkpoints import train as train_and_save
from tests.support.float8_runs import RATES, RUN, distance, drift_of, resumed, spread
from tests.support.harness import FULL, OP, TINY, Run, changed, train
from tests.support.mx_runs import FLOOR, MX
from tests.support.pool import Pools
from tests.support.whole_runs import outcome_of
from titanlite import exit_codes
from titanlite.assembly.build import build
from titanlite.config.sections import ActivationCheckpoint, Compile, Float8
from titanlite.dist.dist_env import DistEnv
from titanlite.models import resolve_args
from titanlite.resolve.load import load_config
from titanlite.trainer import Trainer

pytestmark = pytest.mark.slow
FOUR = replace(TINY, n_layers=4)
#: Every rank's part of each weight has whole blocks.
WIDE = replace(TINY, n_kv_heads=4)
BF16 = Float8()
ON = ["--float8.enable_float8_linear", "--float8.emulate", "--float8.recipe_name=mxfp8"]
DEBUG = [
    "--training.steps=200",
    "--training.batch_size=2",
    *("--model.overrides.n_layers=2", "--model.overrides.dim=128", "--model.overrides.n_heads=4"),
    "--training.seq_len=64",
    "--training.mixed_precision_param=bfloat16",
    "--metrics.log_freq=1",
    "--no-validation.enable",
]


@pytest.fixture(scope="module")
def seeds(pool: Pools) -> list[list[float]]:
    """Losses of 40 steps in bf16 from three seeds."""
    long = replace(RUN, rates=RATES)
    return [pool(1).run(train, replace(long, seed=seed))[0].losses for seed in (7, 8, 9)]


@pytest.fixture(scope="module")
def losses_alone(pool: Pools) -> Callable[[Run], list[float]]:
    """Losses of a run on one rank, which several divisions of its work share."""
    found: dict[Any, list[float]] = {}

    def losses(run: Run) -> list[float]:
        if run.args not in found:
            found[run.args] = pool(1).run(train, run.alone())[0].losses
        return found[run.args]

    return losses


@pytest.mark.parametrize("float8", [MX, FLOOR], ids=["mxfp8", "mxfp8_floor"])
def test_losses_stay_within_the_spread_of_seeds(
    pool: Pools, seeds: list[list[float]], float8: Float8
) -> None:
    """Mean distance from bf16: below half of that of another seed; and the model learns."""
    ours = pool(1).run(train, replace(RUN, rates=RATES, float8=float8))[0].losses
    assert 0 < distance(ours, seeds[0]) < spread(seeds[0], seeds[1:]) / 2
    assert ours[-1] < ours[0] - 1.0


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        pytest.param({}, 2, id="fsdp 2"),
        pytest.param({"replicas": 2}, 2, id="ddp 2"),
        pytest.param({"context": 2}, 2, id="cp 2"),
        pytest.param({"tensor": 2}, 2, id="tp 2, some kept"),
        pytest.param({"tensor": 2, "args": WIDE}, 2, id="tp 2"),
        pytest.param({"tensor": 2, "args": WIDE}, 4, id="tp 2, fsdp 2"),
        pytest.param({"pipeline": 2, "args": FOUR}, 2, id="pp 2"),
    ],
)
def test_the_losses_are_those_of_one_rank(
    pool: Pools,
    losses_alone: Callable[[Run], list[float]],
    changes: dict[str, Any],
    ranks: int,
) -> None:
    """Ten steps, but for rounding; three seeds differ by more."""
    run = replace(RUN, float8=MX, **changes)
    alone = losses_alone(run)
    ours = pool(ranks).run(train, run)[0].losses
    assert distance(ours, alone) < 0.005, (ours, alone)
    plain = pool(ranks).run(train, replace(run, float8=BF16))[0].losses
    assert ours != plain


@pytest.mark.parametrize("changes", [{}, {"tensor": 2}], ids=["fsdp 2", "tp 2"])
def test_latent_attention_and_experts_train_as_in_bf16(
    pool: Pools, changes: dict[str, Any]
) -> None:
    """Weights that tensor parallelism leaves whole, as of shared experts, stay in bf16 there."""
    shape = resolve_args("deepseek_v3", "debugmodel", {"n_layers": 2}, tokenizer_size=192)
    args = replace(shape, vocab_size=192, max_seq_len=64)
    run = replace(RUN, family="deepseek_v3", args=args, rates=RATES[:5], **changes)
    plain, ours = (pool(2).run(train, replace(run, float8=f))[0].losses for f in (BF16, MX))
    assert 0 < distance(ours, plain) < 0.03
    assert ours[-1] < ours[0] - 0.5


@pytest.mark.parametrize("settings", [FULL, OP], ids=["full", "op"])
@pytest.mark.parametrize("changes", [{}, {"tensor": 2, "args": WIDE}], ids=["fsdp", "tp"])
def test_recomputation_gives_the_same_numbers(
    pool: Pools, changes: dict[str, Any], settings: ActivationCheckpoint
) -> None:
    """Bit for bit."""
    run = replace(RUN, rates=RATES[:4], float8=MX, **changes)
    plain = pool(2).run(train, run)[0]
    ours = pool(2).run(train, replace(run, activations=settings))[0]
    assert ours.losses == plain.losses
    assert ours.norms == plain.norms
    assert all(torch.equal(ours.weights[name], weight) for name, weight in plain.weights.items())


@pytest.mark.parametrize(
    ("changes", "ranks", "backend", "limit"),
    [
        pytest.param({}, 2, "aot_eager", 0.0, id="fsdp 2"),
        pytest.param({"activations": OP}, 1, "aot_eager", 0.0, id="ac op"),
        pytest.param({"tensor": 2, "args": WIDE}, 2, "aot_eager", 1e-4, id="tp 2"),
        pytest.param({}, 1, "inductor", 2e-3, id="inductor", marks=pytest.mark.soak),
    ],
)
def test_compiled_blocks_give_the_numbers_of_eager_ones(
    pool: Pools, changes: dict[str, Any], ranks: int, backend: str, limit: float
) -> None:
    run = replace(RUN, rates=RATES[:4], float8=MX, **changes)
    eager = pool(ranks).run(train, run)[0]
    ours = pool(ranks).run(train, replace(run, compile=Compile(backend=backend)))[0]
    assert distance(ours.losses, eager.losses) <= limit
    assert distance(ours.norms, eager.norms) <= 20 * limit


def test_resumed_steps_are_those_without_a_break_bit_for_bit(pool: Pools, tmp_path: Path) -> None:
    run = replace(SAVED, training=RUN.training, float8=MX)
    straight, losses = pool(2).run(resumed, run, str(tmp_path))[0]
    assert losses == straight["losses"]
    assert len(set(losses)) == 6


def _switched(world: DistEnv, run: Run, folder: str) -> dict[str, list[float]]:
    """Losses of six steps, MXFP8 in the second half alone, in the first, in both and in none."""
    found = {}
    for name, halves in {
        "none": (BF16, BF16),
        "second": (BF16, MX),
        "first": (MX, BF16),
        "both": (MX, MX),
    }.items():
        losses = []
        for float8, steps in zip(halves, ((1, 3), (4, 6)), strict=True):
            half = replace(run, float8=float8)
            losses += train_and_save(world, half, f"{folder}/{name}", *steps)["losses"]
        found[name] = losses
    return found


def test_a_run_resumes_with_and_without_mxfp8(pool: Pools, tmp_path: Path) -> None:
    run = replace(SAVED, training=RUN.training)
    found = pool(2).run(_switched, run, str(tmp_path))[0]
    assert found["second"][:3] == found["none"][:3]
    assert found["first"][:3] == found["both"][:3]
    assert len({tuple(losses) for losses in found.values()}) == 4
    for losses in found.values():
        assert distance(losses, found["none"]) < 0.02


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        pytest.param({}, 2, id="fsdp 2"),
        pytest.param({"tensor": 2, "args": WIDE}, 2, id="tp 2"),
    ],
)
def test_the_error_is_measured_against_the_model_without_mxfp8(
    pool: Pools, changes: dict[str, Any], ranks: int
) -> None:
    drift, exact, *repeated = pool(ranks).run(drift_of, replace(RUN, float8=MX, **changes))[0]
    assert drift.exact == exact, "bit for bit"
    assert 0 < abs(drift.difference) < 0.02
    assert repeated[0] == repeated[1], "measuring leaves nothing behind"


def test_weights_may_be_stored_in_bf16(pool: Pools) -> None:
    training = changed(RUN.training, dtype="bfloat16")
    run = replace(RUN, training=training)
    plain = pool(2).run(train, run)[0].losses
    ours = pool(2).run(train, replace(run, float8=MX))[0].losses
    assert 0 < distance(ours, plain) < 0.05


def _debug_run(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    run = load_config("debug_model.toml", 1, [*DEBUG, f"--job.dump_folder={folder}", *flags])
    return outcome_of(Trainer(build(run, world)), folder)


def test_the_debug_model_learns_as_in_bf16_over_200_steps(pool: Pools, tmp_path: Path) -> None:
    """Whole runs: losses, smoothed over 20 steps, differ by less than 1 % at every step."""
    curves = []
    for name, flags in {"bf16": [], "mx": ON}.items():
        (found,) = pool(1).run(_debug_run, str(tmp_path / name), *flags)
        assert found["code"] == exit_codes.DONE, found["error"]
        losses = [row["loss"] for row in found["rows"] if "loss" in row]
        assert len(losses) == 200
        curves.append(torch.tensor(losses).unfold(0, 20, 1).mean(-1))
    plain, ours = curves
    assert plain[-1] < plain[0] - 1
    assert not torch.equal(plain, ours)
    assert ((ours - plain).abs() / plain).max() < 0.01
