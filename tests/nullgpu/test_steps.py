"""Counts of a step on the null GPU, for each run of `cases.CASES`: waits of the host, kernels, collectives, memory.

`NULLGPU_WRITE=1 ./run_tests.sh --nullgpu` writes the figures that are compared here into expected.json.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.nullgpu.cases import CASES, HERE, Case, figures, play

EXPECTED = HERE / "expected.json"
WRITE = bool(os.environ.get("NULLGPU_WRITE"))
pytestmark = pytest.mark.nullgpu


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_nothing_and_takes_no_more_than_the_stored_kernels_and_memory(
    nullgpu: Path, name: str
) -> None:
    case = CASES[name]
    found = play(nullgpu, case, case.layers, steps=1)
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    if WRITE:
        stored = {key: found[key] for key in ("kernels", "nccl", "exposed", "peak_allocated_gib")}
        EXPECTED.write_text(json.dumps(dict(sorted({**expected, name: stored}.items())), indent=1) + "\n")
        expected[name] = stored
    too_many = {key: count for key, count in figures(found).items() if count > case.allowed.get(key, 0)}
    assert not too_many
    bound = expected[name]
    assert found["kernels"] <= bound["kernels"]
    assert {kind: count for kind, count in found["nccl"].items() if count > bound["nccl"].get(kind, 0)} == {}
    assert found["exposed"] <= bound["exposed"]
    assert found["peak_allocated_gib"] == pytest.approx(bound["peak_allocated_gib"], rel=0.02)


def test_the_null_gpu_counts_a_wait_a_pageable_copy_a_context_elsewhere_and_a_blocking_stream(nullgpu: Path) -> None:
    flags = f"--job.callbacks=['{HERE}/faults.py:Faults']"
    found = play(nullgpu, Case(config="debug_model"), None, steps=1, more=(flags,))
    assert {key for key, count in figures(found).items() if count} == {
        "syncs", "devsync", "pageable", "malloc", "free", "blockingstream", "other contexts"
    }  # fmt: skip
    assert found["exposed"] > play(nullgpu, Case(config="debug_model"), None, steps=1)["exposed"]
