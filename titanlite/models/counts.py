"""Parameters and FLOPs of a decoder, in closed form."""

from __future__ import annotations

from titanlite.models.llama_args import LlamaArgs, block_names
from titanlite.models.spec import Cost


def _counts(args: LlamaArgs) -> tuple[int, int, int, int]:
    """Return the parameters of the embedding (or head), of a block, of a block for one token, and
    of the last norm.
    """
    norm = 0 if args.norm_type == "np_layernorm" else args.dim
    shared = 2 * args.dim * args.head_dim * (args.n_heads + args.kv_heads)
    shared += 2 * norm
    if args.qk_norm:
        shared += 2 * args.head_dim
    whole, active = args.feed_forward_parameters()
    return args.n_vocab * args.dim, shared + whole, shared + active, norm


def count_parameters(args: LlamaArgs) -> int:
    """Return the parameters of the decoder, closed form; a tied head is counted once."""
    table, block, _, norm = _counts(args)
    return args.n_layers * block + norm + table * (1 if args.tied else 2)


def count_active_parameters(args: LlamaArgs) -> int:
    """Return the parameters that one token is multiplied by, and the embedding; fewer than all if
    there are experts.
    """
    _, block, active, _ = _counts(args)
    return count_parameters(args) - args.n_layers * (block - active)


def _attention_flops(args: LlamaArgs, seq_len: int) -> int:
    """Return the FLOPs of a block's scores and weighted values for one training token.

    Causality is not discounted; keys outside the window are not counted.
    """
    return 12 * args.n_heads * args.head_dim * min(seq_len, args.window or seq_len)


def flops_per_token(args: LlamaArgs, seq_len: int) -> int:
    """Return the model FLOPs of one training token, forward and backward.

    6 per weight that is multiplied (PaLM, appendix B) plus 12 * layers * heads * head_dim * seq_len
    for attention, causality not discounted; `window` if that is shorter. The embedding is a look-up
    and costs nothing; a tied one still costs as the head.
    """
    table, _, active, norm = _counts(args)
    weights = args.n_layers * active + norm + table
    attention = args.n_layers * _attention_flops(args, seq_len)
    return 6 * weights + attention


def pipeline_costs(args: LlamaArgs, seq_len: int) -> dict[str, Cost]:
    """Return the cost of each module that a pipeline can be cut before, in the order they run."""
    table, block, active, norm = _counts(args)
    blocks = dict.fromkeys(
        block_names(args), Cost(6 * active + _attention_flops(args, seq_len), block)
    )
    return {
        "tok_embeddings": Cost(0, table),
        **blocks,
        "norm": Cost(6 * norm, norm),
        "output": Cost(6 * table, table),
    }
