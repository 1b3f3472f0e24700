"""Rates, peaks of devices and memory."""

from __future__ import annotations

import time

import pytest
import torch

from tests.metrics.runs import burn
from titanlite.metrics.throughput import (
    Throughput,
    device_name,
    is_cpu,
    peak_flops,
    read_memory,
    reset_peak,
    total_memory_bytes,
)

CPU = torch.device("cpu")
EXPECTED_PEAKS = [
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA A100-PCIE-40GB", 312e12),
    ("NVIDIA A100 80GB PCIe", 312e12),
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA B200", 2.25e15),
    ("NVIDIA A10G", None),
    ("NVIDIA A10", None),
    ("NVIDIA RTX A1000", None),
    ("NVIDIA GH200 480GB", None),
    ("NVIDIA GB200", None),
    ("NVIDIA H800", None),
    ("NVIDIA H20", None),
    ("NVIDIA H100", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("NVIDIA L40S", None),
    ("AMD Instinct MI300X", None),
]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_throughput(
    peak: float | None = 989e12, world_size: int = 1, total_steps: int = 100
) -> tuple[Clock, Throughput]:
    clock = Clock()
    rate = Throughput(8192, 4, world_size, 58_000_000_000, peak, total_steps, clock)
    clock.now += 1000  # building takes its time; nothing of it may be counted
    rate.start()
    return clock, rate


def _wait_for_data(clock: Clock, rate: Throughput, seconds: float) -> None:
    rate.enter("data")
    clock.now += seconds
    rate.enter("work")


def test_rates_count_data_waits_and_leave_pauses_out() -> None:
    clock, rate = make_throughput(world_size=2)
    for _ in range(4):
        _wait_for_data(clock, rate, 0.5)
        clock.now += 1.5
        rate.step_done()
    rate.enter("pause")
    clock.now += 30
    rates = rate.read(4)
    assert rates.seconds_per_step == pytest.approx(2.0)
    assert rates.tps == pytest.approx(2048)
    assert rates.samples_per_second == pytest.approx(2.0)
    assert rates.data_seconds == pytest.approx(0.5) and rates.data_percent == pytest.approx(25)
    assert rates.mfu == pytest.approx(100 * 2048 * 58e9 / 989e12)
    assert rates.seconds_left == pytest.approx(96 * 2.0)


def test_a_reading_begins_a_new_window() -> None:
    clock, rate = make_throughput()
    for step, seconds in enumerate([8.0, 2.0, 4.0], start=1):
        _wait_for_data(clock, rate, seconds / 4)
        clock.now += seconds * 3 / 4
        rate.step_done()
        rates = rate.read(step)
        assert rates.tps == pytest.approx(8192 / seconds)
        assert rates.data_seconds == pytest.approx(seconds / 4)


def test_neither_the_first_nor_a_single_slow_step_enters_the_time_left() -> None:
    clock, rate = make_throughput(peak=None)
    clock.now += 60
    rate.step_done()
    first = rate.read(1)
    assert first.mfu is None and first.seconds_left is None
    for step, seconds in ((2, 1.0), (3, 1.0), (4, 9.0), (5, 1.0)):
        clock.now += seconds
        rate.step_done()
        assert rate.read(step).seconds_left == pytest.approx(100 - step)
    clock, rate = make_throughput()  # a longer first window
    for seconds in (60.0, 2.0, 2.0):
        clock.now += seconds
        rate.step_done()
    rates = rate.read(3)
    assert rates.seconds_per_step == pytest.approx(64 / 3) and rates.seconds_left == pytest.approx(97 * 2.0)


def test_nothing_is_left_at_the_end_and_a_reading_needs_a_step() -> None:
    clock, rate = make_throughput(total_steps=1)
    with pytest.raises(ValueError, match="no step"):
        rate.read(0)
    clock.now += 5
    rate.step_done()
    assert rate.read(1).seconds_left == 0.0


@pytest.mark.parametrize(("name", "peak"), EXPECTED_PEAKS)
def test_peaks_belong_to_exactly_these_devices(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_the_cpu_has_a_name_and_no_peak() -> None:
    name = device_name(CPU)
    assert is_cpu(name) and len(name) > len("CPU ()") and peak_flops(name) is None
    assert not is_cpu("NVIDIA H200")


def test_cpu_memory_is_what_is_resident_and_grows_with_what_is_allocated() -> None:
    reset_peak(CPU)
    before = read_memory(CPU)
    block = torch.ones(200 * 2**20, dtype=torch.uint8)
    after = read_memory(CPU)
    assert (after.gib - before.gib) * 1024 == pytest.approx(200, abs=20)
    total = total_memory_bytes(CPU)
    assert 0.05 < before.gib < total / 2**30
    assert after.percent == pytest.approx(100 * after.gib * 2**30 / total)
    assert (after.reserved_gib, after.reserved_percent, after.alloc_retries, after.ooms) == (None, None, 0, 0)
    del block


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_memory_is_the_peak_since_the_last_reset() -> None:
    device = torch.device("cuda", 0)
    block = torch.ones(2**30, dtype=torch.uint8, device=device)
    del block
    peak = read_memory(device)
    assert peak.gib >= 1.0 and peak.reserved_gib is not None and peak.reserved_gib >= peak.gib
    assert peak.percent == pytest.approx(100 * peak.gib * 2**30 / total_memory_bytes(device))
    reset_peak(device)
    after = read_memory(device)
    assert after.gib < 0.1 and after.reserved_gib is not None and after.reserved_gib >= 1.0
    assert not is_cpu(device_name(device))


def test_only_ones_own_work_in_steps_is_read() -> None:
    clock, rate = make_throughput()
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
        rate.step_done()
    work, data = rate.own_seconds()
    assert 0.05 <= work < 0.15, "neither data nor pauses nor waiting count as work, and it is per step"
    assert data == pytest.approx(0.05)
    rate.read(2)
    work, data = rate.own_seconds()
    assert work < 0.05 and data == 0, "a reading begins a new window"
