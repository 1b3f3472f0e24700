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
from tests.gpu.test_features import COMPILED, FLOAT8_HARDWARE, PRECOMPUTED
from tests.parallel.float8_runs import RUN, drift_of, resumed
from tests.training.harness import changed
from titanlite.config.sections import Float8
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


# Host memory


# The compiler's budget


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
