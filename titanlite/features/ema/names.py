"""Names of the averages in a checkpoint: `ema.` takes the place of `model.`. No torch here."""

from __future__ import annotations

from titanlite.checkpoint.loaded import WEIGHT

#: Prefix of the names, as `WEIGHT` is of those of weights.
AVERAGE = "ema."


def average_of(weight: str) -> str:
    """Return the name of a weight's average."""
    return AVERAGE + weight.removeprefix(WEIGHT)


def weight_of(average: str) -> str:
    """Return the name of the weight that an average is of."""
    return WEIGHT + average.removeprefix(AVERAGE)
