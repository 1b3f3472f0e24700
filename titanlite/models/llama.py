"""The Llama family (Llama 2, 3, 3.1, 3.2): initial weights, and how it is divided.

Other families of decoders subclass `LlamaArgs` and give `decoder_spec` what differs. No torch here;
`titanlite.models.layers` has the modules, `llama_args` the arguments, `llama_shapes` the published
sizes, `counts` parameters and FLOPs, `llama_hf` other people's names of weights.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.models import counts
from titanlite.models.llama_args import NORM_TYPES as NORM_TYPES
from titanlite.models.llama_args import LlamaArgs, block_names
from titanlite.models.rope_scaling import RopeScaling as RopeScaling
from titanlite.models.spec import Init, ModelSpec, Size, imported_when_called

if TYPE_CHECKING:
    pass


def block_linears(args: LlamaArgs) -> dict[str, Size]:
    """Return name → size of the linears of one block, in the model's order. args: of that
    block.
    """
    return {**args.attention_linears(), **args.feed_forward_linears()}


def linears(args: LlamaArgs) -> dict[str, Size]:
    """Return name → size of every linear, in the model's order."""
    found: dict[str, Size] = {}
    for index, block in enumerate(block_names(args)):
        for name, size in block_linears(args.of_block(index)).items():
            found[f"{block}.{name}"] = size
    found["output"] = Size(args.dim, args.n_vocab)
    return found


_STD = 0.02
#: Truncation in standard deviations.
_CUT = 3.0

_LINEAR = re.compile(r"layers\.(\d+)\.(?:attention\.w[qkvo]|feed_forward\.w[123])\.weight")
_NORM = re.compile(r"(?:layers\.(\d+)\.(?:attention|ffn)_(?:post_)?norm|norm)\.weight")
_HEAD_NORM = re.compile(r"layers\.(\d+)\.attention\.[qk]_norm\.weight")


def init_rule(name: str, args: LlamaArgs) -> Init:
    """Return how the parameter of that full name is drawn.

    Embedding: normal, std 1. Linears: truncated normal, std 0.02. Those that write to the residual
    stream (wo, w2, and w3 that gates w2's input) are divided by sqrt(2 (layer + 1)), so that the
    stream's variance grows evenly with depth. Head: dim ** -0.5, for logits of order one; a tied
    weight is drawn as a head. Norms: one.

    Raises KeyError for a name that no Llama has.
    """
    head = _truncated(args.dim**-0.5)
    if name == "tok_embeddings.weight":
        return head if args.tied else Init("normal", std=1.0)
    if name == "output.weight":
        return head
    match = _LINEAR.fullmatch(name) or _NORM.fullmatch(name)
    if match is None and args.qk_norm:
        match = _HEAD_NORM.fullmatch(name)
    if match is None or int(match[1] or 0) >= args.n_layers:
        raise KeyError(f"no initialisation is known for a parameter called {name!r}")
    if "norm" in name:
        return Init("zeros" if args.norm_offset else "ones")
    residual = name.endswith(("wo.weight", "w2.weight", "w3.weight"))
    return linear_init(int(match[1]) if residual else None)


def linear_init(residual_layer: int | None = None) -> Init:
    """Return how a block's linear is drawn.

    residual_layer: of one that writes to the residual stream.
    """
    if residual_layer is None:
        return _truncated(_STD)
    return _truncated(_STD / math.sqrt(2 * (residual_layer + 1)))


def _truncated(std: float) -> Init:
    return Init("trunc_normal", std=std, bound=_CUT * std)


def tied(args: LlamaArgs) -> dict[str, str]:
    """Return the name of a parameter that shares its tensor → the name that the tensor is drawn and
    saved under.
    """
    return {"output.weight": "tok_embeddings.weight"} if args.tied else {}


def sublayer_names(args: LlamaArgs) -> list[str]:
    """Return the two halves of each decoder block, in the order they run."""
    names = []
    for block in block_names(args):
        names += [f"{block}.attention", f"{block}.feed_forward"]
    return names


def fsdp_units(args: LlamaArgs) -> list[tuple[str, ...]]:
    """Return the modules to be sharded and gathered together, in the order they last run.

    The final norm travels with the head. Modules that share a weight must be one unit.
    """
    blocks: list[tuple[str, ...]] = [(name,) for name in block_names(args)]
    if args.tied:
        return [*blocks, ("tok_embeddings", "norm", "output")]
    return [("tok_embeddings",), *blocks, ("norm", "output")]


#: How the modules of a block are divided.
_BLOCK = {
    "attention_norm": "sequence",
    "attention": "gather",
    "attention.wq": "colwise",
    "attention.wk": "colwise",
    "attention.wv": "colwise",
    "attention.wo": "rowwise",
    "ffn_norm": "sequence",
    "feed_forward": "gather",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}


def block_plan(args: LlamaArgs) -> dict[str, str]:
    """Return module name in a block → how tensor parallelism divides it. args: of that block."""
    kinds = dict(_BLOCK)
    if args.qk_norm:
        kind = "all heads" if args.qk_norm_whole else "heads"
        kinds["attention.q_norm"] = kind
        kinds["attention.k_norm"] = kind
    if args.norm_placement != "before":
        kinds["attention_post_norm"] = "added"
        kinds["ffn_post_norm"] = "added"
    return kinds


def tensor_plan(
    args: LlamaArgs, of_block: Callable[[Any], Mapping[str, str]] = block_plan
) -> dict[str, str]:
    """Return module name → how tensor parallelism divides it, in the order the modules run.

    The kinds are those of `titanlite.parallel.tensor.apply_tp`. of_block: those of a block, from
    its arguments.
    """
    plan = {"tok_embeddings": "embedding"}
    for index, block in enumerate(block_names(args)):
        for name, kind in of_block(args.of_block(index)).items():
            plan[f"{block}.{name}"] = kind
    plan["norm"] = "sequence"
    plan["output"] = "head"
    return plan


def tensor_sizes(args: LlamaArgs) -> dict[str, int]:
    """Return the numbers that tensor-parallel ranks must divide, besides the vocabulary."""
    return {
        "n_heads": args.n_heads,
        "n_kv_heads": args.kv_heads,
        "the feed-forward's width": args.ffn_width,
    }


def decoder_spec(name: str, flavors: Mapping[str, LlamaArgs], **different: Any) -> ModelSpec:
    """Return the spec of a family of decoders.

    different: fields of `ModelSpec` that are not as Llama's.
    """
    spec = ModelSpec(
        name=name,
        args_class=type(next(iter(flavors.values()))),
        flavors=types.MappingProxyType(dict(flavors)),
        build=imported_when_called("titanlite.models.layers:Llama"),
        init_rule=init_rule,
        block_names=block_names,
        count_parameters=counts.count_parameters,
        flops_per_token=counts.flops_per_token,
        fsdp_units=fsdp_units,
        linears=linears,
        tensor_plan=tensor_plan,
        tensor_sizes=tensor_sizes,
        sublayer_names=sublayer_names,
        pipeline_costs=counts.pipeline_costs,
        context_parallel=True,
        tied=tied,
        hf_names=imported_when_called("titanlite.models.llama_hf:hf_names"),
        hf_config=imported_when_called("titanlite.models.llama_hf:hf_config"),
        args_from_hf=imported_when_called("titanlite.models.llama_hf:args_from_hf"),
    )
    return replace(spec, **different)
