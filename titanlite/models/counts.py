"""Parameters and FLOPs of a decoder, in closed form. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from titanlite.models.spec import Cost

if TYPE_CHECKING:
    from titanlite.models.llama import LlamaArgs


class BlockCount(NamedTuple):
    """The parameters of a block."""

    whole: int
    #: Parameters that one token is multiplied by; fewer if there are experts.
    active: int


@cache
def _block(args: LlamaArgs) -> BlockCount:
    linears = args.attention_linears().values()
    shared = sum(size.in_features * size.out_features for size in linears)
    shared += sum(args.attention_extras().values())
    shared += sum(args.block_norms().values())
    whole, active = args.feed_forward_parameters()
    return BlockCount(shared + whole, shared + active)


def blocks(args: LlamaArgs) -> list[LlamaArgs]:
    """Return the arguments of each block, in order."""
    return list(args.blocks().values())


def _table(args: LlamaArgs) -> int:
    return args.n_vocab * args.dim


def _summed(args: LlamaArgs, counts: Iterable[int]) -> int:
    return sum(counts) + args.dim + _table(args) * (1 if args.tied else 2)


def count_parameters(args: LlamaArgs) -> int:
    """Return the number of parameters; a tied head is counted once."""
    return _summed(args, (_block(block).whole for block in blocks(args)))


def count_active_parameters(args: LlamaArgs) -> int:
    """Return the parameters that one token uses: the embedding, and only its own experts."""
    return _summed(args, (_block(block).active for block in blocks(args)))


def count_multiplied_parameters(args: LlamaArgs) -> int:
    """Return the parameters that one token is multiplied by: an embedding is looked up."""
    return count_active_parameters(args) - (0 if args.tied else _table(args))


def flops_per_token(args: LlamaArgs, seq_len: int) -> int:
    """Return the model FLOPs of one training token, forward and backward.

    6 per weight that is multiplied (PaLM, appendix B) plus 12 * layers * heads * head_dim * seq_len
    for attention, causality not discounted; `window` if that is shorter. A tied embedding costs as
    the head.
    """
    weights = args.dim + _table(args)
    attention = 0
    for block in blocks(args):
        weights += _block(block).active
        attention += block.attention_flops(seq_len)
    return 6 * weights + attention


def pipeline_costs(args: LlamaArgs, seq_len: int) -> dict[str, Cost]:
    """Return the cost of each module that a pipeline can cut before."""
    table = _table(args)
    costs = {"tok_embeddings": Cost(0, table)}
    for name, block in args.blocks().items():
        count = _block(block)
        costs[name] = Cost(6 * count.active + block.attention_flops(seq_len), count.whole)
    costs["norm"] = Cost(6 * args.dim, args.dim)
    costs["output"] = Cost(6 * table, table)
    return costs
