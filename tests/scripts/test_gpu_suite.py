"""benchmarks/gpu.sh: its targets by their sources' numbers, its rows on a CPU, and wrong gradients,
which are told and end a speed before it is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import to_builtins

import benchmarks.gpu as gpu
import benchmarks.gpu_gradients as gpu_gradients
import benchmarks.gpu_targets as gpu_targets
from tests.support.processes import ROOT, python
from titanlite.config.load import read
from titanlite.models.counts import count_parameters, flops_per_token
from titanlite.resolve.load import check_config

CONFIGS = ROOT / "train_configs"


def test_rows_are_of_the_shapes_that_targets_count_with():
    rival, kahan, bf16 = (
        check_config([f"--job.config_file={gpu.RUNS[name].config}"], 1, training=False)[1]
        for name in ("rival", "kahan", "bf16")
    )
    for run in (rival, kahan, bf16):
        assert count_parameters(run.model_args()) == gpu_targets.PARAMETERS == 8_030_261_248
    assert flops_per_token(bf16.model_args(), 8192) == gpu_targets.flops(8192)
    # The published step: 32,768 tokens, everything recomputed, weights in bf16.
    assert rival.batch.tokens_per_step == 32_768
    assert (rival.training.seq_len, rival.batch.accumulation) == (4096, 2)
    assert (rival.activation_checkpoint.mode, rival.training.dtype) == ("full", "bfloat16")
    assert (kahan.activation_checkpoint.mode, kahan.batch.accumulation) == ("none", 4)
    assert (bf16.activation_checkpoint.mode, bf16.training.dtype) == ("none", "float32")


def test_targets_are_the_arithmetic_of_their_sources():
    # The rival's report: 10,471 tokens/s and 57.8 % MFU of 989 TFLOP/s in one row. They agree where
    # all 8.03 B parameters count: 6 x 8.030 + 12 x 32 x 4096 x 4096 = 54.62 GFLOP a token. Without
    # the embedding's 0.525 B, as here, they are 51.47 GFLOP and 54.5 %.
    theirs = 10_471 * (6 * 8.030e9 + 12 * 32 * 4096**2) / 989e12
    assert theirs == pytest.approx(0.578, abs=5e-4)
    assert 10_471 * gpu_targets.flops(4096) / 989e12 == pytest.approx(0.545, abs=5e-4)
    # For 8,192 tokens: products 6 x 7.505 B x 8,192 / 700 T = 0.527 s, attention 3.5 x 2 x 32 x
    # 4096 x 8,192^2 / 631 T = 0.098 s, update 32 x 8.03 G / 4.267 T = 0.060 s, kernels
    # 0.067, rest 0.03.
    bf16 = 8192 / (0.527 + 0.098 + 0.060 + 0.067 + 0.030)
    # Products of blocks 6 x 6.980 B x 8,192 / 1,330 T = 0.258, the head 0.037, casts 0.035.
    float8 = 8192 / (0.258 + 0.037 + 0.035 + 0.098 + 0.060 + 0.067 + 0.030)
    # Four micro-batches and one update of 206 x 8.03 G / 4.267 T = 0.388 s.
    kahan = 4 * 8192 / (4 * (0.527 + 0.098 + 0.067 + 0.030) + 0.388)
    bounds = {(one.row, one.against): one.bound for one in gpu_targets.TARGETS}
    assert bounds["rival", ""] == 10_471
    for row, tokens in {"bf16": bf16, "float8": float8, "kahan": kahan}.items():
        assert bounds[row, ""] == pytest.approx(0.93 * tokens, abs=60)
    assert bounds["bf16", ""] * gpu_targets.flops(8192) / 989e12 == pytest.approx(0.57, abs=0.005)
    assert bounds["float8", "bf16"] == pytest.approx(8950 / 7166, abs=0.005)
    assert bounds["loss-float8", "loss-bf16"] == pytest.approx(2 * (3.612 - 3.601), abs=0.003)


def test_a_target_is_met_missed_or_not_measured():
    speed, loss = gpu_targets.TARGETS[4], gpu_targets.TARGETS[5]
    rows = {"bf16": {"tokens/s": 10_000.0}, "float8": {"tokens/s": 12_400.0}}
    assert speed.line(rows).endswith("missed, 1.24")
    assert speed.line({**rows, "float8": {"tokens/s": 12_600.0}}).endswith("met, 1.26")
    assert speed.line({"bf16": rows["bf16"]}).endswith("not measured")
    near = {"loss-bf16": {"loss": 4.5}, "loss-float8": {"loss": 4.49}}
    assert loss.line(near).endswith("met, 0.01")
    assert loss.line({**near, "loss-float8": {"loss": float("nan")}}).endswith("missed, nan")


def test_the_levels_are_those_of_the_shipped_files():
    def values(*arguments):
        config, problems = read(arguments)
        assert not problems
        found: dict[str, Any] = to_builtins(config.sections)
        for name in ("dump_folder", "description", "config_file", "extends"):
            found["job"].pop(name, None)
        return found

    shipped = ("level1_default", "level2_compile", "level3_float8", "level4_float8_all_gather")
    for flags, name in zip(gpu.LEVELS.values(), shipped, strict=True):
        ours = values(f"--job.config_file={CONFIGS}/llama3_8b.toml", *flags)
        assert ours == values(f"--job.config_file={CONFIGS}/llama3_8b_{name}.toml")


def test_lost_and_far_gradients_are_problems():
    exact = {"a": torch.ones(4), "b": torch.ones(4), "unused": torch.zeros(2)}
    lost = {"a": torch.ones(4), "b": torch.zeros(4), "unused": torch.zeros(2)}
    row = gpu_gradients.compared("compile", lost, exact)
    assert row["lost"] == ["b"]
    assert row["value"] == pytest.approx(100 / 2**0.5)
    near = gpu_gradients.compared("compile", {n: 1.01 * t for n, t in exact.items()}, exact)
    far = gpu_gradients.compared("float8-all-gather", {n: 1.4 * t for n, t in exact.items()}, exact)
    undefined = gpu_gradients.compared("compile", {**exact, "a": exact["a"] / 0}, exact)
    assert gpu.problems([near]) == {}
    assert gpu.problems([row]) == {"compile": "compile: no gradient of b"}
    assert gpu.problems([far]) == {"float8-all-gather": "float8-all-gather: 40.0 % from fp32"}
    assert gpu.problems([undefined]) == {"compile": "compile: inf % from fp32"}


FACTS = {"device": "H200", "gpu": True, "cuda": "13", "versions": {}, "driver and power limit": ""}


@pytest.fixture
def bench(tmp_path: Path) -> gpu.Bench:
    made = gpu.Bench(tmp_path / "gpu", "", float("inf"), tmp_path / "results" / "gpu")
    made.write("facts", FACTS)
    return made


def test_wrong_gradients_are_told_and_their_form_is_not_measured(bench, monkeypatch, capsys):
    unit = {"unit": "%", "lost": []}
    rows = [
        {"what": "compile", "value": 0.7, **unit},
        {"what": "float8-all-gather", "value": 80.0, **unit},
    ]

    def command(bench, name):
        if name == "gradients":
            return ["echo", json.dumps(rows)]
        # A run that the budget ends after six steps: they stay.
        steps = [
            {"step": step, "time": step, "loss": 9.0 - step, "tps": 1000.0 * step, "memory_gib": 5}
            for step in range(1, 7)
        ]
        lines = "\n".join(map(json.dumps, steps))
        folder = bench.folder / "runs" / f"{name}-1"
        return ["sh", "-c", f"mkdir -p {folder}; echo '{lines}' > {folder}/metrics.jsonl; exit 3"]

    monkeypatch.setattr(gpu, "command_of", command)
    assert bench.make(["gradients", "bf16", "float8"]) == 1
    printed = capsys.readouterr().out
    assert "gradients: FAILED: float8-all-gather: 80.0 % from fp32" in printed
    assert "float8: FAILED: not run, since gradients are wrong" in printed
    bf16 = bench.rows()["bf16"]
    assert (bf16["tokens/s"], bf16["steps"], bf16["loss"]) == (5500, 6, 3.0)
    assert bf16["failed"].startswith("exit 3")
    assert not (bench.folder / "runs" / "float8-1").exists()
    assert bench.results
    text = bench.results.with_suffix(".md").read_text()
    assert "| bf16 | 5,500 | 5,000 | 6,000 | – | 5 | 0 | 3 | 6 of 12 |" in text
    assert json.loads(bench.results.with_suffix(".json").read_text())["rows"]["bf16"] == bf16
    bench.write("facts", {**FACTS, "device": "H100"})
    assert bench.rows() == {}


@pytest.mark.slow
def test_a_rehearsal_on_a_cpu_goes_through_a_quick_call(tmp_path):
    done = python("benchmarks/gpu.py", "quick", "1", "--toy", "--out", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "rows").iterdir()}
    assert set(rows) == set(gpu.QUICK["1"])
    assert [line.split(":")[0] for line in rows["gradients"]["lines"]] == list(gpu.LIMITS)
    assert rows["bf16"]["steps"] == 6
    assert 7 < rows["bf16"]["loss"] < 9.1
    (page,) = tmp_path.glob("llama3_8b_h200_cpu*.md")
    assert "| steps | 6 | not run | not run |" in page.read_text()
    assert (tmp_path / "gpu.md").read_text().count("not measured") == len(gpu_targets.TARGETS)
