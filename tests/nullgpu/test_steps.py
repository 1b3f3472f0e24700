"""Counts of a step on the null GPU, for each run of `cases.CASES`: waits of the host, kernels, collectives, memory.

`python benchmarks/nullgpu.py --again` writes the figures that are compared here into expected.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.nullgpu.cases import CASES, HERE, STORED, Case, figures, play

EXPECTED = json.loads(STORED.read_text())
pytestmark = pytest.mark.nullgpu


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_nothing_and_takes_no_more_than_the_stored_kernels_and_memory(
    nullgpu: Path, name: str
) -> None:
    case, expected = CASES[name], EXPECTED[name]
    found = play(nullgpu, case, steps=1)
    too_many = {key: count for key, count in figures(found).items() if count > case.allowed.get(key, 0)}
    assert not too_many
    assert found["kernels"] <= expected["kernels"]
    assert {kind: count for kind, count in found["nccl"].items() if count > expected["nccl"].get(kind, 0)} == {}
    assert found["exposed"] <= expected["exposed"]
    assert found["peak_allocated_gib"] == pytest.approx(expected["peak_allocated_gib"], rel=0.02)


def test_the_null_gpu_counts_a_wait_a_pageable_copy_a_context_elsewhere_and_a_blocking_stream(nullgpu: Path) -> None:
    flags = f"--job.callbacks=['{HERE}/faults.py:Faults']"
    found = play(nullgpu, Case(config="debug_model"), steps=1, more=(flags,))
    assert {key for key, count in figures(found).items() if count} == {
        "syncs", "devsync", "pageable", "malloc", "free", "blockingstream", "other contexts"
    }  # fmt: skip
    assert found["exposed"] > play(nullgpu, Case(config="debug_model"), steps=1)["exposed"]
