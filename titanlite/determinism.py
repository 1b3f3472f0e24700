"""Deterministic kernels for as long as a run takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from titanlite.config.plans import TrainPlan


@contextlib.contextmanager
def environment(*names: str) -> Iterator[None]:
    """Give these environment variables back the values they had, when the block ends."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def deterministic(plan: TrainPlan) -> Iterator[None]:
    """Have torch take deterministic kernels within the block if the plan asks for them; before it, build nothing."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with environment("CUBLAS_WORKSPACE_CONFIG"):
        if plan.deterministic:
            # cuBLAS is deterministic only with a fixed workspace, chosen before its first call.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=plan.deterministic_warn_only)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
