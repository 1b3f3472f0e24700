"""benchmarks/gpu.sh: wrong gradients are told, and end a speed before it is measured.

tests/nullgpu goes through whole calls.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import benchmarks.gpu as gpu
import benchmarks.gpu_gradients as gpu_gradients

FACTS = {"device": "H200", "gpu": True, "cuda": "13", "versions": {}, "driver and power limit": ""}


@pytest.fixture
def bench(tmp_path: Path) -> gpu.Bench:
    made = gpu.Bench(tmp_path / "gpu", "", float("inf"), tmp_path / "results" / "gpu")
    made.write("facts", FACTS)
    return made


def test_wrong_gradients_are_told_and_their_form_is_not_measured(bench, monkeypatch, capsys):
    exact = {"a": torch.ones(4), "b": torch.ones(4), "unused": torch.zeros(2)}
    float8 = "float8-all-gather"
    near = {name: 1.01 * gradient for name, gradient in exact.items()}
    rows = [
        gpu_gradients.compared("compile", near, exact),
        gpu_gradients.compared(float8, {**exact, "b": torch.zeros(4)}, exact),
    ]
    for factor, told in ((1.4, "40.0 %"), (float("nan"), "nan %")):
        wrong = {name: factor * gradient for name, gradient in exact.items()}
        found = gpu.problems([gpu_gradients.compared(float8, wrong, exact)])
        assert found == {float8: f"{float8}: {told} from fp32"}

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
    assert f"gradients: FAILED: {float8}: no gradient of b" in printed
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
