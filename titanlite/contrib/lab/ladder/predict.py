"""What a fitted law says of a run that was not made, and how far that can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titanlite.contrib.lab.ladder.fit import Fit, ends, fit
from titanlite.contrib.lab.ladder.law import LadderError, Point, groups_of_sizes

#: A prediction this many times beyond the largest run gets a note.
FARTHEST = 100.0
#: Tokens for each parameter within this factor of those of the points count as seen.
_SLACK = 1.5
#: Points of a curve before the decay.
_CURVE = 16


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
        return (self.high - self.low) / 2


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
    """Return the loss of a run, and the interval that holds one further run's."""
    loss = found.law.loss(parameters, tokens)
    errors = []
    for law, noise in zip(found.replicates, found.noise, strict=True):
        errors.append(noise + math.log(loss / law.loss(parameters, tokens)))
    low, high = ends(errors)
    return Prediction(parameters, tokens, loss, loss * math.exp(low), loss * math.exp(high))


def predict_curve(
    held: Sequence[Point], end: Prediction, tokens_before_decay: float
) -> list[Prediction]:
    """Return the held-out loss along a run, by a law of its own for steps before the decay.

    held: points of runs whose rate has not begun to fall. Raises LadderError for too few.
    """
    found = fit(held)
    first = min(point.tokens / point.parameters for point in held) * end.parameters
    if first >= tokens_before_decay:
        return [end]
    places = np.geomspace(first, tokens_before_decay, _CURVE)
    return [*(predict(found, end.parameters, float(tokens)) for tokens in places), end]


def notes_on_distance(points: Sequence[Point], parameters: float, tokens: float) -> list[str]:
    """Return how far a run is beyond a ladder, where its interval does not tell that."""
    target = Point(parameters, tokens, 1.0)
    notes = []
    for name in ("parameters", "tokens", "compute"):
        times = getattr(target, name) / max(getattr(point, name) for point in points)
        if times > FARTHEST:
            notes.append(
                f"{times:,.0f} times the {name} of the ladder's largest run: too far for the "
                "interval to tell. Train larger models or longer ones (ladder.sizes, "
                "ladder.tokens_per_parameter)"
            )
    seen = [point.tokens / point.parameters for point in points]
    ratio = tokens / parameters
    if not min(seen) / _SLACK <= ratio <= max(seen) * _SLACK:
        notes.append(
            f"{ratio:.3g} tokens for each parameter, and the runs have {min(seen):.3g} to "
            f"{max(seen):.3g}: the law was not seen there, and its interval does not tell"
        )
    return notes


def leave_largest_out(points: Sequence[Point]) -> list[LeftOut]:
    """Return the points of the largest model, predicted from the smaller ones if there are
    enough.
    """
    *smaller, largest = groups_of_sizes(points)
    try:
        found = fit([point for group in smaller for point in group], replicates=0)
    except LadderError:
        return []
    return [LeftOut(one, found.law.loss(one.parameters, one.tokens)) for one in largest]
