"""Kinds of the learning rate's decay, each in one entry of `DECAYS`."""

import math
from collections.abc import Callable
from typing import NamedTuple


class Point(NamedTuple):
    """Where a schedule stands after its warm-up."""

    #: Share of the decay that is done, in [0, 1].
    progress: float
    #: lr_scheduler.min_lr_factor.
    floor: float
    #: Steps done, steps of the warm-up, and 1; all three in tokens with lr_scheduler.unit =
    #: "tokens".
    done: float = 1.0
    warmup: float = 0.0
    size: float = 1.0


class Decay(NamedTuple):
    """A kind of a decay: a value of `lr_scheduler.decay_type`."""

    #: The text of the page of keys.
    about: str
    #: The share of the peak at a point; `learning_rate` applies warm-up and lr_scheduler.min_lr.
    share: Callable[[Point], float]
    #: Without an end it goes by `Point.done`, and the keys of `KEYS_OF_END` are refused with it.
    has_end: bool = True
    #: Other keys of [lr_scheduler] that it needs.
    needs: tuple[str, ...] = ()
    #: The kind in a schedule whose formula it has, if that is another.
    formula: str = ""

    @property
    def reaches_floor(self) -> bool:
        """Whether it ends at min_lr_factor by itself, as a ladder's horizons do."""
        return self.has_end and not self.needs and self.share(Point(1.0, 0.0)) == 0


#: The keys of [lr_scheduler] that shape the end of a decay.
KEYS_OF_END = ("decay_ratio", "decay_steps", "plateau_ratio", "min_lr_factor")


def _to_floor(left: Callable[[float], float]) -> Callable[[Point], float]:
    return lambda at: at.floor + (1.0 - at.floor) * left(at.progress)


_LINEAR = Decay("a straight line", _to_floor(lambda progress: 1.0 - progress))

DECAYS = {
    "constant": Decay("none", lambda at: 1.0, has_end=False),
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
        lambda at: (at.floor if at.floor > 0 else 0.5) ** at.progress,
    ),
    "plateau": _LINEAR._replace(
        about="linear after plateau_ratio", needs=("plateau_ratio",), formula="linear"
    ),
}

#: All kinds in words.
IN_WORDS = "one of " + ", ".join(f'"{kind}" ({decay.about})' for kind, decay in DECAYS.items())
