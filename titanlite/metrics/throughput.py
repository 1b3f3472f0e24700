"""How fast a run is, and what it needs: rates since the last log, peak FLOPS, memory.

Times are the host's. On a GPU the host only issues a step, so single step times say little. A log reads values from
the device and so waits for it: the window between two logs is right on every device. That is why rates are means over
a window, and why each step enters the estimate of the time left with its window's mean.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

Kind = Literal["work", "data", "pause"]

_KINDS: tuple[Kind, ...] = ("work", "data", "pause")
_RECENT_STEPS = 50
_GIB = 1024**3

#: Peak dense bf16 FLOPS (NVIDIA's data sheets, without sparsity) by a pattern over the CUDA device name, most specific
#: first. Whole words: A100 is neither A10G nor A1000, H200 not GH200. An H100 whose name gives neither its form nor its
#: memory stays unknown: its forms differ by 30 %. The H200's PCIe form has the compute of the H100 NVL.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"A100", 312e12),
    (r"H100[ -]NVL", 835e12),
    (r"H100[ -]PCIe", 756e12),
    (r"H100[ -](?:\d+GB HBM3|SXM\d?)", 989e12),
    (r"H200[ -]NVL", 835e12),
    (r"H200", 989e12),
    (r"B200", 2.25e15),
)
_CPU = "CPU ("


@dataclass(frozen=True)
class Rates:
    """Means over the steps since the last reading."""

    #: Number of those steps.
    steps: int
    #: Tokens per second and device.
    tps: float
    #: Model FLOPs utilisation in percent; None where the peak is unknown.
    mfu: float | None
    #: Sequences per second over all devices.
    samples_per_second: float
    seconds_per_step: float
    #: Seconds per step that this rank waited for data, and their share of the step in percent.
    data_seconds: float
    data_percent: float
    #: Median of the last 50 step times, times the steps left; None until a step after the first was timed.
    seconds_left: float | None


class Throughput:
    """Measures time between readings; costs a few clock calls per step.

    tokens_per_step, sequences_per_step: over all devices. flops_per_token: forward and backward. peak_flops: FLOPS of
    one device, None if unknown. total_steps: the run's last step. clock: seconds.
    """

    def __init__(
        self,
        tokens_per_step: int,
        sequences_per_step: int,
        world_size: int,
        flops_per_token: int,
        peak_flops: float | None,
        total_steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tokens, self._sequences, self._devices = tokens_per_step, sequences_per_step, world_size
        self._flops_per_token, self._peak, self._total_steps = flops_per_token, peak_flops, total_steps
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._kind: Kind = "work"
        self._since = self._cpu_since = 0.0
        self.start()

    def start(self) -> None:
        """Begin to measure now: the next step is the slow first one (compilation, allocation, connections)."""
        self._first_seconds: float | None = None
        self._in_first_window = True
        self._begin_window()

    def step_done(self) -> None:
        """Call after each step."""
        self._steps += 1
        if self._in_first_window and self._steps == 1:
            self._first_seconds = self._elapsed()

    def enter(self, kind: Kind) -> None:
        """Say what begins: work of a step; waiting for data, a part of the step; a pause (validation, saving), which is
        none.

        On a GPU begin a pause after a reading: otherwise it contains the steps that the device still works on.
        """
        now, cpu = self._clock(), time.thread_time()
        self._seconds[self._kind] += now - self._since
        self._cpu[self._kind] += cpu - self._cpu_since
        self._kind, self._since, self._cpu_since = kind, now, cpu

    def own_seconds(self) -> tuple[float, float]:
        """Return this rank's CPU time in steps, and its waiting for data, in seconds per step of the window so far.

        Of the calling thread, which is to be the one that trains. Waiting in a collective takes no CPU time.
        """
        self.enter(self._kind)
        return self._cpu["work"] / max(self._steps, 1), self._seconds["data"] / max(self._steps, 1)

    def read(self, step: int) -> Rates:
        """Return the rates since `start` or the last reading, and begin a new window. step: the last step done.

        Raises ValueError when no step was done since.
        """
        if not self._steps:
            raise ValueError("no step was done since the last reading")
        elapsed = max(self._elapsed(), 1e-9)
        timed, seconds = self._steps, elapsed
        if self._in_first_window and self._first_seconds is not None:
            timed, seconds = timed - 1, elapsed - self._first_seconds
        self._recent.extend([seconds / max(timed, 1)] * min(timed, _RECENT_STEPS))
        per_step = elapsed / self._steps
        tps = self._tokens / per_step / self._devices
        steps_left = max(self._total_steps - step, 0)
        rates = Rates(
            steps=self._steps,
            tps=tps,
            mfu=None if self._peak is None else 100 * tps * self._flops_per_token / self._peak,
            samples_per_second=self._sequences / per_step,
            seconds_per_step=per_step,
            data_seconds=self._seconds["data"] / self._steps,
            data_percent=100 * self._seconds["data"] / elapsed,
            seconds_left=median(self._recent) * steps_left if self._recent else None if steps_left else 0.0,
        )
        self._in_first_window = False
        self._begin_window()
        return rates

    def _begin_window(self) -> None:
        self._since, self._cpu_since = self._clock(), time.thread_time()
        self._steps = 0
        self._seconds: dict[Kind, float] = dict.fromkeys(_KINDS, 0.0)
        self._cpu: dict[Kind, float] = dict.fromkeys(_KINDS, 0.0)

    def _elapsed(self) -> float:
        self.enter(self._kind)
        return self._seconds["work"] + self._seconds["data"]


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOPS of one device by its CUDA name; None when it is not known, as for a MIG slice."""
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((peak for name, peak in _PEAKS if re.search(rf"\b{name}\b", device_name, re.IGNORECASE)), None)


