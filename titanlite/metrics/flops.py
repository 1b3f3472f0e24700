"""Peak dense bf16 FLOPS of known devices (NVIDIA's data sheets, without sparsity)."""

from __future__ import annotations

import platform
import re

import torch

#: Patterns over a CUDA device name, most particular first. Whole words: A100 is neither A10G nor A1000, H200 not GH200.
#: An H100 that says neither its form nor its memory stays unknown: its forms differ by 30 %.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"A100", 312e12),
    (r"H100[ -]NVL", 835e12),
    (r"H100[ -]PCIe", 756e12),
    (r"H100[ -](?:\d+GB HBM3|SXM\d?)", 989e12),
    # The H200's PCIe form has the compute of the H100 NVL.
    (r"H200[ -]NVL", 835e12),
    (r"H200", 989e12),
    (r"B200", 2.25e15),
)
_CPU = "CPU ("


def peak_flops(device_name: str) -> float | None:
    """Peak FLOPS of one device by its CUDA name; None when it is not known, as for a MIG slice."""
    if re.search(r"\bMIG\b", device_name):
        return None
    for pattern, peak in _PEAKS:
        if re.search(rf"\b{pattern}\b", device_name, re.IGNORECASE):
            return peak
    return None


def device_name(device: torch.device) -> str:
    """CUDA's name of the device; `CPU (its model)` for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_CPU}{_cpu_model()})"


def is_cpu(device_name: str) -> bool:
    """Whether `device_name` made this name for the CPU, for which no MFU is stated."""
    return device_name.startswith(_CPU)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown model"
