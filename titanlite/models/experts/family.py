"""What families of decoders with experts share: how they are divided.

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titanlite.models import llama
from titanlite.models.experts.arguments import ExpertArgs, experts_of
from titanlite.models.spec import ModelSpec, imported_when_called

if TYPE_CHECKING:
    from titanlite.models.llama_hf import HFTable

#: How the MoE layer of a block is divided: each rank has all experts. They take its part of the
#: sequence.
_MOE_LAYER = {
    "feed_forward": "tokens",
    "feed_forward.gate": "heads",
    "feed_forward.experts": "whole",
}


def feed_forward_plan(args: ExpertArgs) -> dict[str, str]:
    """Return the tensor parallelism of a feed-forward's modules."""
    if args.n_experts:
        shared = dict.fromkeys(args.feed_forward_linears(), "heads")
        return {**_MOE_LAYER, **shared}
    dense = llama.block_plan(args)
    return {name: kind for name, kind in dense.items() if name.startswith("feed_forward")}


def block_plan(args: ExpertArgs) -> dict[str, str]:
    """Return module name in a block → how tensor parallelism divides it."""
    kinds = {}
    for name, kind in llama.block_plan(args).items():
        if not name.startswith("feed_forward"):
            kinds[name] = kind
    return {**kinds, **feed_forward_plan(args)}


def tensor_sizes(args: ExpertArgs) -> dict[str, int]:
    """Return the numbers that tensor-parallel ranks must divide."""
    sizes = {"n_heads": args.n_heads, "n_kv_heads": args.kv_heads}
    if len(experts_of(args)) < args.n_layers:
        sizes["the feed-forward's width"] = args.ffn_width
    return sizes


def expert_spec(
    name: str, flavors: Mapping[str, Any], hf: HFTable | None = None, **different: Any
) -> ModelSpec:
    """Return the spec of a decoder with experts. different: fields unlike Mixtral's."""
    common = {
        "build": imported_when_called("titanlite.models.experts.layer:MoEDecoder"),
        "block_plan": block_plan,
        "tensor_sizes": tensor_sizes,
        "experts": experts_of,
    }
    return llama.decoder_spec(name, flavors, hf, **{**common, **different})
