"""The step and the sequence at which each `[[data.phase]]` begins.

A phase begins with a step, or with the first step after a number of tokens. Its shares of the
sources and its factor of the learning rate begin together. The sequence at which it begins depends
on the steps before. Another global batch, skipped sequences and a rollback all move it. So it is
found again where a run starts or goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titanlite.config.data_sections import DataPhase
from titanlite.data import skip_ranges
from titanlite.data.skip_ranges import Range


class Progress(NamedTuple):
    """The progress of a run: steps done, their tokens over all ranks, and the next sequence."""

    steps: int = 0
    tokens: int = 0
    position: int = 0


#: A run that has not begun.
FRESH = Progress()


@dataclass(frozen=True)
class Phases:
    """The phases of a run.

    first: the shares before any phase, by name of the source. global_batch: sequences per step.
    tokens_per_step: over all ranks. skip: ranges of sequences that are not served.
    """

    phases: Sequence[DataPhase]
    first: Mapping[str, float]
    global_batch: int
    tokens_per_step: int
    skip: tuple[Range, ...] = ()

    def rates(self, done: Progress = FRESH) -> tuple[tuple[int, float], ...]:
        """Return first step and factor of the learning rate of each phase, in order."""
        return tuple((step, phase.lr_factor) for step, phase in self._in_order(done))

    def shares(self, done: Progress = FRESH) -> dict[int, Mapping[str, float]]:
        """Return shares of the sources by the first sequence of them; those of sequence 0 hold at
        `done`.
        """
        found: dict[int, Mapping[str, float]] = {0: self.first}
        for step, phase in self._in_order(done):
            if not phase.weights:
                continue
            if step <= done.steps:
                found[0] = phase.weights
                continue
            ahead = (step - 1 - done.steps) * self.global_batch
            found[skip_ranges.advance(done.position, ahead, self.skip)] = phase.weights
        return found

    def _in_order(self, done: Progress) -> list[tuple[int, DataPhase]]:
        begins = ((self._first_step(phase, done), phase) for phase in self.phases)
        return sorted(begins, key=lambda begin: begin[0])

    def _first_step(self, phase: DataPhase, done: Progress) -> int:
        if phase.step is not None:
            return phase.step
        tokens = phase.tokens or 0
        if tokens >= done.tokens:
            return done.steps + 1 + -(-(tokens - done.tokens) // self.tokens_per_step)
        # It began before: at this step if all steps had as many tokens.
        return min(1 + -(-tokens // self.tokens_per_step), done.steps)
