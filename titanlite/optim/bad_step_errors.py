"""Errors of steps that the guard finds bad. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from titanlite import exit_codes


class BadStepError(RuntimeError):
    """The guard found a step bad. Its update was not applied, unless `applied` says so.

    step, norm, loss: of that step, over all ranks. kind: "not finite" (the loss or the gradient
    norm) or "spike". ranks: where the loss was not finite. done: the last step before it. updated:
    the last step whose update is in the weights; an earlier one than `done` after steps that were
    skipped.
    """

    exit_code = exit_codes.GUARD
    #: All ranks raise it at the same place.
    together = True
    #: Hosts with a device that may be broken.
    hosts: Sequence[str] = ()

    def __init__(  # noqa: PLR0913
        self,
        step: int,
        norm: float,
        loss: float,
        why: str,
        kind: str = "spike",
        ranks: Sequence[int] = (),
        applied: bool = False,
        updated: int | None = None,
    ) -> None:
        self.step = step
        self.norm = norm
        self.loss = loss
        self.kind = kind
        self.ranks = ranks
        self.done = step - 1
        self.applied = applied
        self.updated = step - 1 if updated is None else updated
        #: Rows of `titanlite.metrics.document_losses`.
        self.losses: list[dict[str, Any]] = []
        then = f"The update was not applied: the weights are those after step {self.updated}"
        if applied:
            then = (
                "Its update is in the weights (optimizer.early_step_in_backward), and they are "
                "not saved"
            )
        super().__init__(f"step {step}: loss {loss:.6g}, gradient norm {norm:.6g}: {why}. {then}")

    def explain(self, finding: object) -> None:
        """Add to the message where it came from (see `titanlite.metrics.nan_finder`), or why the
        run ends.
        """
        self.args = (f"{self}. {finding}",)


def spike_reason(mean: float, sigmas: float, deviation: float) -> str:
    """Return in words why a loss is a spike."""
    limit = mean + sigmas * deviation
    return (
        f"the loss jumped over {limit:.6g} = {mean:.6g} + {sigmas:g} * {deviation:.3g}, mean and "
        "deviation of the good steps before it"
    )


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def not_finite_reason(ranks: list[int]) -> str:
    """Return in words where a loss was not finite."""
    if not ranks:
        return "the loss was finite on every rank, so it arose in the backward pass"
    return f"the loss was not finite on {name_ranks(ranks)}"


class WeightsError(BadStepError):
    """The weights, or the optimizer's moments, are not finite. No later step can repair them.

    step: where this was found. where: as `find_nonfinite` returns it.
    """

    def __init__(self, step: int, done: int, where: str, then: str) -> None:
        super().__init__(step, math.nan, math.nan, "", "weights not finite")
        self.done = self.updated = done
        self.args = (f"step {step}: {where} is not finite after step {done}. {then}",)


class CorruptionError(BadStepError):
    """A step that was computed twice gave other bits, or replicas have them. ranks: where first."""

    exit_code = exit_codes.CORRUPTION

    def __init__(self, step: int, why: str, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        super().__init__(step, math.nan, math.nan, "", "corruption", ranks)
        self.hosts = hosts
        self.args = (f"step {step}: {why}. No update was made of it",)
