"""Which rank the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import torch
from torch import nn

from titanlite.metrics.throughput import Throughput

#: A warning names a rank that is so far behind the median, in percent, in this many logs in a row.
BEHIND_PERCENT = 20.0
LOGS_IN_A_ROW = 5
#: Logs between two warnings about the same rank.
_LOGS_BETWEEN = 50


class StragglerDetector:
    """Finds the rank that the others wait for, by each rank's own work.

    Step times are equal on all ranks and tell nothing. On a CPU the work is the CPU time of the
    training thread, plus waiting for data. On a GPU it is waiting for data, plus the time of the
    model's head in the latest micro-batch: all ranks multiply the same matrices there.

    head: the module that computes the logits; without one only a GPU rank's data waits are known.
    """

    def __init__(self, device: torch.device, head: nn.Module | None = None) -> None:
        self._cuda = device.type == "cuda"
        self._head = _HeadTimer(head) if self._cuda and head is not None else None
        #: The rank that was far behind in the last log, and in how many logs in a row.
        self._behind: tuple[int | None, int] = None, 0

    def read(self, throughput: Throughput) -> tuple[float, float]:
        """Return this rank's work and data waits, in seconds per step since the last log.

        On a GPU the work is a sample to compare between ranks, and reading it waits for the device.
        """
        work, data = throughput.own_seconds()
        if self._cuda:
            work = self._head.seconds() if self._head else 0.0
        return work, data

    def compare(
        self, work: Sequence[float], data: Sequence[float], seconds_per_step: float
    ) -> tuple[dict[str, float], str]:
        """Compare the readings of all ranks since the last log.

        Return the figures under the keys of metrics.jsonl, none where all are zero, and a warning
        about a rank that was behind in each of the latest logs, or "".
        """
        if self._cuda:
            usual = median_low(work)
            rest = max(seconds_per_step - median_low(data), 0.0)
            samples = work
            work = [rest] * len(samples)
            if usual:
                work = [rest * sample / usual for sample in samples]
        own = [w + d for w, d in zip(work, data, strict=True)]
        middle = median_low(own)
        if not middle:
            return {}, ""
        slowest = own.index(max(own))
        lag = own[slowest] - middle
        percent = 100 * lag / middle
        figures = {
            "slowest_rank": slowest,
            "fastest_rank": own.index(min(own)),
            "lag_seconds": lag,
            "lag_percent": percent,
        }
        before, times = self._behind
        behind = None
        if percent > BEHIND_PERCENT:
            behind = slowest
        times += 1
        if behind != before:
            times = 1
        self._behind = behind, times
        if behind is None or times < LOGS_IN_A_ROW or (times - LOGS_IN_A_ROW) % _LOGS_BETWEEN:
            return figures, ""
        return figures, (
            f"rank {behind} is behind, and the others wait for it: its own work takes "
            f"{own[behind]:.3g} s a step, {percent:.0f} % more than the median rank's, "
            f"{data[behind]:.3g} s of it waiting for data "
            f"({times} logs in a row)"
        )


class _HeadTimer:
    """Measures a module's latest forward pass on the GPU, with the same two events."""

    def __init__(self, module: nn.Module) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._has_run = False
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def seconds(self) -> float:
        if not self._has_run:
            return 0.0
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1000

    def _before(self, *_: object) -> None:
        self._start.record()

    def _after(self, *_: object) -> None:
        self._end.record()
        self._has_run = True
