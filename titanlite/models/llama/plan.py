"""What other rooms need to know of a Llama, by module and parameter name.

Its initial weights, its units, and how its products are divided over ranks.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from titanlite.models.shapes import LlamaArgs, count_parameters, flops_per_token
from titanlite.models.spec import Cost, Init, Size

_STD = 0.02
#: Truncation in standard deviations.
_CUT = 3.0

_BLOCK_PARAMETER = re.compile(
    r"layers\.(?P<layer>\d+)\.(?:(?:attention|feed_forward)\.(?P<linear>w[qkvo123])|(?P<norm>attention_norm|ffn_norm))\.weight"
)


def init_rule(name: str, args: LlamaArgs) -> Init:
    """How the parameter of that full name is drawn.

    Embedding: normal, std 1. Linears: truncated normal, std 0.02, and those that write to the residual stream
    (wo, w2, and w3 that gates w2's input) divided by sqrt(2 (layer + 1)), so that the stream's variance grows
    evenly with depth. Head: dim ** -0.5, for logits of order one; a tied weight is drawn as a head. Norms: one.

    Raises KeyError for a name that no Llama has.
    """
    head = _truncated(args.dim**-0.5)
    if name == "tok_embeddings.weight":
        return head if args.tied else Init("normal", std=1.0)
    if name == "output.weight":
        return head
    if name == "norm.weight":
        return Init("ones")
    match = _BLOCK_PARAMETER.fullmatch(name)
    if match is None or int(match["layer"]) >= args.n_layers:
        raise KeyError(f"no initialisation is known for a parameter called {name!r}")
    if match["norm"]:
        return Init("ones")
    if match["linear"] in ("wo", "w2", "w3"):
        return _truncated(_STD / math.sqrt(2 * (int(match["layer"]) + 1)))
    return _truncated(_STD)


def _truncated(std: float) -> Init:
    return Init("trunc_normal", std=std, bound=_CUT * std)


def block_names(args: LlamaArgs) -> list[str]:
    """The decoder blocks in the order they run."""
    return [f"layers.{i}" for i in range(args.n_layers)]


def sublayer_names(args: LlamaArgs) -> list[str]:
    """The two halves of each decoder block, in the order they run."""
    return [f"{block}.{half}" for block in block_names(args) for half in ("attention", "feed_forward")]


def fsdp_units(args: LlamaArgs) -> list[tuple[str, ...]]:
    """Modules to be sharded and gathered together, in the order they last run.

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


def tensor_plan(args: LlamaArgs) -> dict[str, str]:
    """Module name → how tensor parallelism divides it, in the words of `titanlite.parallel.tensor.apply_tp`, and in
    the order the modules run."""
    blocks = {f"{block}.{name}": kind for block in block_names(args) for name, kind in _BLOCK.items()}
    return {"tok_embeddings": "embedding", **blocks, "norm": "sequence", "output": "head"}


def linears(args: LlamaArgs) -> dict[str, Size]:
    """Name → size of every linear, in the model's order."""
    heads, groups, width = args.n_heads * args.head_dim, args.kv_heads * args.head_dim, args.ffn_width
    block = {
        "attention.wq": Size(args.dim, heads),
        "attention.wk": Size(args.dim, groups),
        "attention.wv": Size(args.dim, groups),
        "attention.wo": Size(heads, args.dim),
        "feed_forward.w1": Size(args.dim, width),
        "feed_forward.w2": Size(width, args.dim),
        "feed_forward.w3": Size(args.dim, width),
    }
    blocks = {f"{name}.{linear}": size for name in block_names(args) for linear, size in block.items()}
    return {**blocks, "output": Size(args.dim, args.n_vocab)}


def pipeline_costs(args: LlamaArgs, seq_len: int) -> dict[str, Cost]:
    """Module name → what it costs, in the order they run: the pieces that a pipeline can be cut into."""
    none, one = (replace(args, n_layers=n, tied=False) for n in (0, 1))
    table = args.n_vocab * args.dim
    norm = count_parameters(none) - 2 * table
    block = Cost(
        flops_per_token(one, seq_len) - flops_per_token(none, seq_len), count_parameters(one) - count_parameters(none)
    )
    blocks = dict.fromkeys(block_names(args), block)
    return {"tok_embeddings": Cost(0, table), **blocks, "norm": Cost(6 * norm, norm), "output": Cost(6 * table, table)}