def device_name(device: torch.device) -> str:
    """Return CUDA's name of the device; `CPU (its model)` for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = _proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    return f"{_CPU}{model or 'unknown model'})"


def is_cpu(device_name: str) -> bool:
    """Return whether a name of `device_name` is the CPU's, for which no MFU is given."""
    return device_name.startswith(_CPU)


@dataclass(frozen=True)
class MemoryReading:
    """Memory in GiB, and in percent of `total_memory_bytes` (None where that is unknown).

    gib: peak of live blocks since `reset_peak` (CUDA), or the resident memory of this process now (CPU). reserved: peak
    that CUDA's allocator held; None on the CPU. alloc_retries, ooms: since the start.
    """

    gib: float
    percent: float | None
    reserved_gib: float | None = None
    reserved_percent: float | None = None
    alloc_retries: int = 0
    ooms: int = 0


def read_memory(device: torch.device) -> MemoryReading:
    """Return the memory of this rank on `device`."""
    total = total_memory_bytes(device)

    def share(used: int) -> float | None:
        return 100 * used / total if total else None

    if device.type != "cuda":
        used = _resident_bytes()
        return MemoryReading(used / _GIB, share(used))
    stats = torch.cuda.memory_stats(device)
    active, reserved = (stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("active", "reserved"))
    retries, ooms = stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)
    return MemoryReading(active / _GIB, share(active), reserved / _GIB, share(reserved), retries, ooms)


def reset_peak(device: torch.device) -> None:
    """Begin a new peak (CUDA)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def total_memory_bytes(device: torch.device) -> int:
    """Return the memory of the device; for the CPU that of the machine or its container's limit; 0 where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 without /proc."""
    return int(_proc_field("/proc/self/status", "VmRSS").partition(" ")[0] or 0) * 1024


def _proc_field(path: str, name: str) -> str:
    """Return the first value of that name in a file of /proc; "" where there is none."""
    try:
        with open(path) as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(name)), "")
    except OSError:
        return ""
