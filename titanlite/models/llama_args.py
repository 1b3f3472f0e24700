"""The arguments of a decoder of the Llama family. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.config.errors import Problem
from titanlite.models.rope_scaling import RopeScaling, Scaling
from titanlite.models.spec import ShapeError, Size

if TYPE_CHECKING:
    from typing_extensions import Self

NORM_TYPES = ("rmsnorm", "layernorm", "np_layernorm", "fused_rmsnorm")
_BEFORE = ("attention_norm", "ffn_norm")
_AFTER = ("attention_post_norm", "ffn_post_norm")
#: Value of `norm_placement` → names of the norms of a block.
NORM_NAMES = {"before": _BEFORE, "after": _AFTER, "around": (*_BEFORE, *_AFTER)}


class Rotary(NamedTuple):
    """What rotary tables follow from, besides their length."""

    #: Numbers of a head that rotate.
    width: int
    theta: float
    scaling: Scaling | None


class AttentionKind(NamedTuple):
    """What blocks have in common that share one rotation and one mask."""

    window: int | None
    #: None: positions rotate nothing.
    rotary: Rotary | None


@dataclass(frozen=True)
class LlamaArgs:
    """Everything that determines a decoder's shape and arithmetic.

    Another family makes fields of the properties `head_dim`, `window` and `qk_norm` in a
    subclass, or overrides them and the methods.
    """

    dim: int
    n_layers: int
    n_heads: int
    #: Key/value heads shared by groups of query heads; None: as many as query heads.
    n_kv_heads: int | None = None
    #: Hidden width of the feed-forward; None: Llama's rule, see `ffn_width`.
    ffn_dim: int | None = None
    ffn_dim_multiplier: float = 1.0
    multiple_of: int = 256
    #: Vocabulary entries; None only in a flavor that takes the tokenizer's.
    vocab_size: int | None = None
    norm_eps: float = 1e-5
    norm_type: str = "rmsnorm"
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    #: The head is the transposed embedding.
    tied: bool = False
    #: Positions that the RoPE tables hold, in tokens.
    max_seq_len: int = 2048

    def __post_init__(self) -> None:
        """Raise ShapeError with all numbers that make no decoder."""
        wrong = []
        names = (
            "dim",
            "n_layers",
            "n_heads",
            "kv_heads",
            "ffn_dim",
            "multiple_of",
            "vocab_size",
            "max_seq_len",
            "window",
        )
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                wrong.append(f"{name} must be positive, got {value}")
        for name in ("norm_eps", "rope_theta", "ffn_dim_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                wrong.append(f"{name} must be positive, got {getattr(self, name)}")
        if self.norm_type not in NORM_TYPES:
            wrong.append(
                f"norm_type must be one of {', '.join(NORM_TYPES)}, got {self.norm_type!r}"
            )
        wrong = wrong or self._problems_of_derived()
        if wrong:
            raise ShapeError(*wrong)

    def _problems_of_derived(self) -> list[str]:
        """Return what is wrong with derived numbers, where each argument by itself is right."""
        wrong = []
        if self.ffn_width < 1:
            wrong.append(f"ffn_width must be positive, got {self.ffn_width}")
        if self.dim % self.n_heads and "head_dim" not in self.__dataclass_fields__:
            wrong.append(f"n_heads = {self.n_heads} does not divide dim = {self.dim}")
        elif self.head_dim < 1 or self.head_dim % 2:
            wrong.append(
                f"head_dim = {self.head_dim} is no positive even number: RoPE rotates pairs"
            )
        if self.n_heads % self.kv_heads:
            wrong.append(f"n_kv_heads = {self.kv_heads} does not divide n_heads = {self.n_heads}")
        return wrong

    def of_block(self, index: int) -> Self:
        """Return the arguments of block `index`; a family whose blocks differ overrides it."""
        return self

    # The derived numbers are properties, so that replacing `dim` or `n_heads` can never leave a
    # stale one behind.

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def window(self) -> int | None:
        """Return the tokens that a token attends to, itself and those before it; None: all."""
        return None

    @property
    def rotary(self) -> Rotary | None:
        """Return the rotary tables of a block: of `of_block`; None: positions rotate nothing."""
        return Rotary(self.head_dim, self.rope_theta, self.rope_scaling)

    @property
    def attention_kind(self) -> AttentionKind:
        """Return what blocks share a rotation and a mask by: of `of_block`."""
        return AttentionKind(self.window, self.rotary)

    def rotaries(self) -> list[Rotary | None]:
        """Return the rotary tables of all blocks, equal ones once, in the order of the blocks."""
        return list(dict.fromkeys(self.of_block(i).rotary for i in range(self.n_layers)))

    @property
    def qk_norm(self) -> bool:
        """Return whether q and k pass through an RMSNorm before the rotation: each head by
        itself, or as `qk_norm_whole` says.
        """
        return False

    @property
    def qk_norm_whole(self) -> bool:
        """Return whether that norm is over all heads of a token together."""
        return False

    @property
    def query_scale(self) -> float:
        """Return a factor for q, on top of 1 / sqrt(head_dim) in the scores: of the norm of q,
        with `norm_offset`.
        """
        return 1.0

    @property
    def norm_placement(self) -> str:
        """Return where a block has norms: "before" attention and feed-forward, "after" them, or
        "around" them.
        """
        return "before"

    @property
    def norm_offset(self) -> bool:
        """Return whether RMSNorms multiply by 1 + weight."""
        return False

    @property
    def activation(self) -> str:
        """Return the function of the feed-forward's gate: "silu", or "gelu_tanh"."""
        return "silu"

    @property
    def embedding_scale(self) -> float:
        """Return a factor for embeddings, before the first block."""
        return 1.0

    @property
    def is_latent(self) -> bool:
        """Return whether keys and values come from a latent (`deepseek_args`)."""
        return False

    @property
    def neighbours_rotate(self) -> bool:
        """Return whether pairs that rotate together are neighbours (`llama4`)."""
        return False

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_width(self) -> int:
        """`ffn_dim`, or the rule of Llama's reference code: int(2 * 4 * dim / 3) times the
        multiplier, rounded up.
        """
        if self.ffn_dim is not None:
            return self.ffn_dim
        width = int(self.ffn_dim_multiplier * int(2 * 4 * self.dim / 3))
        return -(-width // self.multiple_of) * self.multiple_of

    @property
    def published_context(self) -> int:
        """Tokens of context of the published models with this RoPE; 0: there are none."""
        if isinstance(self.rope_scaling, RopeScaling):
            # 131072 of Llama 3.1 and 3.2.
            return 16 * self.rope_scaling.original_context
        return {1e4: 4096, 5e5: 8192}.get(self.rope_theta, 0)

    @property
    def context(self) -> int:
        """Return `max_position_embeddings` of config.json: the published context, or `max_seq_len`
        where that is more; with some scalings, what they make of it.
        """
        context = max(self.max_seq_len, self.published_context)
        return context if self.rope_scaling is None else self.rope_scaling.positions(context)

    def deciding(self) -> dict[str, Any]:
        """Return field → value of all that decides shapes or logits, with the rules of Llama worked
        out.
        """
        kept = (
            "dim",
            "n_layers",
            "n_heads",
            "vocab_size",
            "norm_eps",
            "rope_theta",
            "rope_scaling",
            "tied",
            "window",
        )
        found = {name: getattr(self, name) for name in kept}
        found["n_kv_heads"] = self.kv_heads
        found["ffn_dim"] = self.ffn_width
        found["norm_type"] = "rmsnorm" if self.norm_type == "fused_rmsnorm" else self.norm_type
        if "head_dim" in self.__dataclass_fields__:
            found["head_dim"] = self.head_dim
        return found

    @property
    def n_vocab(self) -> int:
        """`vocab_size`, or a ShapeError while it is still to be taken from a tokenizer."""
        if self.vocab_size is None:
            message = (
                "this flavor takes its vocabulary from the tokenizer: pass vocab_size or "
                "tokenizer_size"
            )
            raise ShapeError(Problem("model", "vocab_size", message))
        return self.vocab_size

    # The parameters and FLOPs of a block: of `of_block`

    def attention_linears(self) -> dict[str, Size]:
        """Return name in a block → size of attention's linears, in the model's order."""
        heads = self.n_heads * self.head_dim
        groups = self.kv_heads * self.head_dim
        return {
            "attention.wq": Size(self.dim, heads),
            "attention.wk": Size(self.dim, groups),
            "attention.wv": Size(self.dim, groups),
            "attention.wo": Size(heads, self.dim),
        }

    def attention_extras(self) -> dict[str, int]:
        """Return name in a block → length of attention's vectors: norms, biases."""
        if not self.qk_norm:
            return {}
        heads = self.n_heads if self.qk_norm_whole else 1
        groups = self.kv_heads if self.qk_norm_whole else 1
        return {
            "attention.q_norm": heads * self.head_dim,
            "attention.k_norm": groups * self.head_dim,
        }

    def attention_flops(self, seq_len: int) -> int:
        """Return the FLOPs of scores and weighted values for one training token.

        Causality is not discounted; keys outside the window are not counted.
        """
        return 12 * self.n_heads * self.head_dim * min(seq_len, self.window or seq_len)

    def block_norms(self) -> dict[str, int]:
        """Return name in a block → length of the norms on the residual stream."""
        if self.norm_type == "np_layernorm":
            return {}
        return dict.fromkeys(NORM_NAMES[self.norm_placement], self.dim)

    def feed_forward_linears(self) -> dict[str, Size]:
        """Return name in a block → size of the feed-forward's linears, in the model's order."""
        return {
            "feed_forward.w1": Size(self.dim, self.ffn_width),
            "feed_forward.w2": Size(self.ffn_width, self.dim),
            "feed_forward.w3": Size(self.dim, self.ffn_width),
        }

    def feed_forward_extras(self) -> dict[str, Size]:
        """Return name in a block → size of what else the feed-forward has; a vector has one input.

        Of a stack it is the size of each matrix.
        """
        return {}

    def feed_forward_parameters(self) -> tuple[int, int]:
        """Return the parameters of a block's feed-forward, and those of them that one token is
        multiplied by.
        """
        sizes = self.feed_forward_linears().values()
        count = sum(size.in_features * size.out_features for size in sizes)
        return count, count


def block_names(args: LlamaArgs) -> list[str]:
    """Return the decoder blocks in the order they run."""
    return [f"layers.{i}" for i in range(args.n_layers)]
