"""Counts of a step on the null GPU, for each run of `cases.CASES`: waits of the host, kernels,
collectives, memory.

`python benchmarks/nullgpu.py --again` writes the figures that are compared here into expected.json.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.nullgpu import PUBLISHED, THEIRS, batch_of, roofline
from benchmarks.plan_speed import SHARES, gpu_of
from tests.nullgpu.cases import CASES, HERE, STORED, Case, figures, play, run

EXPECTED = json.loads(STORED.read_text())
pytestmark = pytest.mark.nullgpu


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_nothing_and_takes_no_more_than_the_stored_kernels_and_memory(
    nullgpu, name
):
    case = CASES[name]
    expected = EXPECTED[name]
    found = play(nullgpu, case, steps=1)
    too_many = {
        key: count for key, count in figures(found).items() if count > case.allowed.get(key, 0)
    }
    assert not too_many
    assert found["kernels"] <= expected["kernels"]
    assert {
        kind: count
        for kind, count in found["nccl"].items()
        if count > expected["nccl"].get(kind, 0)
    } == {}
    assert found["exposed"] <= expected["exposed"]
    assert found["peak_allocated_gib"] == pytest.approx(expected["peak_allocated_gib"], rel=0.02)


def test_steps_launch_no_more_kernels_and_collectives_than_torchtitan():
    for name, theirs in json.loads(THEIRS.read_text()).items():
        if (ours := EXPECTED.get(name.removeprefix("torchtitan 0.2.2, "))) is not None:
            assert ours["kernels"] <= theirs["kernels"]
            assert sum(ours["nccl"].values()) <= sum(theirs["nccl"].values())


def test_the_null_gpu_counts_a_wait_a_pageable_copy_a_context_elsewhere_and_a_blocking_stream(
    nullgpu,
):
    flags = f"--job.callbacks=['{HERE}/faults.py:Faults']"
    found = play(nullgpu, Case(config="debug_model"), steps=1, more=(flags,))
    assert {key for key, count in figures(found).items() if count} == {
        "syncs", "devsync", "pageable", "malloc", "free", "blockingstream", "other contexts"
    }  # fmt: skip
    assert found["exposed"] > play(nullgpu, Case(config="debug_model"), steps=1)["exposed"]


def test_no_thread_of_autograd_holds_a_chunk_when_the_next_begins(nullgpu):
    """A chunk's gradient is computed in the loop's thread, another one in that of a GPU."""
    assert run(nullgpu, "-c", THREADS) == [1, 0]


THREADS = """
import threading, torch
from titanlite.features.loss_chunks.head import _of_chunk
threads = []
def loss(logits, labels):
    logits.register_hook(lambda gradient: threads.append(threading.get_ident()))
    return logits.float().sum()
rows, weight = (torch.empty(8, 8, device="cuda") for _ in range(2))
_of_chunk(rows, weight, torch.zeros(8, device="cuda"), loss, True)
loss(rows.requires_grad_() * 1, None).backward()
print([int(thread == threading.get_ident()) for thread in threads])
"""


def test_bytes_are_those_that_each_kernel_reads_and_writes(nullgpu):
    """In tensors of 4 MiB."""
    found = run(nullgpu, "-c", BYTES)
    assert found == [2, 2, 2, 2, 0.002, 0, 3]


BYTES = """
import torch
from tests.nullgpu.traffic import Traffic
x, y, first = (torch.empty(1024, 1024, device="cuda") for _ in range(3))
row, half = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.compile(lambda x: x / 2 + 1)
half(x)
def one(do):
    traffic = Traffic()
    with traffic.counting():
        do()
    return round(traffic.moved / 2**22, 4)
print([one(do) for do in (
    lambda: x.add_(1), lambda: x * 2, lambda: half(x), lambda: x.copy_(y),
    lambda: torch.nn.functional.embedding(row, x), lambda: (x @ y).view(-1),
    lambda: torch.add(x, y, out=first))])
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_roofline_of_the_log_is_within_15_percent_of_published_runs(name):
    point = PUBLISHED[name]
    found = json.loads(THEIRS.read_text())[name]
    tokens = 8192 * batch_of(point) / roofline(found, gpu_of(point, SHARES))
    assert tokens == pytest.approx(point.tokens, rel=0.15)
