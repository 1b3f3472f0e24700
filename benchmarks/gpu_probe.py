"""What a device is, or what it reaches, as JSON: a process of its own, since one that used a GPU
keeps memory of it.

    python benchmarks/gpu_probe.py facts
    python benchmarks/gpu_probe.py measure [--toy]

benchmarks/gpu.py calls both.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from titanlite.metrics.throughput import device_name
from titanlite.plan.hardware import peak_flops

GIB = 2**30


def facts() -> dict[str, Any]:
    """Hardware and versions that figures hold for; bytes and FLOP/s."""
    gpu = torch.cuda.is_available()
    name = device_name(torch.device("cuda" if gpu else "cpu"))
    driver = ""
    if gpu:
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
        try:
            found = subprocess.run(query, capture_output=True, text=True)
            driver = (
                found.stdout.strip().splitlines()[0]
                if found.returncode == 0 and found.stdout.strip()
                else ""
            )
        except OSError:
            driver = ""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchao", "triton", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return {
        "device": name,
        "gpu": gpu,
        "memory_bytes": torch.cuda.mem_get_info()[1] if gpu else None,
        "peak_flops": peak_flops(name),
        "driver and power limit": driver,
        "cuda": torch.version.cuda or "none",
        "versions": versions,
    }


def measure(toy: bool) -> list[dict[str, Any]]:
    """Rows: large products, and copies within the device's memory."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    size, copied = (256, 2**20) if toy else (8192, 4 * GIB)

    def median_seconds(work: Callable[[], Any], times: int = 10) -> float:
        found = []
        for turn in range(times + 3):
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            if turn >= 3:
                found.append(time.perf_counter() - began)
        return sorted(found)[len(found) // 2]

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(copied // 4, device=device)
    target = torch.empty_like(source)
    product = 2 * size**3 / median_seconds(lambda: a @ b)
    copy = 2 * source.nbytes / median_seconds(lambda: target.copy_(source))
    return [
        {"what": f"bf16 product of {size} x {size}", "value": product / 1e12, "unit": "TFLOP/s"},
        {
            "what": "copy within the device's memory, read and written",
            "value": copy / 1e9,
            "unit": "GB/s",
        },
    ]


if __name__ == "__main__":
    print(json.dumps(facts() if sys.argv[1] == "facts" else measure("--toy" in sys.argv)))
