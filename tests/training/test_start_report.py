"""The rows of the startup report, and those of a real run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from tests.support.golden_run import GoldenRun
from titanlite.assembly import report_rows as report
from titanlite.assembly import start_report as opening
from titanlite.checkpoint.loaded import LoadedState
from titanlite.config.sections import (
    ActivationCheckpoint,
    Checkpoint,
    Config,
    Experimental,
    Float8,
)
from titanlite.features.float8.report import float8_rows
from titanlite.features.pipeline import PipelineParallel
from titanlite.models.spec import Size
from titanlite.optim.schedule import LearningRate, Schedule
from titanlite.plan.memory import KeptActivations
from titanlite.run.config import BatchSizes, MeshSizes
from titanlite.run.features import features_of


def _builder(device: str = "cpu", **more: Any) -> Any:
    return SimpleNamespace(
        device=SimpleNamespace(type=device), run=SimpleNamespace(tokens_at_once=128), **more
    )


def test_derived_numbers_and_the_singular() -> None:
    model = nn.ModuleDict({"layers": nn.Linear(9, 100), "output": nn.Linear(1, 5, bias=False)})
    assert report.parameters_text(model) == "1,005 parameters (1.0K): layers 1,000, output 5"
    mesh = MeshSizes(world_size=2, dp_shard=2)
    assert report.batch_text(BatchSizes(4, 1, 8, 2048, 16_384), mesh) == (
        "8 sequences x 2,048 tokens = 16,384 tokens per step; 4 per micro-batch x 1 micro-batch x "
        "2 data-parallel ranks"
    )
    run: Any = SimpleNamespace(steps=10_000, tokens=163_840_000)
    assert report.length_text(run, 163_840) == "10,000 steps, 163,840,000 tokens = 1e+03 epochs"
    assert report.length_text(run, 163_840_000).endswith(" = 1 epoch")
    assert report.length_text(run, None) == "10,000 steps, 163,840,000 tokens"
    tensor = MeshSizes(world_size=4, dp_shard=2, tensor=2)
    assert report.mesh_text(tensor) == "dp_replicate 1 x dp_shard 2 x tp 2 = 4 ranks"
    assert report.schedule_text(Schedule(1, 1, "linear", "titan", 0.0, 1), 0.0) == (
        "warm-up 1 step, linear decay over the last 1 step to 0, 1 step in all"
    )
    layout: Any = SimpleNamespace(
        stages=[("tok_embeddings", "layers.0"), ("output",)], ranks=[0, 1]
    )
    pipeline = PipelineParallel(Config(experimental=Experimental(pipeline_parallel_degree=2)))
    ((_, shown),) = pipeline.report_rows(
        _builder(), cast(nn.Module, SimpleNamespace(layout=layout))
    )
    assert shown == (
        "1F1B, 2 stages, by pipeline rank: tok_embeddings to layers.0 on 0, output on 1"
    )


LINEARS = [
    SimpleNamespace(
        kind="attention.wq", names=["a"] * 32, size=Size(4096, 1024), converted=True, reason=""
    ),
    SimpleNamespace(
        kind="output", names=["b"], size=Size(4096, 128256), converted=False, reason="the head"
    ),
]


def _float8(compiled: bool = True, device: str = "cpu", **keys: Any) -> dict[str, str]:
    config = Float8(enable_float8_linear=True, **keys)
    feature = features_of(Config(float8=config)).float8
    assert feature is not None
    builder = _builder(device, compiles=lambda _: compiled)
    return dict(float8_rows(config, feature.numbers, LINEARS, builder))  # type: ignore[arg-type]


def test_mxfp8_says_how_it_rounds_and_that_it_is_emulated() -> None:
    text = _float8(recipe_name="mxfp8", emulate=True)["float8"]
    assert text.startswith(
        "mxfp8, a scale for each 32 numbers, rounded up, emulated in the dtype of activations "
        "(slow, for tests); 32 of 33 linears"
    )
    text = _float8(recipe_name="mxfp8_floor")["float8"]
    assert text.startswith("mxfp8_floor, a scale for each 32 numbers, rounded down; 32 of 33")
    assert (
        "slower than bf16" in _float8(compiled=False, device="cuda", recipe_name="mxfp8")["warning"]
    )


def test_float8_has_a_row_for_each_kind_of_linear() -> None:
    rows = _float8(emulate=True)
    assert rows["float8"] == (
        "tensorwise, emulated in float32 (slow, for tests); 32 of 33 linears; M = 128 tokens in a "
        "product of one rank"
    )
    assert rows["  attention.wq"] == "K x N = 4,096 x 1,024, 32 in float8"
    assert rows["  output"] == "K x N = 4,096 x 128,256, 1 kept: the head"
    gathered = {"enable_fsdp_float8_all_gather": True}
    assert "weights gathered in float8, each scale found as it is;" in _float8(**gathered)["float8"]
    together = _float8(**gathered, precompute_float8_dynamic_scale_for_fsdp=True)["float8"]
    assert "all scales by one all-reduce" in together
    assert "training.compile" in _float8(False, "cuda")["warning"]
    assert not any("warning" in _float8(*quick) for quick in ((True, "cuda"), (False, "cpu")))


@pytest.mark.parametrize(
    ("keys", "recomputing", "text"),
    [
        ({"mode": "none"}, 0, "32.0 KiB kept per micro-batch, all of 4 blocks"),
        (
            {"mode": "full"},
            4,
            "8.0 KiB of 32.0 KiB kept per micro-batch; 4 of 4 blocks recompute",
        ),
        (
            {"selective_ac_option": "2"},
            2,
            "20.0 KiB of 32.0 KiB kept per micro-batch; 2 of 4 blocks recompute",
        ),
        (
            {"mode": "budget", "memory_budget": 0.3},
            4,
            (
                "8.0 KiB of 32.0 KiB kept per micro-batch; the compiler keeps 30% of what it would "
                "by itself"
            ),
        ),
    ],
)
def test_activations_name_how_much_is_kept_and_where(
    keys: Any, recomputing: int, text: str
) -> None:
    total = 2048 * recomputing + 8192 * (4 - recomputing)
    kept = KeptActivations(4, recomputing, total, 4 * 8192)
    assert report.activations_text(ActivationCheckpoint(**keys), kept) == text


def test_phases_count_as_a_part_of_the_schedule() -> None:
    plain = LearningRate(Schedule(10, 2, "constant", "titan", 0.0), 1e-3)
    halved = replace(plain, phases=((8, 0.5),))

    def change(before: LearningRate, now: LearningRate) -> str | None:
        state = json.loads(json.dumps({"schedule": before.record()}))
        return opening.schedule_change(LoadedState(6, state), now, 10)

    assert change(plain, plain) is None
    assert change(halved, halved) is None
    assert "phases [[8, 0.5]] -> []" in (change(halved, plain) or "")
    assert "phases [] -> [[8, 0.5]]" in (change(plain, halved) or "")


def test_the_use_of_an_initial_load_path_is_told() -> None:
    section = Checkpoint(enable_checkpoint=True, folder="b", initial_load_path="a")
    assert opening.began(section, LoadedState(0, {}, folder=Path("a/step-4"), origin="from")) == (
        "a run that starts from a/step-4 with its weights (checkpoint.initial_load_path; b has no "
        "checkpoint yet)"
    )
    resumed = opening.began(section, LoadedState(2, {}, folder=Path("b/step-2")))
    assert resumed.startswith("resumed from step 2 in b (")
    assert "so checkpoint.initial_load_path is not used" in resumed


def test_a_run_reports_everything_once(golden: GoldenRun) -> None:
    said, _ = golden.console()
    names = ["versions", "model", "tokenizer", "compute", "devices", "mesh"]
    names += ["data", "global batch", "length", "optimizer", "schedule"]
    column = len("global batch") + 2
    rows = [line for line in said if line[:column].strip() in names and line[column - 1] == " "]
    assert [row[:column].strip() for row in rows] == names
    assert not any(line.startswith(("activations ", "memory ")) for line in said), "of GPUs alone"
    assert not any(line.startswith("note: tokens per step") for line in said)
    assert not re.search(r"(?<![\d.,])1 [a-z-]+(?<!s)s\b", "\n".join(rows))
