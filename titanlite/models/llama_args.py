"""The arguments of a decoder of the Llama family. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from titanlite.models.fields import checked_fields
from titanlite.models.spec import Misfit, ShapeError, Size, shown

if TYPE_CHECKING:
    from titanlite.models.mixtral import MixtralArgs

NORM_TYPES = ("rmsnorm", "layernorm", "np_layernorm", "fused_rmsnorm")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the RoPE frequencies (Llama 3 model card; `transformers` calls it
    "llama3").
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: Tokens of context the model was first trained with.
    original_context: int = 8192

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise _scaling_error(f"factor must be at least 1, got {self.factor}")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            given = f"{self.low_freq_factor} and {self.high_freq_factor}"
            raise _scaling_error(f"needs 0 < low_freq_factor < high_freq_factor, got {given}")
        if self.original_context < 1:
            raise _scaling_error(f"original_context must be positive, got {self.original_context}")

    @classmethod
    def parse(cls, value: object) -> RopeScaling | None:
        """Return the scaling of a table, of a bare factor (1: none) or of "none"."""
        if value is None or value == "none":
            return None
        if isinstance(value, RopeScaling):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return None if value == 1 else cls(factor=float(value))
        if not isinstance(value, Mapping):
            raise _scaling_error(f'expected a table, a factor or "none", got {shown(value)}')
        if "factor" not in value:
            raise _scaling_error('the table needs a "factor"')
        return cls(**checked_fields(cls, value, "rope_scaling"))


def _scaling_error(message: str) -> ShapeError:
    return ShapeError(Misfit(message, "rope_scaling"))


@dataclass(frozen=True)
class LlamaArgs:
    """Everything that determines a decoder's shape and arithmetic.

    A family of its own makes fields of the properties `head_dim`, `window` and `qk_norm` in a
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
    rope_scaling: RopeScaling | None = None
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
        wrong = wrong or self._misfits_of_derived()
        if wrong:
            raise ShapeError(*map(Misfit, wrong))

    def _misfits_of_derived(self) -> list[str]:
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
    def qk_norm(self) -> bool:
        """Return whether each head's q and k pass through an RMSNorm of width `head_dim` before the
        rotation.
        """
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
    def context(self) -> int:
        """Tokens of context of the published models with this RoPE, or `max_seq_len` where that is
        more.
        """
        published = {1e4: 4096, 5e5: 8192}.get(self.rope_theta, 0)
        if self.rope_scaling is not None:
            # 131072 of Llama 3.1 and 3.2.
            published = 16 * self.rope_scaling.original_context
        return max(self.max_seq_len, published)

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
            raise ShapeError(Misfit(message, "vocab_size"))
        return self.vocab_size

    @property
    def has_experts(self) -> bool:
        return False

    def feed_forward_linears(self) -> dict[str, Size]:
        """Return name in a block → size of the feed-forward's linears, in the model's order."""
        return {
            "feed_forward.w1": Size(self.dim, self.ffn_width),
            "feed_forward.w2": Size(self.ffn_width, self.dim),
            "feed_forward.w3": Size(self.dim, self.ffn_width),
        }

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


def is_mixture(args: LlamaArgs) -> TypeGuard[MixtralArgs]:
    """Return whether experts take the place of feed-forwards, without an import of their family."""
    return args.has_experts
