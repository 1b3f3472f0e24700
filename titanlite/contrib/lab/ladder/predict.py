"""What a fitted law says of a run that was not made, and how far that can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titanlite.contrib.lab.ladder.fit import CONFIDENCE, Fit, fit
from titanlite.contrib.lab.ladder.law import LadderError, Point, groups_of_sizes
from titanlite.utils import human_count

#: A prediction may be this many times beyond the largest run.
FARTHEST = 100.0
#: Tokens for each parameter within this factor of those of the points count as seen.
_SLACK = 1.5


@dataclass(frozen=True)
class Prediction:
    """The loss of a run of N parameters and D tokens; low, high: the ends of its interval."""

    parameters: float
    tokens: float
    loss: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Half the interval."""
        return (self.high - self.low) / 2

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error, "confidence": CONFIDENCE}


@dataclass(frozen=True)
class LeftOut:
    """A point of the largest model, and what the law of the others says of it."""

    point: Point
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured loss, less 1."""
        return self.predicted / self.point.loss - 1


def predict(found: Fit, parameters: float, tokens: float) -> Prediction:
    """Return the loss that the law has for a run."""
    return Prediction(parameters, tokens, *found.predict(parameters, tokens))


def check_distance(points: Sequence[Point], parameters: float, tokens: float) -> None:
    """Raise LadderError where a run is too far beyond the largest ones of a ladder.

    points: their losses do not matter.
    """
    target = Point(parameters, tokens, 1.0)
    largest = {
        "parameters": (parameters, max(point.parameters for point in points)),
        "tokens": (tokens, max(point.tokens for point in points)),
        "FLOPs": (target.compute, max(point.compute for point in points)),
    }
    far = []
    for name, (there, here) in largest.items():
        if there > here * FARTHEST:
            far.append(f"{there / here:,.0f} times the {name} ({human_count(here)})")
    if far:
        raise LadderError(
            f"too far to predict: the run has {' and '.join(far)} of the ladder's largest run, and "
            f"the limit is {FARTHEST:g}. Train larger models or longer ones (ladder.sizes, "
            "ladder.tokens_per_parameter), or give --far to see the number all the same"
        )


def horizon_note(points: Sequence[Point], parameters: float, tokens: float) -> str | None:
    """Return how far the tokens for each parameter lie outside of those of the points; None: they
    do not.
    """
    seen = [point.tokens / point.parameters for point in points]
    ratio = tokens / parameters
    if min(seen) / _SLACK <= ratio <= max(seen) * _SLACK:
        return None
    return (
        f"{ratio:.3g} tokens for each parameter, and the runs have {min(seen):.3g} to "
        f"{max(seen):.3g}: the law was not seen there, and its interval does not tell"
    )


def passes_note(points: Sequence[Point], tokens: float, text: int | None) -> str | None:
    """Return which runs read the text more than once; None: none does.

    tokens: of the run that is predicted. text: its tokens; None: unknown.
    """
    if not text:
        return None
    again = [point.tokens / text for point in points if point.tokens > text]
    told = []
    if again:
        told.append(f"{len(again)} of {len(points)} runs, at most {max(again):.3g} times")
    if tokens > text:
        told.append(f"this file, {tokens / text:.3g} times")
    if not told:
        return None
    return (
        f"the text has {human_count(text)} tokens, and it is read more than once by "
        f"{' and '.join(told)}: the law is of new tokens, and its interval does not tell"
    )


def leave_largest_out(points: Sequence[Point]) -> list[LeftOut]:
    """Return the points of the largest model, predicted by the law of the smaller ones.

    Empty: too few are left for a law.
    """
    *smaller, largest = groups_of_sizes(points)
    try:
        found = fit([point for group in smaller for point in group], replicates=0)
    except LadderError:
        return []
    return [LeftOut(one, found.law.loss(one.parameters, one.tokens)) for one in largest]
