"""Kinds of the learning rate's decay, each in one entry of `DECAYS`."""

import math
from collections.abc import Callable
from typing import NamedTuple


class Decay(NamedTuple):
    """A kind of a decay: a value of `lr_scheduler.decay_type`."""

    #: The text of the page of keys.
    about: str
    #: (progress in [0, 1], lr_scheduler.min_lr_factor) → share of the peak.
    share: Callable[[float, float], float]
    #: It ends at min_lr_factor, and so can a ladder's horizons.
    reaches_floor: bool = True
    #: Other keys of [lr_scheduler] that it needs, and those that have no effect with it.
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    #: The kind in a schedule whose formula it has, if that is another.
    formula: str = ""


def _to_floor(left: Callable[[float], float]) -> Callable[[float, float], float]:
    return lambda progress, floor: floor + (1.0 - floor) * left(progress)


_LINEAR = Decay("a straight line", _to_floor(lambda progress: 1.0 - progress))

DECAYS = {
    "constant": Decay(
        "none",
        lambda progress, floor: 1.0,
        reaches_floor=False,
        excludes=("decay_ratio", "decay_steps", "plateau_ratio", "min_lr_factor"),
    ),
    "linear": _LINEAR,
    "cosine": Decay(
        "half a wave", _to_floor(lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)))
    ),
    "sqrt": Decay(
        "1 less the root of the progress", _to_floor(lambda progress: 1.0 - math.sqrt(progress))
    ),
    "exponential": Decay(
        "geometric, to a half without min_lr_factor",
        # As the AWS samples do.
        lambda progress, floor: (floor if floor > 0 else 0.5) ** progress,
        reaches_floor=False,
    ),
    "plateau": _LINEAR._replace(
        about="linear after plateau_ratio",
        reaches_floor=False,
        needs=("plateau_ratio",),
        formula="linear",
    ),
}

#: All kinds in words.
IN_WORDS = "one of " + ", ".join(f'"{kind}" ({decay.about})' for kind, decay in DECAYS.items())
