"""Rates, peaks of devices, memory, and the rank that the others wait for."""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.stand_ins import ANY, at_step, burn
from tests.support.whole_runs import make_trainer
from tests.support.words import listening
from titanlite.callbacks import RunEnd
from titanlite.config.run_sections import Profiling
from titanlite.data.step_sizes import StepSize
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics import throughput
from titanlite.metrics.profiler import Profiler
from titanlite.metrics.stragglers import LOGS_IN_A_ROW, StragglerDetector
from titanlite.metrics.throughput import (
    Throughput,
    device_name,
    read_memory,
    total_memory_bytes,
)
from titanlite.plan.hardware import peak_flops
from titanlite.runs.read_jsonl import read_metrics

CPU = torch.device("cpu")
#: TFLOPS; 0: unknown.
PEAKS = {
    70.0: ("NVIDIA A10G",),
    121.0: ("NVIDIA L4",),
    312.0: ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
    362.0: ("NVIDIA L40S",),
    756.0: ("NVIDIA H100 PCIe",),
    835.0: ("NVIDIA H100 NVL",),
    989.0: ("NVIDIA H100 80GB HBM3", "NVIDIA H200"),
    2250.0: ("NVIDIA B200",),
    0.0: (
        "NVIDIA A10",
        "NVIDIA L40",
        "NVIDIA RTX A1000",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA H800",
        "NVIDIA H20",
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "AMD Instinct MI300X",
    ),
}


