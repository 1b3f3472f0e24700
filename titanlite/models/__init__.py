"""Models as plain modules, which know nothing of how they will be sharded, and a `ModelSpec` of
each.

Specs, arguments and counts need no torch.
"""

from __future__ import annotations

from titanlite.models import hf, mistral, mixtral, qwen3
from titanlite.models.args import resolve_args
from titanlite.models.counts import count_parameters, flops_per_token
from titanlite.models.llama import LlamaArgs, RopeScaling, decoder_spec
from titanlite.models.llama_shapes import SHAPES
from titanlite.models.spec import Cost, Init, ModelSpec, ShapeError, Size, get_spec

__all__ = [
    "SHAPES",
    "SPECS",
    "Cost",
    "Init",
    "LlamaArgs",
    "ModelSpec",
    "RopeScaling",
    "ShapeError",
    "Size",
    "count_parameters",
    "flops_per_token",
    "get_spec",
    "resolve_args",
]

#: The built-in models by `model.name`.
SPECS: dict[str, ModelSpec] = {
    **{family: decoder_spec(family, flavors) for family, flavors in SHAPES.items()},
    "mistral": mistral.SPEC,
    "mixtral": mixtral.SPEC,
    "qwen3": qwen3.SPEC,
    "hf": hf.SPEC,
}
