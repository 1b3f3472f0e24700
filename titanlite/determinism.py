"""Deterministic kernels for as long as a run takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from titanlite.config.plans import TrainPlan


@contextlib.contextmanager
def deterministic(plan: TrainPlan) -> Iterator[None]:
    """Have torch take deterministic kernels within the block if the plan asks for them; before it, build nothing."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if plan.deterministic:
        # cuBLAS is deterministic only with a fixed workspace, chosen before its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=plan.deterministic_warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
