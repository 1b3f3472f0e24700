"""The share of useful time of a run whose nodes fail, and the best interval of its saves.

Failures are exponential: each second is as dangerous as any other. A failure ends all ranks, and
the run goes on from the newest checkpoint. Times are seconds. No torch here.

Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
doi:10.1016/j.future.2004.11.016.
"""

from __future__ import annotations

import math

#: A larger exponent overflows: the run would never end.
_MOST_EXPONENT = 700.0


def best_interval(save: float, mean: float) -> float:
    """Return the best seconds of training between two saves (Daly 2006, equation 37).

    save: in which no step goes on. mean: between two failures of the job.
    """
    if save >= 2 * mean:
        return mean
    ratio = save / (2 * mean)
    return math.sqrt(2 * save * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def useful_share(interval: float, save: float, mean: float, restart: float) -> float:
    """Return the expected share of time in steps that are kept (Daly 2006, equation 20).

    interval: seconds of training between two saves. restart: from a failure to the first step
    after it. save, mean: see `best_interval`.
    """
    exponent = (interval + save) / mean
    if exponent + restart / mean > _MOST_EXPONENT:
        return 0.0
    return interval / (mean * math.exp(restart / mean) * math.expm1(exponent))
