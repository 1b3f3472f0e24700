"""Decoders as plain modules: they know nothing of how they will be sharded.

Shapes and counts need no torch; what does is imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titanlite.models.shapes import (
    SHAPES,
    LlamaArgs,
    RopeScaling,
    ShapeError,
    count_parameters,
    flops_per_token,
    resolve_args,
)

if TYPE_CHECKING:
    from titanlite.models.spec import Init, ModelSpec, get_spec

__all__ = [
    "SHAPES",
    "Init",
    "LlamaArgs",
    "ModelSpec",
    "RopeScaling",
    "ShapeError",
    "count_parameters",
    "flops_per_token",
    "get_spec",
    "resolve_args",
]


def __getattr__(name: str) -> Any:
    if name in ("Init", "ModelSpec", "get_spec"):
        from titanlite.models import spec

        return getattr(spec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
