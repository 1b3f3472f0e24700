"""Models as plain modules, which know nothing of how they will be sharded, and a `ModelSpec` of
each.

Specs, arguments and counts need no torch.
"""

from __future__ import annotations

from titanlite.models.args import resolve_args
from titanlite.models.families import SPECS, get_spec
from titanlite.models.llama import LlamaArgs
from titanlite.models.rope_scaling import RopeScaling
from titanlite.models.spec import Cost, Init, ModelSpec, ShapeError, Size

__all__ = [
    "SPECS",
    "Cost",
    "Init",
    "LlamaArgs",
    "ModelSpec",
    "RopeScaling",
    "ShapeError",
    "Size",
    "get_spec",
    "resolve_args",
]
