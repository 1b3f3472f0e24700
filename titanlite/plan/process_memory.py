"""Memory of this process as the allocator or the system tells it, with the request that failed."""

from __future__ import annotations

import re
import resource

from titanlite.plan.hardware import Gpu, gpu_of_device

_REQUEST = re.compile(r"(?:allocate|allocating) ([\d.]+ (?:bytes|[KMGT]iB))")
_ALLOCATED = re.compile(
    r"memory ([\d.]+ \S+) is allocated by PyTorch, and ([\d.]+ \S+) is reserved"
)
_CAPACITY = re.compile(r"total capacity of ([\d.]+ \S+)")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def memory_figures(error: BaseException, device: str) -> dict[str, float]:
    """Return the bytes that an allocator, or on a CPU the system, gave this process, and those of
    the request.
    """
    text = str(error)
    if device == "cuda":
        figures = _of_allocator(text)
    else:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = {"resident, peak": resident}
    request = _REQUEST.search(text)
    if request:
        figures["request"] = _bytes(request[1])
    return figures


def _of_allocator(text: str) -> dict[str, float]:
    """Return the figures of CUDA's allocator. text: of the error."""
    import torch

    figures: dict[str, float] = {}
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    for name in ("allocated", "reserved"):
        figures[name] = stats.get(f"{name}_bytes.all.current", 0)
        figures[f"{name}, peak"] = stats.get(f"{name}_bytes.all.peak", 0)
    # While the error passes, tensors are freed: its text has the figures of the moment.
    now = _ALLOCATED.search(text)
    if now:
        figures["allocated"] = _bytes(now[1])
        figures["reserved"] = _bytes(now[1]) + _bytes(now[2])
    total = _CAPACITY.search(text)
    if total:
        figures["of the GPU"] = _bytes(total[1])
    elif stats:
        figures["of the GPU"] = torch.cuda.get_device_properties().total_memory
    return figures


def this_gpu(device: str) -> Gpu | None:
    """Return the GPU of this process; None: a CPU, or a GPU that is not known."""
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        return None
    return gpu_of_device(torch.cuda.get_device_name())


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** _UNITS.index(unit)
