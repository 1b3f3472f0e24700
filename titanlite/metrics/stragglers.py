"""Find the rank that the others wait for, by each rank's own work without the time that it waits for others.

Ranks of a synchronous run all take the same time for a step: a rank that is late in one collective makes every other
rank wait there. So step times tell nothing; the time that a rank would take alone does.

On a CPU that is the CPU time of its training thread (waiting in a collective takes none) plus its waiting for data. On
a GPU it is the waiting for data, and the time that the model's head took on the device for the latest micro-batch: all
ranks multiply the same matrices there, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import nn

from titanlite.metrics.throughput import Throughput

#: A rank so far behind the median, in percent, in so many logs in a row is reported in a warning.
BEHIND_PERCENT = 20.0
LOGS_IN_A_ROW = 5
#: Logs between two warnings about the same rank.
_LOGS_BETWEEN = 50


@dataclass(frozen=True)
class RankComparison:
    """The ranks' times over the steps since the last log."""

    slowest: int
    fastest: int
    #: Seconds per step by which the slowest rank's own work exceeds the median rank's, and that in percent.
    lag_seconds: float
    lag_percent: float
    #: Seconds per step of each rank's own work, and of its waiting for data, which is a part of it.
    own: tuple[float, ...]
    data: tuple[float, ...]


class StragglerDetector:
    """Compares the own times of all ranks.

    device: of this rank. head: the module that computes the logits; without one only the data waits of a GPU's rank
    are known.
    """

    def __init__(self, device: torch.device, head: nn.Module | None = None) -> None:
        self._cuda = device.type == "cuda"
        self._head = _HeadTimer(head) if self._cuda and head is not None else None
        self._last: int | None = None
        self._times = 0

    def read(self, throughput: Throughput) -> tuple[float, float]:
        """Return this rank's work and data waits, in seconds per step since the last log.

        On a GPU the work is a sample to compare with those of other ranks, and reading it waits for the device.
        """
        work, data = throughput.own_seconds()
        if self._cuda:
            work = self._head.seconds() if self._head else 0.0
        return work, data

    def compare(self, work: Sequence[float], data: Sequence[float], seconds_per_step: float) -> RankComparison | None:
        """Compare the readings of all ranks; None for a rank alone, or where all readings are zero."""
        if len(work) < 2:
            return None
        if self._cuda:
            usual = median_low(work)
            rest = max(seconds_per_step - median_low(data), 0.0)
            work = [rest * sample / usual if usual else rest for sample in work]
        own = [w + d for w, d in zip(work, data, strict=True)]
        middle = median_low(own)
        if not middle:
            return None
        slowest = own.index(max(own))
        lag = own[slowest] - middle
        return RankComparison(slowest, own.index(min(own)), lag, 100 * lag / middle, tuple(own), tuple(data))

    def warning(self, ranks: RankComparison) -> str | None:
        """Return a warning about a rank that was behind in each of the latest logs. Call it with each log."""
        behind = ranks.slowest if ranks.lag_percent > BEHIND_PERCENT else None
        self._times = self._times + 1 if behind == self._last else 1
        self._last = behind
        if behind is None or self._times < LOGS_IN_A_ROW or (self._times - LOGS_IN_A_ROW) % _LOGS_BETWEEN:
            return None
        return (
            f"rank {behind} is behind, and the others wait for it: its own work takes {ranks.own[behind]:.3g} s a "
            f"step, {ranks.lag_percent:.0f} % more than the median rank's, {ranks.data[behind]:.3g} s of it waiting "
            f"for data ({self._times} logs in a row)"
        )

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self._head:
            self._head.remove()


class _HeadTimer:
    """Measures the latest forward pass of one module on the GPU, with two events that are recorded again each time."""

    def __init__(self, module: nn.Module) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._has_run = False
        self._handles = (module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after))

    def seconds(self) -> float:
        if not self._has_run:
            return 0.0
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1000

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, *_: object) -> None:
        self._start.record()

    def _after(self, *_: object) -> None:
        self._end.record()
        self._has_run = True
