"""The share of useful time of a run whose nodes fail, and the best intervals of its saves.

Failures are exponential: each second is as dangerous as any other. A failure ends all ranks. After
it the run goes on from the newest checkpoint that survived. Times are seconds. No torch here.

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval",
doi:10.1145/361147.361115. Daly 2006, "A higher order estimate of the optimum checkpoint interval
for restart dumps", doi:10.1016/j.future.2004.11.016. FORMULAS.md derives what they do not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: A larger exponent overflows: the run would never end.
_MOST_EXPONENT = 700.0
#: Steps of the search for the best interval: each leaves 0.618 of the range.
_GOLDEN_STEPS = 60
#: Rounds over all tiers: the best interval of one depends little on those of others.
_ROUNDS = 4
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Save:
    """What one save of a tier costs."""

    #: Seconds in which no step goes on.
    visible: float
    #: Seconds after these in which it is written beside steps.
    hidden: float = 0.0
    #: Steps meanwhile take this many times as long; at least 1.
    slowdown: float = 1.0

    @property
    def seconds(self) -> float:
        """From its begin until a restart can use it."""
        return self.visible + self.hidden

    @property
    def cost(self) -> float:
        """Seconds that it adds to the run."""
        return self.visible + self.hidden - self.meanwhile

    @property
    def meanwhile(self) -> float:
        """Seconds of training, at full speed, that are done while it is written."""
        return self.hidden / self.slowdown


@dataclass(frozen=True)
class Tier:
    """A place that saves go to."""

    name: str
    save: Save
    #: Share of all failures after which this is the newest tier that is left. Local saves are left
    #: where the node is. The sum over all tiers is 1.
    share: float = 1.0


@dataclass(frozen=True)
class Failures:
    """How often a job fails, and what a failure takes."""

    #: Mean seconds between two failures of the whole job.
    mean: float
    #: From a failure until it is noticed, and from then until the first step after it.
    notice: float
    restart: float

    @property
    def pause(self) -> float:
        """Seconds from a failure to the first step after it."""
        return self.notice + self.restart

    @property
    def paused(self) -> float:
        """Share of all time that these pauses take, with failures in a pause."""
        return -math.expm1(-self.pause / self.mean)


@dataclass(frozen=True)
class Shares:
    """Where the time goes; the sum is 1."""

    #: Steps that are kept.
    useful: float
    #: Saves of those steps.
    saves: float
    #: From failures to the first steps after them.
    restarts: float
    #: Steps and saves that are done again.
    lost: float

    @property
    def in_steps(self) -> float:
        """Share of steps in the lost time: the same as in the useful time."""
        return self.useful / (self.useful + self.saves)


def young(cost: float, mean: float) -> float:
    """Return the best interval to first order: seconds of training between two saves.

    cost: seconds of a save. mean: between failures that need it.
    """
    return math.sqrt(2 * cost * mean)


def daly(cost: float, mean: float) -> float:
    """Return the best interval by the higher order estimate (Daly 2006, equation 37)."""
    if cost >= 2 * mean:
        return mean
    ratio = cost / (2 * mean)
    return young(cost, mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def useful_share(tiers: Sequence[Tier], intervals: Sequence[float], failures: Failures) -> float:
    """Return the expected share of time in steps that are kept.

    intervals: seconds of training between two saves of each tier, as tiers are ordered: the most
    frequent first.

    It is exact for one tier. With several, a period of an outer tier counts with the mean of its
    length.
    """
    kept = intervals[-1]
    wall = _expected(tiers, intervals, failures)
    return kept / wall if wall > 0 else 0.0


def _expected(tiers: Sequence[Tier], intervals: Sequence[float], failures: Failures) -> float:
    """Return the expected seconds from one save of the last tier to the next; inf: no end."""
    overhead = _overhead(tiers, intervals)
    # Seconds for each second of a period without failures.
    inflation = 1.0
    again = failures.mean * math.expm1(min(failures.pause / failures.mean, _MOST_EXPONENT))
    for tier, interval in zip(tiers, intervals, strict=True):
        period = _period(tier.save, interval, overhead)
        if not tier.share:
            continue
        mean = failures.mean / tier.share
        exponent = period * inflation / mean
        behind = min(tier.save.meanwhile, interval) / mean
        if exponent + behind > _MOST_EXPONENT:
            return math.inf
        wall = (mean + again) * math.exp(behind) * math.expm1(exponent)
        inflation = wall / period
    return inflation * _period(tiers[-1].save, intervals[-1], overhead)


def _overhead(tiers: Sequence[Tier], intervals: Sequence[float]) -> float:
    """Return the seconds that saves add to each second of training."""
    pairs = zip(tiers, intervals, strict=True)
    return sum(tier.save.cost / interval for tier, interval in pairs)


def _period(save: Save, interval: float, overhead: float) -> float:
    """Return the seconds between two saves without a failure. A save waits for the one before."""
    return max(interval * (1 + overhead), save.seconds)


def shares(tiers: Sequence[Tier], intervals: Sequence[float], failures: Failures) -> Shares:
    """Return where the time goes. The arguments are those of `useful_share`."""
    useful = useful_share(tiers, intervals, failures)
    overhead = _overhead(tiers, intervals)
    waits = _period(tiers[-1].save, intervals[-1], overhead) / intervals[-1] - 1
    saves = useful * max(overhead, waits)
    restarts = failures.paused
    return Shares(useful, saves, restarts, max(1 - useful - saves - restarts, 0.0))


def best_intervals(tiers: Sequence[Tier], failures: Failures, least: float) -> list[float]:
    """Return the intervals with the largest share of useful time.

    least: the shortest that can be had, one step. No save begins before the one before is done.
    """
    found: list[float] = []
    for tier in tiers:
        mean = failures.mean / tier.share if tier.share else failures.mean
        found.append(max(daly(tier.save.cost, mean), tier.save.seconds, least))
    for _ in range(_ROUNDS if len(tiers) > 1 else 1):
        for place, tier in enumerate(tiers):

            def share(interval: float, place: int = place) -> float:
                tried = [*found]
                tried[place] = interval
                return useful_share(tiers, tried, failures)

            low = max(tier.save.seconds, least)
            high = max(20 * found[place], 2 * low)
            if place + 1 < len(tiers):
                # A tier that is saved to less often than the next one is never the newest.
                high = max(min(high, found[place + 1]), low)
            found[place] = _largest(share, low, high)
    return found


def _largest(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one peak is largest, by golden sections of the logarithm."""
    left = math.log(low)
    right = math.log(high)
    for _ in range(_GOLDEN_STEPS):
        width = _GOLDEN * (right - left)
        if function(math.exp(right - width)) >= function(math.exp(left + width)):
            right = left + width
        else:
            left = right - width
    middle = math.exp((left + right) / 2)
    # At an end of the range the middle never quite reaches it.
    return max((low, middle, high), key=function)


def share_without_saves(length: float, failures: Failures) -> float:
    """Return the share of useful time of a run that begins anew after each failure.

    length: seconds of all its steps.
    """
    exponent = (length + failures.pause) / failures.mean
    if exponent > _MOST_EXPONENT:
        return 0.0
    whole = math.expm1(length / failures.mean) * math.exp(failures.pause / failures.mean)
    return length / (failures.mean * whole)
