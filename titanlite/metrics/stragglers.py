"""Which rank the others wait for: each rank's own work, without the time that it waits for others.

Ranks of a synchronous run all take the same time for a step, and a rank that is late in one collective makes every
other wait there. So step times tell nothing; what tells is how long a rank would take alone.

On a CPU that is the time its training thread ran or stood in line for a core (Linux keeps both; waiting in a collective
is neither), and its waiting for data. On a GPU it is the waiting for data, and the time the model's head took on the
device for the latest micro-batch: all ranks multiply the same matrices there, and nothing is communicated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import torch
from torch import nn

#: A rank this far behind the median, in percent, in so many logs in a row, is worth a warning.
BEHIND_PERCENT = 20.0
LOGS_IN_A_ROW = 5
#: Logs between two warnings about the same rank.
_LOGS_BETWEEN = 50


@dataclass(frozen=True)
class RankFigures:
    """Ranks compared, over the steps since the last log."""

    slowest: int
    fastest: int
    #: Seconds per step that the slowest rank's own work takes longer than the median rank's, and that in percent.
    lag_seconds: float
    lag_percent: float
    #: Seconds per step of each rank's own work, and of its waiting for data within it.
    own: tuple[float, ...]
    data: tuple[float, ...]


def thread_seconds() -> float:
    """Seconds that the calling thread has run or waited for a core; where Linux does not tell, that it has run."""
    try:
        ran, queued = map(int, Path("/proc/thread-self/schedstat").read_text().split()[:2])
    except (OSError, ValueError):
        return time.thread_time()
    return (ran + queued) / 1e9 if ran else time.thread_time()


class RankWatch:
    """Keeps this rank's own times between logs. Costs two clock calls and two reads of /proc per step.

    device: of this rank. model: with its head as `output`; without one a GPU is only watched for its data.
    """

    def __init__(self, device: torch.device, model: nn.Module | None = None) -> None:
        self._cuda = device.type == "cuda"
        head = getattr(model, "output", None)
        self._head = _HeadTimer(head) if self._cuda and isinstance(head, nn.Module) else None
        self._paused = False
        self._last: int | None = None
        self._times = 0
        self._begin()

    def step_done(self) -> None:
        """Call after each step."""
        self._steps += 1

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """What happens inside is waiting for data, all of it."""
        began, worked = time.perf_counter(), self._thread()
        try:
            yield
        finally:
            if not self._paused:
                self._data += time.perf_counter() - began
                self._left_out += self._thread() - worked

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside is no part of a step. May be nested."""
        outer, self._paused = self._paused, True
        worked = self._thread()
        try:
            yield
        finally:
            self._paused = outer
            if not outer:
                self._left_out += self._thread() - worked

    def read(self) -> tuple[float, float]:
        """This rank's work and its waiting for data, in seconds per step since the last reading; begins a new window.

        On a GPU the work is a sample to compare with those of other ranks, and reading it waits for the device.
        """
        steps = max(self._steps, 1)
        work = self._head.seconds() if self._head else (self._thread() - self._began - self._left_out) / steps
        data = self._data / steps
        self._begin()
        return max(work, 0.0), data

    def compare(self, work: Sequence[float], data: Sequence[float], seconds_per_step: float) -> RankFigures | None:
        """The ranks' readings compared; None for a rank alone, or where there is nothing to compare."""
        if len(work) < 2:
            return None
        if self._cuda:
            usual = median_low(work)
            rest = max(seconds_per_step - median_low(data), 0.0)
            work = [rest * sample / usual if usual else 0.0 for sample in work]
        own = [w + d for w, d in zip(work, data, strict=True)]
        middle = median_low(own)
        if not middle:
            return None
        slowest = own.index(max(own))
        lag = own[slowest] - middle
        return RankFigures(slowest, own.index(min(own)), lag, 100 * lag / middle, tuple(own), tuple(data))

    def warning(self, figures: RankFigures) -> str | None:
        """What to tell of the rank that has been behind in every one of the latest logs; call it with each log."""
        behind = figures.slowest if figures.lag_percent > BEHIND_PERCENT else None
        self._times = self._times + 1 if behind == self._last else 1
        self._last = behind
        if behind is None or (self._times - LOGS_IN_A_ROW) % _LOGS_BETWEEN or self._times < LOGS_IN_A_ROW:
            return None
        own, data = figures.own[behind], figures.data[behind]
        return (
            f"rank {behind} is behind, and the others wait for it: its own work takes {own:.3g} s a step, "
            f"{figures.lag_percent:.0f} % more than the median rank's, {data:.3g} s of it waiting for data "
            f"({self._times} logs in a row)"
        )

    def close(self) -> None:
        if self._head:
            self._head.remove()

    def _thread(self) -> float:
        return 0.0 if self._cuda else thread_seconds()

    def _begin(self) -> None:
        self._began = self._thread()
        self._left_out = self._data = 0.0
        self._steps = 0


class _HeadTimer:
    """Time on the GPU of the latest forward pass of one module. Two events, recorded anew each time."""

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
