"""The Llama family (Llama 2, 3, 3.1, 3.2): arguments, initial weights, and how it is divided.

Other families of decoders subclass `LlamaArgs` and give `decoder_spec` what differs. No torch here;
`titanlite.models.layers` has the modules, `llama_shapes` the published sizes, `counts` parameters
and FLOPs, `llama_hf` other people's names of weights.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace

from titanlite.models.args import checked_fields
from titanlite.models.spec import Init, Misfit, ModelSpec, ShapeError, Size, shown

if typing.TYPE_CHECKING:
    from torch import nn

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
        low, high = self.low_freq_factor, self.high_freq_factor
        if not 0.0 < low < high:
            raise _scaling_error(
                f"needs 0 < low_freq_factor < high_freq_factor, got {low} and {high}"
            )
        if self.original_context < 1:
            raise _scaling_error(f"original_context must be positive, got {self.original_context}")

    @classmethod
    def parse(cls, value: object) -> RopeScaling | None:
        """Return the scaling of a table, of a bare factor (1: none) or of "none"."""
        if value is None or isinstance(value, RopeScaling) or value == "none":
            return None if value == "none" else value  # type: ignore[return-value]
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
        if not wrong:
            if self.ffn_width < 1:
                wrong.append(f"ffn_width must be positive, got {self.ffn_width}")
            if self.dim % self.n_heads and "head_dim" not in self.__dataclass_fields__:
                wrong.append(f"n_heads = {self.n_heads} does not divide dim = {self.dim}")
            elif self.head_dim < 1 or self.head_dim % 2:
                wrong.append(
                    f"head_dim = {self.head_dim} is no positive even number: RoPE rotates pairs"
                )
            if self.n_heads % self.kv_heads:
                wrong.append(
                    f"n_kv_heads = {self.kv_heads} does not divide n_heads = {self.n_heads}"
                )
        if wrong:
            raise ShapeError(*map(Misfit, wrong))

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
        if self.rope_scaling is not None:
            return max(
                self.max_seq_len, 16 * self.rope_scaling.original_context
            )  # 131072 of Llama 3.1 and 3.2
        return max(
            self.max_seq_len, {1e4: 4096, 5e5: 8192}.get(self.rope_theta, 0)
        )  # Llama 2, Llama 3

    def deciding(self) -> dict[str, typing.Any]:
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
        return {
            **{name: getattr(self, name) for name in kept},
            "n_kv_heads": self.kv_heads,
            "ffn_dim": self.ffn_width,
            "norm_type": "rmsnorm" if self.norm_type == "fused_rmsnorm" else self.norm_type,
            **({"head_dim": self.head_dim} if "head_dim" in self.__dataclass_fields__ else {}),
        }

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
        count = sum(
            size.in_features * size.out_features for size in self.feed_forward_linears().values()
        )
        return count, count


def block_linears(args: LlamaArgs) -> dict[str, Size]:
    """Return name → size of the linears of one block, in the model's order."""
    heads, groups = args.n_heads * args.head_dim, args.kv_heads * args.head_dim
    return {
        "attention.wq": Size(args.dim, heads),
        "attention.wk": Size(args.dim, groups),
        "attention.wv": Size(args.dim, groups),
        "attention.wo": Size(heads, args.dim),
        **args.feed_forward_linears(),
    }


def linears(args: LlamaArgs) -> dict[str, Size]:
    """Return name → size of every linear, in the model's order."""
    block = block_linears(args)
    blocks = {
        f"{name}.{linear}": size for name in block_names(args) for linear, size in block.items()
    }
    return {**blocks, "output": Size(args.dim, args.n_vocab)}


_STD = 0.02
#: Truncation in standard deviations.
_CUT = 3.0

_LINEAR = re.compile(r"layers\.(\d+)\.(?:attention\.w[qkvo]|feed_forward\.w[123])\.weight")
_NORM = re.compile(r"(?:layers\.(\d+)\.(?:attention_norm|ffn_norm)|norm)\.weight")
_HEAD_NORM = re.compile(r"layers\.(\d+)\.attention\.[qk]_norm\.weight")


