"""Find the rank that the others wait for, by each rank's own work without the time that it waits for others.

Ranks of a synchronous run all take the same time for a step: a rank that is late in one collective makes every other
rank wait there. So step times tell nothing; the time that a rank would take alone does.

On a CPU that is the CPU time of its training thread (waiting in a collective takes none) plus its waiting for data. On
a GPU only the waiting for data tells: the host's time says nothing of the device's, and every kernel waits for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch

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
    """Compares the own times of all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last: int | None = None
        self._times = 0

    def compare(self, work: Sequence[float], data: Sequence[float], seconds_per_step: float) -> RankComparison | None:
        """Compare `Throughput.own_seconds` of all ranks; None for a rank alone, or where all of them are zero."""
        if len(work) < 2:
            return None
        if self._cuda:
            work = [max(seconds_per_step - median_low(data), 0.0)] * len(work)
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
