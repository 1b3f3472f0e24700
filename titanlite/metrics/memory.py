"""Memory of a rank: the allocator's peaks on CUDA, resident memory on the CPU."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass

import torch

_GIB = 1024**3


@dataclass(frozen=True)
class MemoryReading:
    """Memory in GiB, and in percent of `total_memory_bytes` (None where that is unknown).

    gib: peak of live blocks since `reset_peak` (CUDA), or this process's resident memory now (CPU). reserved: peak of
    what CUDA's allocator held; None on the CPU, which has no such thing. alloc_retries, ooms: since the start.
    """

    gib: float
    percent: float | None
    reserved_gib: float | None = None
    reserved_percent: float | None = None
    alloc_retries: int = 0
    ooms: int = 0


def read_memory(device: torch.device) -> MemoryReading:
    """Memory of this rank on `device`."""
    total = total_memory_bytes(device)
    if device.type != "cuda":
        used = _resident_bytes()
        return MemoryReading(used / _GIB, _percent(used, total))
    stats = torch.cuda.memory_stats(device)
    active = stats.get("active_bytes.all.peak", 0)
    reserved = stats.get("reserved_bytes.all.peak", 0)
    return MemoryReading(
        active / _GIB,
        _percent(active, total),
        reserved / _GIB,
        _percent(reserved, total),
        stats.get("num_alloc_retries", 0),
        stats.get("num_ooms", 0),
    )


def reset_peak(device: torch.device) -> None:
    """Begin a new peak (CUDA)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def total_memory_bytes(device: torch.device) -> int:
    """Memory of the device; for the CPU of the machine, or what its container may use; 0 where nobody says."""
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


def _percent(used: float, total: int) -> float | None:
    return 100 * used / total if total else None


def _resident_bytes() -> int:
    """Resident memory of this process; without /proc (macOS) its peak so far."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
