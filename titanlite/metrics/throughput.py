"""How fast a run is, and what it needs: rates since the last log, peak FLOPS, memory.

Times are the host's, which on a GPU only issues a step. A log waits for the device, so rates are
means over the window between two logs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from titanlite.data.step_sizes import StepSize

_RECENT_STEPS = 50
_GIB = 1024**3


class Reading(NamedTuple):
    """Means over the steps since the last reading."""

    #: Under the keys of metrics.jsonl. tps, tflops: per device. mfu only where the peak is known.
    #: data_*: of this rank.
    figures: dict[str, float]
    #: Number of those steps.
    steps: int
    #: Sequences per second over all devices.
    samples_per_second: float
    #: Median of the last 50 steps' times per token, times the tokens left; None at the first
    #: reading.
    seconds_left: float | None


class Throughput:
    """Measures time between readings; costs a few clock calls per step.

    devices: of the run. flops_per_token: forward and backward, by tokens of a sequence. peak_flops:
    FLOPS of one device, None if unknown.
    """

    def __init__(
        self, devices: int, flops_per_token: Mapping[int, int], peak_flops: float | None
    ) -> None:
        self._devices = devices
        self._flops_per_token = flops_per_token
        self._peak = peak_flops
        self._kind = "work"
        self._since = self._cpu_since = 0.0
        self.start()

    def start(self) -> None:
        """Begin to measure now. The first reading has the slow first step."""
        #: Seconds per token of the latest steps, without those of the first reading.
        self._recent: deque[float] | None = None
        self._begin_window()

    def step_done(self, size: StepSize) -> None:
        self._steps += 1
        self._done_sequences += size.sequences
        self._done_tokens += size.tokens
        self._done_flops += size.tokens * self._flops_per_token[size.seq_len]

    def enter(self, kind: str) -> None:
        """Say what begins: "work" of a step; waiting for "data", a part of the step; or a pause, by
        its name: "validate", "save".

        On a GPU begin a pause after a reading: otherwise it has steps that the device still works
        on.
        """
        now = time.perf_counter()
        cpu = time.thread_time()
        self._seconds[self._kind] += now - self._since
        self._cpu[self._kind] += cpu - self._cpu_since
        self._kind = kind
        self._since = now
        self._cpu_since = cpu

    def own_seconds(self) -> tuple[float, float]:
        """Return this rank's CPU time in steps, and its waiting for data, in seconds per step so
        far.

        The calling thread must be the one that trains. Waiting in a collective takes no CPU time.
        """
        self.enter(self._kind)
        return self._cpu["work"] / self._steps, self._seconds["data"] / self._steps

    def read(self, tokens_left: int) -> Reading:
        """Return the means since the last reading, at least a step ago, and begin a new window.

        tokens_left: of the steps to come.
        """
        self.enter(self._kind)
        steps = self._steps
        data = self._seconds["data"]
        seconds = max(self._seconds["work"] + data, 1e-9)
        per_step = seconds / steps
        tps = self._done_tokens / seconds / self._devices
        tflops = self._done_flops / seconds / self._devices / 1e12
        figures = {"tps": tps, "tflops": tflops}
        if self._peak is not None:
            figures["mfu"] = 100 * tflops * 1e12 / self._peak
        figures |= {
            "seconds_per_step": per_step,
            "data_seconds": data / steps,
            "data_percent": 100 * data / steps / per_step,
        }
        if self._seconds["save"]:
            figures["save_seconds"] = self._seconds["save"]
        if self._recent is None:
            self._recent = deque(maxlen=_RECENT_STEPS)
        else:
            per_token = seconds / self._done_tokens
            self._recent.extend([per_token] * min(steps, _RECENT_STEPS))
        left = None
        if self._recent:
            left = median(self._recent) * tokens_left
        samples = self._done_sequences / seconds
        self._begin_window()
        return Reading(figures, steps, samples, left)

    def _begin_window(self) -> None:
        self._since = time.perf_counter()
        self._cpu_since = time.thread_time()
        self._steps = self._done_sequences = self._done_tokens = self._done_flops = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cpu: defaultdict[str, float] = defaultdict(float)


def device_name(device: torch.device) -> str:
    """Return CUDA's name of the device; `CPU (its model)` for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = _proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    return f"CPU ({model})"


def read_memory(device: torch.device) -> dict[str, float]:
    """Return this rank's memory under the keys of metrics.jsonl, in GiB and percent of
    `total_memory_bytes`.

    memory: peak of live blocks since `reset_peak` (CUDA), or the process's resident memory now
    (CPU). reserved: peak of CUDA's allocator. alloc_retries, ooms: since the start.
    """
    stats: dict[str, int] = {}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        used = {
            "memory": stats.get("active_bytes.all.peak", 0),
            "reserved": stats.get("reserved_bytes.all.peak", 0),
        }
    else:
        kibibytes = _proc_field("/proc/self/status", "VmRSS").partition(" ")[0]
        used = {"memory": int(kibibytes or 0) * 1024}
    total = total_memory_bytes(device)
    found = {f"{name}_gib": size / _GIB for name, size in used.items()}
    found |= {f"{name}_percent": 100 * size / total for name, size in used.items()}
    return found | {
        "alloc_retries": stats.get("num_alloc_retries", 0),
        "ooms": stats.get("num_ooms", 0),
    }


def reset_peak(device: torch.device) -> None:
    """Begin a new peak (CUDA)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def total_memory_bytes(device: torch.device) -> int:
    """Return the memory of the device; for the CPU that of the machine or its container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    return min(physical, int(text)) if text.isdigit() else physical


def _proc_field(path: str, name: str) -> str:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path(path).read_text().splitlines()
    for line in lines:
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""
