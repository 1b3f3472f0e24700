"""The course of a run: sequences and tokens of each step, which phases may change.

A leg is a stretch of steps of one size. Most runs have one. The course that a config gives begins
with step 1. After a resume or a rollback it begins with the next step, at its place in the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Progress(NamedTuple):
    """The progress of a run: steps done, tokens over all ranks, and the next row."""

    steps: int = 0
    tokens: int = 0
    position: int = 0


#: A run that has not begun.
FRESH = Progress()


class StepSize(NamedTuple):
    """The size of a step over all ranks, with sequences of `seq_len` tokens each.

    `rows` counts those of the data order, as long as the run's longest sequence.
    """

    sequences: int
    seq_len: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len


class Leg(NamedTuple):
    """Steps of one size, and the progress before the first of them."""

    done: Progress
    size: StepSize


@dataclass(frozen=True)
class Course:
    """The legs of a run, in order; no two begin with the same step."""

    legs: tuple[Leg, ...]

    @classmethod
    def steady(cls, size: StepSize, done: Progress = FRESH) -> Course:
        return cls((Leg(done, size),))

    def leg(self, step: int) -> Leg:
        """Return the leg of a step; the first one for steps before it."""
        return self._last(lambda leg: leg.done.steps < step)

    def _last(self, has_begun: Callable[[Leg], bool]) -> Leg:
        return [self.legs[0], *filter(has_begun, self.legs)][-1]

    def size(self, step: int) -> StepSize:
        return self.leg(step).size

    def tokens_after(self, step: int) -> int:
        leg = self.leg(step)
        return leg.done.tokens + (step - leg.done.steps) * leg.size.tokens

    def position_after(self, step: int) -> int:
        """Return the row after those of a step, if none is skipped."""
        leg = self.leg(step)
        return leg.done.position + (step - leg.done.steps) * leg.size.rows

    def size_at(self, position: int) -> StepSize:
        """Return the size of the step that begins at row `position`."""
        return self._last(lambda leg: leg.done.position <= position).size

    def steps_with_tokens(self, tokens: int) -> int:
        return self._fewest(tokens, lambda leg: leg.done.tokens, lambda leg: leg.size.tokens)

    def steps_with_rows(self, rows: int) -> int:
        """Return the fewest steps with so many rows, if none is skipped."""
        return self._fewest(rows, lambda leg: leg.done.position, lambda leg: leg.size.rows)

    def _fewest(self, wanted: int, before: Callable[[Leg], int], each: Callable[[Leg], int]) -> int:
        found = self._last(lambda leg: before(leg) < wanted)
        return found.done.steps + -(-(wanted - before(found)) // each(found))
