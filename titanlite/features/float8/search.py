"""Settings of float8 that the plan's search tries."""

from __future__ import annotations

from typing import Any

from titanlite.features.float8.checks import ENABLE, GATHER, PRECOMPUTE
from titanlite.plan.hardware import Gpu

#: Keys that a table of candidates has no columns for.
SHOWN = (ENABLE, GATHER)


def settings(gpu: Gpu) -> list[dict[str, Any]]:
    """Return changes of a config that may make it faster; none on a GPU without float8."""
    if gpu.float8 is None:
        return []
    return [{ENABLE: True}, {ENABLE: True, GATHER: True, PRECOMPUTE: True}]
