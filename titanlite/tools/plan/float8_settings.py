"""Settings of float8 that `titanlite plan --search --allow float8` tries."""

from __future__ import annotations

from typing import Any

from titanlite.plan.hardware import Gpu

_ENABLE = "float8.enable_float8_linear"
_GATHER = "float8.enable_fsdp_float8_all_gather"
_SCALES = "float8.precompute_float8_dynamic_scale_for_fsdp"
#: Keys that the table of results shows.
SHOWN = {_ENABLE, _GATHER}


def settings(gpu: Gpu) -> list[dict[str, Any]]:
    """Return the changes of a config to try, beside none; none on a GPU without float8."""
    if gpu.float8 is None:
        return []
    return [{_ENABLE: True}, {_ENABLE: True, _GATHER: True, _SCALES: True}]
