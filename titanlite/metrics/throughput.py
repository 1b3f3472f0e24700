"""How fast a run is: rates since the last log, and the time left.

Times are the host's. On a GPU the host only issues a step, so single step times say little; a log reads figures from
the device and so waits for it, which makes the window between two logs right on every device. That is why rates are
means over a window, and why each step enters the estimate of the time left with its window's mean.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

_RECENT_STEPS = 50


@dataclass(frozen=True)
class Rates:
    """Means over the steps since the last reading."""

    #: How many steps those were.
    steps: int
    #: Tokens per second and device.
    tps: float
    #: Model FLOPs utilisation in percent; None where the peak is unknown.
    mfu: float | None
    #: Sequences per second over all devices.
    samples_per_second: float
    seconds_per_step: float
    #: Seconds per step that this rank waited for data, and their share of the step in percent.
    data_seconds: float
    data_percent: float
    #: Median of the last 50 step times times the steps left; None until a step after the first was timed.
    seconds_left: float | None


class Meter:
    """Keeps time between readings; costs a few clock calls per step.

    tokens_per_step, sequences_per_step: over all devices. flops_per_token: forward and backward. peak_flops: FLOPS of
    one device, None if unknown. total_steps: the run's last step. clock: seconds.
    """

    def __init__(
        self,
        tokens_per_step: int,
        sequences_per_step: int,
        world_size: int,
        flops_per_token: int,
        peak_flops: float | None,
        total_steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tokens, self._sequences, self._devices = tokens_per_step, sequences_per_step, world_size
        self._flops_per_token, self._peak, self._total_steps = flops_per_token, peak_flops, total_steps
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._pauses_open = 0
        self.start()

    def start(self) -> None:
        """Begin to measure now: the next step is the slow first one (compilation, allocation, connections)."""
        self._first_seconds: float | None = None
        self._first_in_window = True
        self._begin_window()

    def step_done(self) -> None:
        """Call after each step."""
        self._steps += 1
        if self._first_in_window and self._steps == 1:
            self._first_seconds = self._elapsed()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Time inside is waiting for data; it counts into the step."""
        began = self._clock()
        try:
            yield
        finally:
            if not self._pauses_open:
                self._waited += self._clock() - began

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside (validation, saving) is no part of a step. May be nested.

        On a GPU begin it after a reading, or the steps still under way there are paid for inside.
        """
        began = self._clock()
        self._pauses_open += 1
        try:
            yield
        finally:
            self._pauses_open -= 1
            if not self._pauses_open:
                self._paused += self._clock() - began

    def read(self, step: int) -> Rates:
        """Rates since `start` or the last reading; `step` is the last step done. Begins a new window.

        Raises ValueError when no step was done since.
        """
        if not self._steps:
            raise ValueError("no step was done since the last reading")
        elapsed = max(self._elapsed(), 1e-9)
        self._remember(elapsed)
        per_step = elapsed / self._steps
        tps = self._tokens / per_step / self._devices
        rates = Rates(
            steps=self._steps,
            tps=tps,
            mfu=None if self._peak is None else 100 * tps * self._flops_per_token / self._peak,
            samples_per_second=self._sequences / per_step,
            seconds_per_step=per_step,
            data_seconds=self._waited / self._steps,
            data_percent=100 * self._waited / elapsed,
            seconds_left=self._left(max(self._total_steps - step, 0)),
        )
        self._first_in_window = False
        self._begin_window()
        return rates

    def _begin_window(self) -> None:
        self._began = self._clock()
        self._steps = 0
        self._waited = 0.0
        self._paused = 0.0

    def _elapsed(self) -> float:
        return self._clock() - self._began - self._paused

    def _remember(self, elapsed: float) -> None:
        steps = self._steps
        if self._first_in_window and self._first_seconds is not None:
            steps, elapsed = steps - 1, elapsed - self._first_seconds
        if steps:
            self._recent.extend([elapsed / steps] * min(steps, _RECENT_STEPS))

    def _left(self, steps: int) -> float | None:
        if not steps:
            return 0.0
        return median(self._recent) * steps if self._recent else None
