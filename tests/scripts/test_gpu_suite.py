"""benchmarks/gpu.sh: its configs, and the verdict about gradients."""

from __future__ import annotations

import pytest
import torch

import benchmarks.gpu_gradients as gpu_gradients
import benchmarks.gpu_ladder as gpu_ladder
import benchmarks.gpu_pieces as gpu_pieces
from titanlite.resolve.load import load_config


def test_every_setting_has_a_valid_config() -> None:
    for setting in gpu_ladder.SETTINGS.values():
        load_config(str(gpu_ladder.CONFIGS / setting.config), 1, [])


def test_lost_and_far_gradients_are_problems() -> None:
    exact = {"a": torch.ones(4), "b": torch.ones(4), "unused": torch.zeros(2)}
    lost = {"a": torch.ones(4), "b": torch.zeros(4), "unused": torch.zeros(2)}
    row = gpu_gradients.compared("compile", lost, exact)
    assert row["lost"] == ["b"]
    assert row["value"] == pytest.approx(100 / 2**0.5)
    near = gpu_gradients.compared("default", {n: 1.01 * t for n, t in exact.items()}, exact)
    far = gpu_gradients.compared("float8", {n: 1.4 * t for n, t in exact.items()}, exact)
    undefined = gpu_gradients.compared("compile", {**exact, "a": exact["a"] / 0}, exact)
    assert gpu_pieces.gradient_problems([row, near, far, undefined]) == [
        "compile: no gradient of b",
        "float8: 40.0 % from fp32",
        "compile: inf % from fp32",
    ]
