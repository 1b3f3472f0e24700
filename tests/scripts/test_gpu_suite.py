"""benchmarks/gpu.sh: its configs, its pieces on a machine without a GPU, and with stand-ins for
what runs on one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import benchmarks.gpu_gradients as gpu_gradients
import benchmarks.gpu_ladder as gpu_ladder
import benchmarks.gpu_pieces as gpu_pieces
from benchmarks.gpu_bench import Bench
from titanlite.resolve.load import load_config

ABOUT = {
    "device": "NVIDIA H200",
    "gpu": True,
    "memory_bytes": 139 * 2**30,
    "peak_flops": 989e12,
    "driver and power limit": "",
    "cuda": "12.8",
    "versions": {"torch": "2.11"},
    "sources": "0123",
}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "gpu", False, float("inf"), ABOUT)


# Settings.


def test_every_setting_has_a_valid_config() -> None:
    for setting in gpu_ladder.SETTINGS.values():
        load_config(str(gpu_ladder.CONFIGS / setting.config), 1, [])


# Ladders, with a stand-in for the training.

LADDER = """
import json, os, sys
out = sys.argv[1]
speeds = {"default": 10000.0, "compile": 13000.0, "float8": 17000.0, "float8-all-gather": 16000.0}
levels, runs = [], []
for level in speeds:
    losses = {"5": 7.5, "25": 5.0 + speeds[level] / 1e6}
    runs.append({"level": level, "repeat": 1, "tokens_per_second": speeds[level], "losses": losses})
    levels.append({"level": level, "repeats": 1, "tokens_per_second": speeds[level],
                   "mfu": speeds[level] / 250,
                   "ratio": [speeds[level] / 10000] * 3, "memory_gib": 100.0,
                   "loss": losses["25"],
                   "loss_difference": 0.5})
config = {one["level"]: {"float8.enable_float8_linear": "float8" in one["level"],
                         "float8.recipe_name": "tensorwise",
                         "activation_checkpoint.mode": "full"} for one in levels}
os.makedirs(out, exist_ok=True)
with open(f"{out}/levels.json", "w") as file:
    json.dump({"steps": 25, "levels": levels, "runs": runs, "config": config}, file)
"""


@pytest.fixture
def measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose ladders are the stand-in's."""
    command = [sys.executable, "-S", "-c", LADDER]
    monkeypatch.setattr(
        gpu_ladder,
        "ladder_command",
        lambda bench, setting, flags, layers, out, skip: [*command, str(out)],
    )
    monkeypatch.setattr(gpu_ladder, "fit_command", lambda *_: ["true"])
    return bench


def test_rows_say_all_that_figures_depend_on(measured: Bench) -> None:
    found = gpu_ladder.climb(measured, "ladder-8b")
    assert not found.problems
    assert [row["what"] for row in found.rows] == list(gpu_ladder.LEVELS)
    row = found.rows[3]
    assert (row["seq_len"], row["sequences"], row["activation_checkpoint"]) == (8192, 1, "full")
    assert (row["state_bytes_per_parameter"], row["mfu_formula"]) == (16, gpu_ladder.MFU_FORMULA)
    assert [one["float8_recipe"] for one in found.rows] == [None, None, "tensorwise", "tensorwise"]
    assert row["tokens_per_second"] == 16000
    assert row["tflops"] == pytest.approx(16000 * row["flops_per_token"] / 1e12)
    # Against compiled bf16, not against the default.
    assert row["ratio"][0] == 1.6
    assert row["ratio_to_compile"] == pytest.approx(16 / 13)
    # The difference of the last step, not the largest one.
    assert row["final_loss_difference"] == pytest.approx(0.003)
    assert row["loss_difference"] == 0.5
    assert found.rows[1]["final_loss_difference"] is None
    assert found.rows[1]["ratio_to_compile"] == 1


# Gradients.


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
