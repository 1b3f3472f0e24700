"""Settings of expert parallelism that the plan's search tries. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping

from titanlite.config.rules import divisors
from titanlite.features.experts.checks import DEGREE


def settings(experts: Mapping[str, int]) -> list[dict[str, int]]:
    """Return changes of a config. experts: name of each MoE layer → number of its experts."""
    return [{DEGREE: ranks} for ranks in divisors(math.gcd(*experts.values()))]
