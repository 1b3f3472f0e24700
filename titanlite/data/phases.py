"""Keys that change with each `[[data.phase]]`, and the step at which it begins.

A phase begins with a step, or with the first step after a number of tokens. All that it changes
begins together. The sequence at which it begins depends on the steps before. Another global batch,
skipped sequences and a rollback all move it. So it is found again where a run starts or goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from titanlite.config.data_sections import DataPhase
from titanlite.config.urls import public_name
from titanlite.data import skip_ranges
from titanlite.data.skip_ranges import Range
from titanlite.data.step_sizes import FRESH, Course, Leg, Progress, StepSize


class _Begin(NamedTuple):
    step: int
    phase: DataPhase
    done: Progress
    size: StepSize


@dataclass(frozen=True)
class Phases:
    """The phases of a run.

    `first` has the shares before any phase by source. `global_batch` and `tokens_per_step` hold
    before any phase, over all ranks; `skip` is not served.
    """

    phases: Sequence[DataPhase]
    first: Mapping[str, float]
    global_batch: int
    tokens_per_step: int
    skip: tuple[Range, ...] = ()

    def rates(self, done: Progress = FRESH) -> tuple[tuple[int, float], ...]:
        """Return first step and learning rate factor of each phase."""
        return tuple((begin.step, begin.phase.lr_factor) for begin in self._begins(done))

    def peaks(self, done: Progress = FRESH) -> tuple[tuple[int, float], ...]:
        """Return first step and peak learning rate of phases that have one."""
        found = []
        for begin in self._begins(done):
            if begin.phase.lr is not None:
                found.append((begin.step, begin.phase.lr))
        return tuple(found)

    def shares(self, done: Progress = FRESH) -> dict[int, Mapping[str, float]]:
        """Return the sources' shares by first sequence; those of sequence 0 hold at `done`."""
        found: dict[int, Mapping[str, float]] = {0: self.first}
        for begin in self._begins(done):
            if begin.phase.weights:
                first = 0 if begin.step <= done.steps else begin.done.position
                weights = begin.phase.weights
                found[first] = {public_name(name): weights[name] for name in weights}
        return found

    def course(self, done: Progress = FRESH) -> Course:
        legs = [Leg(done, self._first_size)]
        for begin in self._begins(done):
            if begin.size == legs[-1].size:
                continue
            if begin.done.steps <= legs[-1].done.steps:
                # If phases begin together, the last one holds.
                legs.pop()
            legs.append(Leg(begin.done, begin.size))
        return Course(tuple(legs))

    def batch_difference(self, saved: object, step: int, train: Mapping[str, Any]) -> str:
        """Return how the sequences of a checkpoint's step differ from this run's, or "".

        `train` is the train state after the step.
        """
        wanted = self.expected_batch(step, train)
        if saved == wanted:
            return ""
        return f"{saved} there, {wanted} here (by training.global_batch_size and data.phase)"

    def expected_batch(self, step: int, train: Mapping[str, Any]) -> int:
        """Return the sequences of a step by the train state after it; if two sizes fit, the saved
        one.
        """
        tokens = train.get("tokens_seen")
        saved = train.get("global_batch")
        if not isinstance(tokens, int):
            return self.global_batch
        legs = (*self.course().legs, *self.course(Progress(step, tokens)).legs)
        found = []
        for size in dict.fromkeys(leg.size for leg in legs):
            before = Progress(step - 1, tokens - size.tokens)
            if before.tokens >= 0 and self.course(before).size(step) == size:
                found.append(size.sequences)
        if saved in found and isinstance(saved, int):
            return saved
        return found[0] if found else self.global_batch

    @property
    def _first_size(self) -> StepSize:
        return self._sized(self.global_batch, self._first_len)

    @property
    def row_len(self) -> int:
        """Tokens of a row of the data order: the run's longest sequence."""
        lengths = [phase.seq_len for phase in self.phases if phase.seq_len is not None]
        return max([self._first_len, *lengths])

    @property
    def _first_len(self) -> int:
        return self.tokens_per_step // self.global_batch

    def _sized(self, sequences: int, seq_len: int) -> StepSize:
        rows = max(sequences * seq_len // self.row_len, 1)
        return StepSize(sequences, seq_len, rows)

    def _begins(self, done: Progress) -> list[_Begin]:
        found: list[_Begin] = []
        waiting = list(self.phases)
        size = self._first_size
        here = done
        if done.steps:
            # By tokens: the step that it would be if no step had another size than planned.
            for planned in replace(self, skip=())._begins(FRESH):
                phase = planned.phase
                has_begun = (phase.tokens or 0) < done.tokens
                if phase.step is not None:
                    has_begun = phase.step <= done.steps
                if planned.step <= done.steps and has_begun:
                    waiting.remove(planned.phase)
                    size = self._with(planned.phase, size)
                    found.append(planned._replace(done=done, size=size))
        while waiting:
            steps = [_first_step(phase, here, size) for phase in waiting]
            nearest = steps.index(min(steps))
            step = steps[nearest]
            phase = waiting.pop(nearest)
            ahead = step - 1 - here.steps
            rows = skip_ranges.advance(here.position, ahead * size.rows, self.skip)
            here = Progress(step - 1, here.tokens + ahead * size.tokens, rows)
            size = self._with(phase, size)
            found.append(_Begin(step, phase, here, size))
        return found

    def _with(self, phase: DataPhase, size: StepSize) -> StepSize:
        sequences = phase.global_batch_size or size.sequences
        return self._sized(sequences, phase.seq_len or size.seq_len)


def _first_step(phase: DataPhase, done: Progress, size: StepSize) -> int:
    if phase.step is not None:
        return phase.step
    ahead = max((phase.tokens or 0) - done.tokens, 0)
    return done.steps + 1 + -(-ahead // size.tokens)