def init_rule(name: str, args: LlamaArgs) -> Init:
    """Return how the parameter of that full name is drawn.

    Embedding: normal, std 1. Linears: truncated normal, std 0.02, and those that write to the
    residual stream
    (wo, w2, and w3 that gates w2's input) divided by sqrt(2 (layer + 1)), so that the stream's
    variance grows
    evenly with depth. Head: dim ** -0.5, for logits of order one; a tied weight is drawn as a head.
    Norms: one.

    Raises KeyError for a name that no Llama has.
    """
    head = _truncated(args.dim**-0.5)
    if name == "tok_embeddings.weight":
        return head if args.tied else Init("normal", std=1.0)
    if name == "output.weight":
        return head
    match = (
        _LINEAR.fullmatch(name)
        or _NORM.fullmatch(name)
        or (_HEAD_NORM.fullmatch(name) if args.qk_norm else None)
    )
    if match is None or int(match[1] or 0) >= args.n_layers:
        raise KeyError(f"no initialisation is known for a parameter called {name!r}")
    if "norm" in name:
        return Init("ones")
    residual = name.endswith(("wo.weight", "w2.weight", "w3.weight"))
    return linear_init(int(match[1]) if residual else None)


def linear_init(residual_layer: int | None = None) -> Init:
    """Return how a block's linear is drawn.

    residual_layer: of one that writes to the residual stream.
    """
    return _truncated(
        _STD if residual_layer is None else _STD / math.sqrt(2 * (residual_layer + 1))
    )


def _truncated(std: float) -> Init:
    return Init("trunc_normal", std=std, bound=_CUT * std)


def tied(args: LlamaArgs) -> dict[str, str]:
    """Return the name of a parameter that shares its tensor → the name that the tensor is drawn and
    saved under.
    """
    return {"output.weight": "tok_embeddings.weight"} if args.tied else {}


def block_names(args: LlamaArgs) -> list[str]:
    """Return the decoder blocks in the order they run."""
    return [f"layers.{i}" for i in range(args.n_layers)]


def sublayer_names(args: LlamaArgs) -> list[str]:
    """Return the two halves of each decoder block, in the order they run."""
    return [
        f"{block}.{half}" for block in block_names(args) for half in ("attention", "feed_forward")
    ]


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


def tensor_plan(args: LlamaArgs) -> dict[str, str]:
    """Return module name → how tensor parallelism divides it, in the order the modules run.

    The kinds are those of `titanlite.parallel.tensor.apply_tp`.
    """
    plan = {
        **_BLOCK,
        **(
            dict.fromkeys(("attention.q_norm", "attention.k_norm"), "heads") if args.qk_norm else {}
        ),
    }
    blocks = {f"{block}.{name}": kind for block in block_names(args) for name, kind in plan.items()}
    return {"tok_embeddings": "embedding", **blocks, "norm": "sequence", "output": "head"}


def tensor_sizes(args: LlamaArgs) -> dict[str, int]:
    """Return the numbers that tensor-parallel ranks must divide, besides the vocabulary."""
    return {
        "n_heads": args.n_heads,
        "n_kv_heads": args.kv_heads,
        "the feed-forward's width": args.ffn_width,
    }


def _build(args: LlamaArgs) -> nn.Module:
    from titanlite.models.layers import Llama

    return Llama(args)


def decoder_spec(name: str, flavors: Mapping[str, LlamaArgs], **different: typing.Any) -> ModelSpec:
    """Return the spec of a family of decoders.

    different: fields of `ModelSpec` that are not as Llama's.
    """
    from titanlite.models import counts, llama_hf  # they import this module

    spec = ModelSpec(
        name=name,
        args_class=type(next(iter(flavors.values()))),
        flavors=types.MappingProxyType(dict(flavors)),
        build=_build,
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
        hf_names=llama_hf.hf_names,
        hf_config=llama_hf.hf_config,
        args_from_hf=llama_hf.args_from_hf,
    )
    return replace(spec, **different)
