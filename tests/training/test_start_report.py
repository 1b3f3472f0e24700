"""The rows of the startup report, and those of a real run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.support.golden_run import GoldenRun
from titanlite.assembly import report_rows as report
from titanlite.assembly import start_report as opening
from titanlite.assembly.report_rows import Setup
from titanlite.checkpoint.loaded import LoadedState
from titanlite.config.model_sections import Model
from titanlite.config.run_sections import Metrics
from titanlite.config.sections import (
    ActivationCheckpoint,
    Checkpoint,
    Config,
    Experimental,
    Float8,
    Training,
)
from titanlite.features.float8.report import float8_rows
from titanlite.features.pipeline import PipelineParallel
from titanlite.models.spec import Size
from titanlite.optim.schedule import LearningRate, Schedule
from titanlite.plan.lifetimes import Repeated
from titanlite.plan.memory import KeptActivations
from titanlite.run.config import MeshSizes
from titanlite.run.features import features_of

CPU = "CPU (some model)"
H100 = "NVIDIA H100"


def _setup(device: str = CPU, **changes: Any) -> Setup:
    mesh = MeshSizes(world_size=2, dp_shard=2)
    parameters = {"tok_embeddings": 1000, "layers": 5000, "norm": 10, "output": 1000}
    return replace(
        Setup(device, device == CPU, mesh, parameters, 4, 1, 2048, 128, 7, 163_840), **changes
    )


def test_derived_numbers_and_the_singular() -> None:
    rows = dict(
        [
            *report.model_rows(Model(flavor="8B"), _setup()),
            *report.batch_rows(_setup(), 10_000, None),
        ]
    )
    assert rows["model"] == "llama3 8B: 7,010 parameters (7.0K)"
    assert rows["parameters"] == "tok_embeddings 1,000, layers 5,000, norm 10, output 1,000"
    assert (
        rows["global batch"]
        == "8 sequences = 4 per micro-batch x 1 micro-batch x 2 data-parallel ranks"
    )
    assert rows["tokens per step"] == "16,384 = 8 sequences x 2,048 tokens"
    assert rows["length"] == "10,000 steps, 163,840,000 tokens = 1e+03 epochs"
    assert dict(report.batch_rows(_setup(), 10, None))["length"].endswith(" = 1 epoch")
    assert dict(report.batch_rows(_setup(), None, 3))["length"] == "3 epochs"
    tensor = MeshSizes(world_size=4, dp_shard=2, tensor=2)
    assert report.mesh_row(tensor)[1] == "dp_replicate 1 x dp_shard 2 x tp 2 = 4 ranks"
    assert report.schedule_row(Schedule(1, 1, "linear", "titan", 0.0, 1), 0.0)[1] == (
        "warm-up 1 step, linear decay over the last 1 step to 0, 1 step in all"
    )
    layout: Any = SimpleNamespace(
        stages=[("tok_embeddings", "layers.0"), ("output",)], ranks=[0, 1]
    )
    pipeline = PipelineParallel(Config(experimental=Experimental(pipeline_parallel_degree=2)))
    builder: Any = SimpleNamespace(stage_layout=layout)
    ((_, shown),) = pipeline.report_rows(_setup(), builder, nn.Identity())
    assert shown == (
        "1F1B, 2 stages, by pipeline rank: tok_embeddings to layers.0 on 0, output on 1"
    )


def _compute(
    device: str, peak: float | None, given: bool = False, float8: bool = False
) -> dict[str, str]:
    metrics = Metrics(peak_tflops=989.0 if given else None)
    return dict(report.compute_rows(metrics, float8, _setup(device), 42_000_000, peak, 2 * 1024**3))


def test_the_peak_of_the_mfu_is_named_and_only_an_unknown_accelerator_needs_one() -> None:
    assert _compute(CPU, None)["devices"] == f"2 x {CPU}, 2.0 GiB of memory, shared"
    assert len(_compute(CPU, None)) == 2
    assert "metrics.peak_tflops" in _compute("NVIDIA L40S", None)["note"]
    known = _compute(H100, 989e12)
    assert known["compute"].endswith("; MFU against 989 TFLOPS per device")
    assert "note" not in known
    assert (
        "989 TFLOPS per device, its peak in bf16" in _compute(H100, 989e12, float8=True)["compute"]
    )
    assert _compute(H100, 989e12, True, True)["compute"].endswith(
        "989 TFLOPS per device (metrics.peak_tflops)"
    )


LINEARS = [
    SimpleNamespace(
        kind="attention.wq", names=["a"] * 32, size=Size(4096, 1024), converted=True, reason=""
    ),
    SimpleNamespace(
        kind="output", names=["b"], size=Size(4096, 128256), converted=False, reason="the head"
    ),
]


def _float8(compiled: bool = True, device: str = CPU, **keys: Any) -> dict[str, str]:
    config = Float8(enable_float8_linear=True, **keys)
    feature = features_of(Config(float8=config)).float8
    assert feature is not None
    setup = _setup(device)
    return dict(float8_rows(config, feature.numbers, LINEARS, setup, compiled))  # type: ignore[arg-type]


def test_mxfp8_says_how_it_rounds_and_that_it_is_emulated() -> None:
    text = _float8(recipe_name="mxfp8", emulate=True)["float8"]
    assert text.startswith(
        "mxfp8, a scale for each 32 numbers, rounded up, emulated in the dtype of activations "
        "(slow, for tests); 32 of 33 linears"
    )
    text = _float8(recipe_name="mxfp8_floor")["float8"]
    assert text.startswith("mxfp8_floor, a scale for each 32 numbers, rounded down; 32 of 33")
    assert (
        "slower than bf16" in _float8(compiled=False, device=H100, recipe_name="mxfp8")["warning"]
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
    together = _float8(**gathered, precompute_float8_dynamic_scale_for_fsdp=True, drift_check=5)[
        "float8"
    ]
    assert "all scales by one all-reduce" in together
    assert "drift measured every 5 steps" in together
    assert "training.compile" in _float8(False, H100)["warning"]
    assert not any("warning" in _float8(*quick) for quick in ((True, H100), (False, CPU)))


def _sharding(device: str = CPU, shards: int = 2, **keys: Any) -> str:
    mesh = MeshSizes(world_size=shards, dp_shard=shards)
    setup = _setup(device, mesh=mesh, parameters={"all": 8_030_261_248}, accumulation=4)
    return "".join(text for _, text in report.sharding_rows(Training(**keys), setup))


def test_sharding_names_its_costs() -> None:
    kept = (
        "whole gradients kept until the last micro-batch: 4 bytes x 8,030,261,248 parameters = "
        "29.9 GiB per rank"
    )
    assert _sharding() == f"{kept} (training.gradient_sync)"
    assert _sharding(gradient_sync="every") == ""
    assert _sharding(shards=1) == "", "they are whole in any case"
    assert "2 bytes x 8,030,261,248" in _sharding(mixed_precision_reduce="bfloat16")
    assert _sharding(enable_cpu_offload=True).endswith("offload has no effect on a CPU")
    assert _sharding(H100, enable_cpu_offload=True).endswith("optimizer state in host memory")


@pytest.mark.parametrize(
    ("keys", "recomputing", "text"),
    [
        ({"mode": "none"}, 0, "all kept; 32.0 KiB in 4 blocks per micro-batch"),
        (
            {"mode": "full"},
            4,
            (
                "4 of 4 blocks keep only their input and recompute 6 of 7 matmuls and attention; "
                "8.0 KiB of 32.0 KiB kept"
            ),
        ),
        (
            {"selective_ac_option": "2"},
            2,
            "2 of 4 blocks keep only their input and recompute 6 of 7 matmuls",
        ),
        (
            {"selective_ac_option": "op"},
            4,
            (
                "by operation: each block saves 4 of 7 matmuls and attention and recomputes 6 of "
                "7 matmuls and attention"
            ),
        ),
        (
            {"mode": "budget", "memory_budget": 0.3},
            4,
            "the compiler keeps 30% of what it would by itself; 8.0 KiB of",
        ),
    ],
)
def test_activations_name_how_much_is_kept_and_where(
    keys: Any, recomputing: int, text: str
) -> None:
    operators = Repeated(7, 4, True, 6, True)
    total = 2048 * recomputing + 8192 * (4 - recomputing)
    kept = KeptActivations(4, recomputing, total, 4 * 8192, operators)
    assert report.activations_row(ActivationCheckpoint(**keys), kept, _setup())[1].startswith(text)
    config = ActivationCheckpoint(**keys, offload=True)
    assert report.activations_row(config, kept, _setup())[1].endswith(
        "; offload has no effect on a CPU"
    )
    away = report.activations_row(config, kept, _setup(H100))[1]
    assert re.search(r"; up to [\d.]+ KiB of that wait in host memory$", away)


def test_the_kernel_of_attention_is_named() -> None:
    def row(device: str, window: int | None, dtype: str = "bfloat16", masked: bool = False) -> str:
        return report.attention_row(_setup(device), window, dtype, masked)[1]

    plain = "the first kernel that can of cuDNN, flash, efficient, math"
    assert row(H100, None) == row(H100, None, "float32", masked=True) == plain
    assert row(H100, None, masked=True) == "kernel flash of variable lengths"
    window = "; each token sees 100, itself and those before"
    assert row(H100, 100) == "kernel flash of variable lengths" + window
    assert row(CPU, 100, "float32") == "kernel flash of variable lengths" + window
    assert row(CPU, 2048) == "kernel flash for CPUs", "the window is as long as the sequence"


def test_a_schedule_of_a_later_version_stops_no_resume() -> None:
    rate = LearningRate(Schedule(10, 2, "linear", "titan", 0.0), 1e-3)
    state = {"schedule": {**rate.record(), "decay_type": "of a later version"}}
    said = opening.schedule_change(LoadedState(6, state), rate, 10)
    assert said
    assert "cannot be compared" in said
    assert "of a later version" in said


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
    names = [
        "versions",
        "model",
        "parameters",
        "tokenizer",
        "compute",
        "devices",
        "mesh",
        "sharding",
        "attention",
        "activations",
    ]
    names += ["memory", "data", "global batch", "tokens per step", "length", "schedule"]
    column = len("tokens per step") + 2
    rows = [line for line in said if line[:column].strip() in names and line[column - 1] == " "]
    assert [row[:column].strip() for row in rows] == names
    assert not any(line.startswith("note: tokens per step") for line in said)
    assert not re.search(r"(?<![\d.,])1 [a-z-]+(?<!s)s\b", "\n".join(rows))
