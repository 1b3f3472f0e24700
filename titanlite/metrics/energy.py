"""Energy that the GPUs of a run use, by NVML's counters (the package nvidia-ml-py)."""

from __future__ import annotations

import torch


class EnergyMeter:
    """Measures the energy of as many GPUs as ranks, as if all used what this machine's use."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._began = self._joules()

    def figures(self) -> dict[str, float]:
        """Return {"joules": …}; {}: NVML does not tell."""
        now = self._joules()
        return {} if now is None or self._began is None else {"joules": now - self._began}

    def _joules(self) -> float | None:
        try:
            import pynvml

            count = torch.cuda.device_count()
            handles = [torch.cuda._get_pynvml_handler(index) for index in range(count)]
            used = sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles)
            return used / 1000 * self._ranks / count
        # The package is missing, or the driver or the GPU has no counters.
        except Exception:
            return None
