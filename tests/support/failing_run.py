"""A run whose nodes fail, followed event by event: the oracle of `titanlite.plan.goodput`.

It knows no formula. A clock goes from event to event: a save begins, it stops holding the steps, it
is complete, the job fails. It has progress and the saves that are complete, as a real run has.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where saves go. interval: seconds of training. survives: share of failures that leave it as
    the newest tier.
    """

    interval: float
    visible: float
    hidden: float
    slowdown: float
    survives: float


@dataclass
class _Writing:
    """A save in the background."""

    progress: float
    left: float


@dataclass
class FailingRun:
    """Runs until so many failures have struck; the last begins no new restart.

    places: the most frequent first. A failure of one takes the newer ones with it.
    """

    places: list[Place]
    mean: float
    pause: float
    seed: int = 0
    clock: float = 0.0
    progress: float = 0.0
    paused: float = 0.0
    failures: int = 0
    #: Progress of the newest complete save of each place, and of the next one to begin.
    kept: list[float] = field(default_factory=list)
    due: list[float] = field(default_factory=list)
    writing: list[_Writing | None] = field(default_factory=list)

    def run(self, most: int) -> float:
        """Return the share of the time that went into progress that is kept."""
        self.random = random.Random(self.seed)
        self.fails_at = self.random.expovariate(1 / self.mean)
        self.kept = [0.0 for _ in self.places]
        self._resume(0.0)
        while self.failures < most:
            self._until_next_event()
        return self.progress / self.clock

    def _resume(self, progress: float) -> None:
        self.progress = progress
        self.due = [
            (math.floor(progress / place.interval + 1e-6) + 1) * place.interval
            for place in self.places
        ]
        self.writing = [None for _ in self.places]

    def _pass(self, seconds: float, speed: float) -> bool:
        """Let time go by; return whether the job failed in it."""
        lived = min(seconds, self.fails_at - self.clock)
        self.clock += lived
        self.progress += speed * lived
        for place, one in enumerate(self.writing):
            if one is None:
                continue
            one.left -= lived
            if one.left <= 1e-6:
                self.kept[place] = one.progress
                self.writing[place] = None
        return lived < seconds

    def _until_next_event(self) -> None:
        slowdown = 1.0
        for place, one in zip(self.places, self.writing, strict=True):
            if one is not None:
                slowdown = max(slowdown, place.slowdown)
        ends = [one.left for one in self.writing if one is not None]
        begins = [(due - self.progress) * slowdown for due in self.due]
        if self._pass(max(min(ends + begins), 0.0), 1 / slowdown):
            self._fail()
            return
        for place in range(len(self.places)):
            if self.due[place] - self.progress <= 1e-6 and self._save(place):
                self._fail()
                return

    def _save(self, number: int) -> bool:
        """Begin a save, and stand still as long as it holds the steps. True: the job failed."""
        place = self.places[number]
        before = self.writing[number]
        if before is not None and self._pass(before.left, 0.0):
            return True
        began = self.progress
        self.due[number] += place.interval
        if self._pass(place.visible, 0.0):
            return True
        if place.hidden:
            self.writing[number] = _Writing(began, place.hidden)
        else:
            self.kept[number] = began
        return False

    def _fail(self) -> None:
        """Fail, perhaps again and again before the first step, and resume from what is left."""
        while True:
            self.failures += 1
            drawn = self.random.random()
            left = 0
            while left + 1 < len(self.places) and drawn >= self.places[left].survives:
                drawn -= self.places[left].survives
                left += 1
            newest = max(self.kept[left:])
            for lost in range(left):
                self.kept[lost] = newest
            self.fails_at = self.clock + self.random.expovariate(1 / self.mean)
            lived = min(self.pause, self.fails_at - self.clock)
            self.clock += lived
            self.paused += lived
            if lived == self.pause:
                break
        # A process failure resumes from whatever is newest.
        self._resume(max(self.kept))
