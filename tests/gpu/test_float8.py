"""What float8 goes together with on a GPU: drift, host memory, the compiler's budget, checkpoints.

What is trained and measured are the runs of tests/parallel, which do the same on CPUs with emulated products.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import RUN as SAVED
from tests.gpu.peak import peak_and_gradients
from tests.gpu.test_features import COMPILED, FLOAT8_HARDWARE, PRECOMPUTED
from tests.parallel.float8_runs import RATES, RUN, distance, drift_of, gathered_types, resumed
from tests.training.harness import TINY, Run, batches, changed, train
from tests.training.test_run import _run
from titanlite.config.sections import ActivationCheckpoint, Compile, Float8, Training
from titanlite.parallel.dist_env import DistEnv
from titanlite.tools.tensors import Contents, compare

FLOAT8 = Float8(enable_float8_linear=True)
GATHERED = changed(FLOAT8, enable_fsdp_float8_all_gather=True)
ROWWISE = changed(FLOAT8, recipe_name="rowwise")


# Drift


@FLOAT8_HARDWARE
@pytest.mark.parametrize(
    ("plan", "compiled"),
    [(FLOAT8, False), (PRECOMPUTED, False), (PRECOMPUTED, True), (ROWWISE, True)],
    ids=["eager", "all-gather", "all-gather, compiled", "rowwise, compiled"],
)
def test_drift_is_measured_against_the_model_without_float8(world: DistEnv, plan: Float8, compiled: bool) -> None:
    run = replace(RUN, float8=plan, compile=COMPILED if compiled else None)
    drift, exact, first, again = drift_of(world, run)
    assert drift.exact == pytest.approx(exact, abs=1e-3)
    assert 0 < abs(drift.difference) < 0.05
    assert again == pytest.approx(first, abs=1e-3), "measuring leaves nothing behind"


@FLOAT8_HARDWARE
def test_a_compiled_run_measures_drift_and_compiles_nothing_again(world: DistEnv, tmp_path: Path) -> None:
    flags = ["--training.mixed_precision_param=bfloat16", "--training.compile", "--training.steps=6"]
    flags += ["--float8.enable_float8_linear", "--float8.enable_fsdp_float8_all_gather", "--validation.enable=false"]
    flags += ["--float8.precompute_float8_dynamic_scale_for_fsdp"]
    torch._dynamo.reset()
    plain = _run(world, str(tmp_path / "plain"), *flags)
    torch._dynamo.reset()
    ours = _run(world, str(tmp_path / "ours"), *flags, "--float8.drift_check=2")
    torch._dynamo.reset()
    rows = {row["step"]: row for row in ours["rows"] if "float8_drift" in row}
    assert sorted(rows) == [2, 4, 6] and all(0 < abs(row["float8_drift"]) < 0.05 for row in rows.values())
    assert any("torch.compile made 2 graphs for training" in line for line in ours["said"])
    assert not [line for line in ours["said"] if "again" in line]
    losses = [[row["loss"] for row in run["rows"] if "loss" in row] for run in (ours, plain)]
    assert len(losses[0]) == 6 and distance(*losses) < 5e-3


# Host memory


@FLOAT8_HARDWARE
def test_weights_in_host_memory_are_gathered_in_float8_and_train_the_same(world: DistEnv) -> None:
    on_device = replace(RUN, float8=GATHERED)
    offloaded = replace(on_device, training=Training(enable_cpu_offload=True))
    assert gathered_types(world, offloaded) == {
        "layers.0.attention.wq": "float8_e4m3fn",
        "layers.0.attention_norm": "bfloat16",
        "output": "bfloat16",
    }
    there, ours = (train(world, run) for run in (on_device, offloaded))
    assert {weight.device.type for weight in ours.weights.values()} == {"cpu"}
    # The update's rounding is another one on a CPU, and weights near the edge of a step of float8 go the other way.
    assert distance(ours.losses, there.losses) < 0.02
    assert ours.losses[-1] < ours.losses[0] - 0.1


# The compiler's budget


def _budgeted(world: DistEnv, share: float, float8: Float8) -> tuple[int, dict[str, torch.Tensor]]:
    """Peak bytes of a second forward and backward pass above what was there before, and the gradients."""
    args = replace(TINY, dim=512, n_layers=8, n_heads=8, n_kv_heads=8, max_seq_len=512, multiple_of=256)
    plan = ActivationCheckpoint(mode="budget", memory_budget=share)
    compiled = Compile(components=["model"])
    run = Run(
        *batches(1, 8, 512, 192),
        [1e-3],
        args=args,
        training=Training(),
        activations=plan,
        compile=compiled,
        float8=float8,
    )
    torch._dynamo.reset()
    found = peak_and_gradients(world, run)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("float8", [False, pytest.param(True, marks=FLOAT8_HARDWARE)], ids=["bf16", "float8"])
def test_a_smaller_budget_keeps_less_and_computes_the_same(world: DistEnv, float8: bool) -> None:
    plan = FLOAT8 if float8 else Float8()
    found = {share: _budgeted(world, share, plan) for share in (1.0, 0.5, 0.0)}
    peaks = {share: peak for share, (peak, _) in found.items()}
    assert peaks[0.0] < peaks[1.0] and peaks[0.5] <= peaks[1.0], peaks
    # Another graph rounds otherwise. Where that moves a scale of float8, all of its tensor is rounded anew: by up to an
    # eighth of each number in a gradient.
    within = 0.3 if float8 else 0.05
    for share in (0.5, 0.0):
        for name, gradient in found[1.0][1].items():
            assert ((found[share][1][name] - gradient).norm() / gradient.norm()).item() < within, (share, name)


@FLOAT8_HARDWARE
def test_steps_within_a_budget_are_those_without_one(world: DistEnv) -> None:
    run = replace(RUN, rates=RATES[:10], float8=PRECOMPUTED, compile=COMPILED)
    losses = []
    for activations in (ActivationCheckpoint(mode="none"), ActivationCheckpoint(mode="budget", memory_budget=0.5)):
        torch._dynamo.reset()
        losses.append(train(world, replace(run, activations=activations)).losses)
    torch._dynamo.reset()
    assert distance(*losses) < 0.02


# Checkpoints


@pytest.fixture
def deterministic() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@FLOAT8_HARDWARE
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "plan",
    [FLOAT8, GATHERED, PRECOMPUTED, ROWWISE],
    ids=["tensorwise", "all-gather", "precomputed", "rowwise"],
)
def test_a_resume_in_float8_is_exact(world: DistEnv, tmp_path: Path, plan: Any) -> None:
    straight, losses = resumed(world, replace(SAVED, training=RUN.training, float8=plan), str(tmp_path))
    assert losses == straight["losses"]
    pair = (Contents(tmp_path / folder / "step-6") for folder in ("parts", "straight"))
    assert not [one.name for one in compare(*pair) if one.elements or one.left != one.right]
