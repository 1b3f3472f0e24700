"""The plan of a run in phases: each phase is planned as a run of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from titanlite.cli import main as cli
from titanlite.config.load import load_file
from titanlite.plan.memory import estimate
from titanlite.resolve.load import resolve

H100 = ["--gpus", "8", "--gpu", "h100-80g"]
SMALL = ["--training.batch_size=1", "--training.global_batch_size=8"]
STEPS = "--training.steps=1000"
RAMP = "--data.phase=[{step=101,global_batch_size=16},{step=401,global_batch_size=64}]"


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `titanlite plan`; return its exit code and output."""

    def run(*words: str) -> tuple[int, str]:
        code = cli.main(["plan", "llama3_8b.toml", *H100, *SMALL, *words])
        return code, capsys.readouterr().out

    return run


def alone(plan: Any, batch: int, steps: int) -> dict[str, Any]:
    """Return the plan of a run of one size."""
    flags = [f"--training.global_batch_size={batch}", f"--training.steps={steps}", "--json"]
    found: dict[str, Any] = json.loads(plan(*flags)[1])
    return found


def test_each_phase_has_the_time_and_memory_of_a_run_of_its_size(plan: Any) -> None:
    whole = json.loads(plan(RAMP, STEPS, "--json")[1])
    parts = [alone(plan, batch, steps) for batch, steps in ((8, 100), (16, 300), (64, 600))]
    assert whole["hours"] == pytest.approx(sum(part["hours"] for part in parts), rel=1e-9)
    assert whole["needed_gib"] == max(part["needed_gib"] for part in parts)


def test_the_report_has_a_row_for_each_phase(plan: Any) -> None:
    _, out = plan(RAMP, STEPS)
    assert "step 101     16 sequences of 8,192 tokens: " in out
    assert "for 300 steps; " in out
    tokens = (100 * 8 + 300 * 16 + 600 * 64) * 8192
    assert f"1,000 steps, {tokens / 1e6:.1f}M tokens in " in out


def test_a_run_needs_the_memory_of_its_largest_phase() -> None:
    tokenizer = "--model.tokenizer_path=./assets/tokenizer.model"
    base = ["--training.batch_size=1", tokenizer]
    peaks = []
    for batch in (8, 64):
        config = load_file("llama3_8b.toml", [*base, f"--training.global_batch_size={batch}"])
        peaks.append(estimate(resolve(config, 8)[1]).peak.total)
    assert peaks[0] < peaks[1], "a step of several micro-batches keeps gradients between them"
    config = load_file("llama3_8b.toml", [*base, SMALL[1], RAMP, STEPS])
    assert estimate(resolve(config, 8)[1]).peak.total == peaks[1]


def test_a_phase_of_longer_sequences_is_planned_as_a_run_of_that_length(plan: Any) -> None:
    longer = "--data.phase=[{step=101,seq_len=8192,global_batch_size=8}]"
    short = ["--training.seq_len=2048", "--training.global_batch_size=32"]
    _, out = plan(*short, longer, "--training.steps=300", "--json")
    whole = json.loads(out)
    parts = []
    for flags in (short, ["--training.seq_len=8192", "--training.global_batch_size=8"]):
        # The tables of RoPE cover the longest sequence from the start.
        tables = "--model.overrides.max_seq_len=8192"
        parts.append(json.loads(plan(*flags, tables, "--training.steps=100", "--json")[1]))
    assert whole["hours"] == pytest.approx(parts[0]["hours"] + 2 * parts[1]["hours"], rel=1e-9)
    assert whole["needed_gib"] == parts[1]["needed_gib"] > parts[0]["needed_gib"]