#: Size of each step.
SIZE = StepSize(4, 2048, 4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for `time`, but for the processor's."""
    clock = SimpleNamespace(now=100.0, thread_time=time.thread_time)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def make(devices: int = 1) -> Throughput:
    return Throughput(devices, {2048: 58_000_000_000}, 989e12)


def test_rates_count_data_waits_and_leave_pauses_and_the_first_step_out(clock):
    rate = make(2)
    clock.now += 60
    rate.step_done(SIZE)
    first = rate.read(99 * SIZE.tokens)
    assert first.figures["tps"] == pytest.approx(4096 / 60)
    assert first.seconds_left is None
    for _ in range(4):
        rate.enter("data")
        clock.now += 0.5
        rate.enter("work")
        clock.now += 1.5
        rate.step_done(SIZE)
    rate.enter("pause")
    clock.now += 30
    found = rate.read(95 * SIZE.tokens)
    rates = {"tps": 2048, "tflops": 2048 * 0.058, "mfu": 100 * 2048 * 58e9 / 989e12}
    times = {"seconds_per_step": 2.0, "data_seconds": 0.5, "data_percent": 25}
    assert found.figures == pytest.approx(rates | times)
    assert (found.steps, found.samples_per_second) == (4, 2.0)
    assert found.seconds_left == pytest.approx(95 * 2.0)


def test_peaks_belong_to_exactly_these_devices():
    for peak, names in PEAKS.items():
        assert [(peak_flops(name) or 0) / 1e12 for name in names] == [peak] * len(names), names


def test_cpu_memory_is_what_is_resident_and_grows_with_what_is_allocated():
    before = read_memory(CPU)
    # New pages: malloc may hand out resident ones that an earlier test has freed.
    block = mmap.mmap(-1, 200 * 2**20)
    np.frombuffer(block, dtype=np.uint8)[:] = 1
    after = read_memory(CPU)
    total = total_memory_bytes(CPU)
    assert device_name(CPU).startswith("CPU (")
    assert (after["memory_gib"] - before["memory_gib"]) * 1024 == pytest.approx(200, abs=20)
    assert 0.05 < before["memory_gib"] < total / 2**30
    percent = pytest.approx(100 * after["memory_gib"] * 2**30 / total)
    figures = {"memory_gib": after["memory_gib"], "memory_percent": percent}
    assert after == {**figures, "alloc_retries": 0, "ooms": 0}
    del block


def test_only_ones_own_work_in_steps_is_read(clock):
    rate = make()
    for _ in range(2):
        rate.enter("data")
        burn(0.02)
        clock.now += 0.05
        rate.enter("work")
        burn(0.05)
        time.sleep(0.2)  # as in a collective
        rate.enter("pause")
        burn(0.3)
        rate.enter("work")
        rate.step_done(SIZE)
    work, data = rate.own_seconds()
    assert 0.05 <= work < 0.15, (
        "neither data nor pauses nor waiting count as work, and it is per step"
    )
    assert data == pytest.approx(0.05)
    rate.read(0)
    rate.step_done(SIZE)
    work, data = rate.own_seconds()
    assert work < 0.05 and data == 0, "a reading begins a new window"


def test_a_reading_has_the_seconds_of_saves_since_the_last_one(clock):
    meter = make()
    meter.step_done(SIZE)
    assert "save_seconds" not in meter.read(0).figures
    meter.step_done(SIZE)
    meter.enter("save")
    clock.now += 7
    meter.enter("work")
    assert meter.read(0).figures["save_seconds"] == 7


# The rank that the others wait for


#: Seconds per step by which a rank is slowed: far above what a busy machine adds to one rank and
#: not to the other.
SLOW = 0.3


def _train(world: DistEnv, folder: str) -> None:
    flags = ["--no-checkpoint.enable_checkpoint", "--no-validation.enable", "--training.steps=6"]
    trainer = make_trainer(world, folder, *flags)
    if world.rank == 1:
        block = trainer.parts.model.get_submodule("layers.1")
        # 8 sequences in micro-batches of 2 on 2 ranks: twice a step.
        block.register_forward_hook(lambda *_: burn(SLOW / 2))
    trainer.train()


@pytest.mark.slow
def test_the_slow_rank_is_named(pool, tmp_path):
    pool(2).run(_train, str(tmp_path))
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"] > 1]
    assert len(rows) == 5
    assert [row["slowest_rank"] for row in rows].count(1) >= 4
    lags = sorted(row["lag_seconds"] for row in rows)
    assert 0.5 * SLOW < lags[2] < 2 * SLOW
    assert sorted(row["lag_percent"] for row in rows)[2] > 20
    # Rank 0 does not wait for its own data.
    assert sorted(row["data_seconds"] for row in rows)[2] < 0.5 * SLOW


def test_ranks_are_compared_with_the_median():
    figures, _ = StragglerDetector(CPU).compare([1.0, 1.1, 1.0, 0.8], [0.0, 0.1, 0.5, 0.1], 2.0)
    assert figures == pytest.approx(
        {"slowest_rank": 2, "fastest_rank": 3, "lag_seconds": 0.5, "lag_percent": 50}
    )


def test_on_a_gpu_the_step_without_data_is_scaled_by_the_time_of_the_head():
    detector = StragglerDetector(torch.device("cuda", 0))
    for heads, data, step, slowest, lag in (
        ([0.010, 0.010, 0.015], [0.2, 0.2, 0.2], 1.2, 2, 0.5),  # own: 1.2, 1.2, 1.7
        # Without a head (a pipeline stage has none) only the data tell.
        ([0.0, 0.0], [0.1, 0.4], 1.1, 1, 0.3),
    ):
        figures, _ = detector.compare(heads, data, step)
        assert figures["slowest_rank"] == slowest
        assert figures["lag_seconds"] == pytest.approx(lag)


def test_a_rank_that_stays_behind_is_warned_of_once_in_a_while():
    detector = StragglerDetector(CPU)
    behind = ([1.0, 1.3], [0.0, 0.1])
    other = ([1.3, 1.0], [0.0, 0.0])
    fine = ([1.1, 1.0], [0.0, 0.0])
    said = [detector.compare(*behind, 2.0)[1] for _ in range(LOGS_IN_A_ROW + 100)]
    assert [number for number, text in enumerate(said, 1) if text] == [5, 55, 105]
    assert "rank 1 is behind" in said[4]
    assert "40 % more" in said[4]
    # Now one, now the other: nobody is consistently behind.
    assert not any(detector.compare(*ranks, 2.0)[1] for ranks in (fine, other, behind) * 10)


# Traces of a cycle


def test_the_profiled_step_is_recorded_by_every_rank(golden):
    folder = golden.folder / "profile_traces"
    assert [path.name for path in folder.iterdir()] == ["iteration_20"]
    for rank in range(2):
        trace = (folder / "iteration_20" / f"rank{rank}_trace.json").read_text()
        # Each of the 2 blocks has 7 linears, and there is the head: 15 products forward, 30
        # backward. 8 sequences in micro-batches of 2 on 2 ranks: twice.
        assert trace.count('"aten::mm"') == 2 * 45


def _profile(folder: Path) -> None:
    """Nine steps, of which each negates as many numbers as it has."""
    config = Profiling(
        enable_profiling=True,
        save_traces_folder=str(folder),
        profile_freq=4,
        profiler_warmup=1,
        profiler_active=3,
    )
    profiler = Profiler(config, 0, CPU)
    profiler.on_start(at_step(0))
    for step in range(1, 10):
        torch.ones(step).neg()
        profiler.on_step_end(at_step(step), ANY)
    profiler.on_end(at_step(9), RunEnd("done", 9))


def test_a_trace_holds_the_active_steps_of_a_cycle_and_no_others(tmp_path):
    _profile(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_4", "iteration_8"]
    trace = json.loads((tmp_path / "iteration_8" / "rank0_trace.json").read_text())
    negations = [event for event in trace["traceEvents"] if event["name"] == "aten::neg"]
    assert [event["args"]["Input Dims"][0] for event in negations] == [[6], [7], [8]]


def test_a_full_disk_costs_the_trace_not_the_run(tmp_path):
    (tmp_path / "traces").write_text("not a folder")
    with listening() as said:
        _profile(tmp_path / "traces")
    assert any(str(tmp_path / "traces") in line for line in said)
