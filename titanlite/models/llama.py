"""Llama 2, 3, 3.1 and 3.2: arguments, initial weights, how a model is divided, published sizes.

Other families of decoders subclass `LlamaArgs` and give `decoder_spec` what differs. No torch here:
`titanlite.models.layers` has the modules, `llama_hf` the names of Hugging Face, `counts` parameters
and FLOPs.
"""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.config.errors import Problem
from titanlite.models import counts
from titanlite.models.argument_fields import argument, out_of_range
from titanlite.models.rope_scaling import RopeScaling, Scaling
from titanlite.models.spec import Init, ModelSpec, ShapeError, Size, imported_when_called

if TYPE_CHECKING:
    from typing_extensions import Self

    from titanlite.models.llama_hf import HFTable

#: torch runs both as one kernel.
NORM_TYPES = ("rmsnorm", "fused_rmsnorm")
_BEFORE = ("attention_norm", "ffn_norm")
_AFTER = ("attention_post_norm", "ffn_post_norm")
#: Value of `norm_placement` → names of the norms of a block.
NORM_NAMES = {"before": _BEFORE, "after": _AFTER, "around": (*_BEFORE, *_AFTER)}


class Rotary(NamedTuple):
    """Arguments that rotary tables depend on, besides length."""

    #: Numbers of a head that rotate.
    width: int
    theta: float
    scaling: Scaling | None


class AttentionKind(NamedTuple):
    """The rotation and the mask that blocks share."""

    window: int | None
    #: None: positions rotate nothing.
    rotary: Rotary | None


@dataclass(frozen=True)
class LlamaArgs:
    """A decoder's shape and arithmetic, and a few numbers of training.

    A field's metadata tells its rules (`titanlite.models.argument_fields`). Attributes without a
    field are fixed for a family.
    """

    dim: int
    n_layers: int
    n_heads: int
    #: Key/value heads shared by groups of query heads; None: as many as query heads.
    n_kv_heads: int | None = argument(None, decides="kv_heads")
    #: Hidden width of the feed-forward; None: Llama's rule, see `ffn_width`.
    ffn_dim: int | None = argument(None, decides="ffn_width")
    ffn_dim_multiplier: float = argument(1.0, decides="")
    multiple_of: int = argument(256, decides="")
    #: Vocabulary entries; None only in a flavor that takes the tokenizer's.
    vocab_size: int | None = None
    norm_eps: float = 1e-5
    norm_type: str = argument("rmsnorm", decides="")
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    #: The head is the transposed embedding.
    tied: bool = False
    #: Positions that the RoPE tables hold, in tokens.
    max_seq_len: int = argument(2048, of_training=True)

    def __post_init__(self) -> None:
        """Raise ShapeError with all numbers that make no decoder."""
        wrong = out_of_range(self)
        if self.norm_type not in NORM_TYPES:
            wrong.append(
                f"norm_type must be one of {', '.join(NORM_TYPES)}, got {self.norm_type!r}"
            )
        wrong = wrong or self._problems_of_derived()
        if wrong:
            raise ShapeError(*wrong)

    def _problems_of_derived(self) -> list[str]:
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
        """Return the arguments of block `index`; families whose blocks differ override it."""
        return self

    def blocks(self) -> dict[str, Self]:
        return {f"layers.{index}": self.of_block(index) for index in range(self.n_layers)}

    # The derived numbers are properties, so that replacing `dim` or `n_heads` can never leave a
    # stale one behind.

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def window(self) -> int | None:
        """Tokens that a token attends to, itself included; None: all."""
        return None

    @property
    def rotary(self) -> Rotary | None:
        """The rotary tables of a block (of `of_block`); None: no rotation."""
        return Rotary(self.head_dim, self.rope_theta, self.rope_scaling)

    @property
    def attention_kind(self) -> AttentionKind:
        """Return the key by which blocks share rotation and mask."""
        return AttentionKind(self.window, self.rotary)

    def rotaries(self) -> list[Rotary | None]:
        """The different rotary tables, in the order of blocks."""
        return list(dict.fromkeys(block.rotary for block in self.blocks().values()))

    #: q and k pass through an RMSNorm before the rotation: each head by itself, or all heads of a
    #: token together.
    qk_norm = False
    qk_norm_whole = False
    #: Places of a block's norms: "before" attention and feed-forward, "after" or "around" them.
    norm_placement = "before"
    #: RMSNorms multiply by 1 + weight.
    norm_offset = False
    #: Function of the feed-forward's gate: "silu", or "gelu_tanh".
    activation = "silu"
    #: Keys and values come from a latent (`deepseek_v3`).
    is_latent = False
    #: Pairs that rotate together are neighbours (`llama4`).
    neighbours_rotate = False

    @property
    def query_scale(self) -> float:
        """A factor for q beside 1 / sqrt(head_dim): of q's norm with `norm_offset`."""
        return 1.0

    @property
    def embedding_scale(self) -> float:
        return 1.0

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_width(self) -> int:
        """`ffn_dim`, or Llama's rule: int(2 * 4 * dim / 3) times the multiplier, rounded up."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        width = int(self.ffn_dim_multiplier * int(2 * 4 * self.dim / 3))
        return -(-width // self.multiple_of) * self.multiple_of

    @property
    def published_context(self) -> int:
        """Tokens of context of the published models with this RoPE; 0: none."""
        if isinstance(self.rope_scaling, RopeScaling):
            # 131072 of Llama 3.1 and 3.2.
            return 16 * self.rope_scaling.original_context
        return {1e4: 4096, 5e5: 8192}.get(self.rope_theta, 0)

    @property
    def n_vocab(self) -> int:
        """`vocab_size`. Raises ShapeError before it is taken from a tokenizer."""
        if self.vocab_size is None:
            message = (
                "this flavor takes its vocabulary from the tokenizer: pass vocab_size or "
                "tokenizer_size"
            )
            raise ShapeError(Problem("model", "vocab_size", message))
        return self.vocab_size

    # The parameters and FLOPs of a block: of `of_block`

    def attention_linears(self) -> dict[str, Size]:
        """Return name in a block → size, in order."""
        heads = self.n_heads * self.head_dim
        groups = self.kv_heads * self.head_dim
        return {
            "attention.wq": Size(self.dim, heads),
            "attention.wk": Size(self.dim, groups),
            "attention.wv": Size(self.dim, groups),
            "attention.wo": Size(heads, self.dim),
        }

    def attention_extras(self) -> dict[str, int]:
        """Return name in a block → length of norms and biases."""
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
        """Return name in a block → length of the residual stream's norms."""
        return dict.fromkeys(NORM_NAMES[self.norm_placement], self.dim)

    def feed_forward_linears(self) -> dict[str, Size]:
        """Return name in a block → size, in order."""
        return {
            "feed_forward.w1": Size(self.dim, self.ffn_width),
            "feed_forward.w2": Size(self.ffn_width, self.dim),
            "feed_forward.w3": Size(self.dim, self.ffn_width),
        }

    def feed_forward_extras(self) -> dict[str, Size]:
        """Return name in a block → size of other parameters.

        A vector has one input; of a stack it is the size of each matrix.
        """
        return {}

    def parameters(self) -> dict[str, Size]:
        """Return name in a block, without `.weight`, → size; a vector has one input."""
        vectors = {**self.attention_extras(), **self.block_norms()}
        return {
            **self.attention_linears(),
            **{name: Size(1, length) for name, length in vectors.items()},
            **self.feed_forward_linears(),
            **self.feed_forward_extras(),
        }

    def feed_forward_parameters(self) -> tuple[int, int]:
        """Return the feed-forward's parameters, and those that one token is multiplied by."""
        sizes = self.feed_forward_linears().values()
        count = sum(size.in_features * size.out_features for size in sizes)
        return count, count


def block_names(args: LlamaArgs) -> list[str]:
    """Return the decoder blocks in order."""
    return list(args.blocks())


def linears(args: LlamaArgs) -> dict[str, Size]:
    """Return name → size of every linear, in order."""
    found: dict[str, Size] = {}
    for name, block in args.blocks().items():
        for kind, size in {**block.attention_linears(), **block.feed_forward_linears()}.items():
            found[f"{name}.{kind}"] = size
    found["output"] = Size(args.dim, args.n_vocab)
    return found


#: Standard deviation of matrices, and where a distribution is cut, in standard deviations.
_STD = 0.02
_CUT = 3.0
_IN_BLOCK = re.compile(r"layers\.(\d+)\.(.+?)(?:\.weight)?")
#: Linears that write to the residual stream, or gate it.
_RESIDUAL = ("wo", "w2", "w3", "down")


def init_rule(name: str, args: LlamaArgs) -> Init:
    """Return how the parameter of that full name is drawn.

    Embedding: normal, std 1. Matrices: truncated normal, std 0.02. Those that write to the residual
    stream (wo, w2, and w3 that gates w2's input) are divided by sqrt(2 (layer + 1)): the stream's
    variance grows evenly with depth. Head: dim ** -0.5, for logits of order one, also when tied.
    Norms: one. Biases and sinks: zero.

    Raises KeyError for an unknown name.
    """
    if name == "tok_embeddings.weight" and not args.tied:
        return Init("normal", std=1.0)
    if name in ("tok_embeddings.weight", "output.weight"):
        return _truncated(args.dim**-0.5)
    norm = Init("zeros" if args.norm_offset else "ones")
    if name == "norm.weight":
        return norm
    match = _IN_BLOCK.fullmatch(name)
    index = int(match[1]) if match else args.n_layers
    if match is None or index >= args.n_layers or match[2] not in args.of_block(index).parameters():
        raise KeyError(f"no initialisation is known for a parameter called {name!r}")
    leaf = match[2].rpartition(".")[2]
    if leaf.endswith("norm"):
        return norm
    if leaf.endswith(("bias", "sinks")):
        return Init("zeros")
    return _truncated(_STD / math.sqrt(2 * (index + 1)) if leaf in _RESIDUAL else _STD)


def _truncated(std: float) -> Init:
    return Init("trunc_normal", std=std, bound=_CUT * std)


def tied(args: LlamaArgs) -> dict[str, str]:
    """Return parameter → the name that its shared tensor is drawn and saved under."""
    return {"output.weight": "tok_embeddings.weight"} if args.tied else {}


def sublayer_names(args: LlamaArgs) -> list[str]:
    """Return the two halves of each block, in order."""
    names = []
    for block in args.blocks():
        names += [f"{block}.attention", f"{block}.feed_forward"]
    return names


def fsdp_units(args: LlamaArgs) -> list[tuple[str, ...]]:
    """Return the modules to shard and gather together, in the order they last run.

    The final norm travels with the head. Modules that share a weight are one unit.
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
    """Return module name in a block → how tensor parallelism divides it."""
    kinds = dict(_BLOCK)
    if args.qk_norm:
        kind = "all heads" if args.qk_norm_whole else "heads"
        kinds["attention.q_norm"] = kind
        kinds["attention.k_norm"] = kind
    if args.norm_placement != "before":
        kinds["attention_post_norm"] = "added"
        kinds["ffn_post_norm"] = "added"
    return kinds


def tensor_plan(of_block: Callable[[Any], Mapping[str, str]], args: LlamaArgs) -> dict[str, str]:
    """Return module name → kind of `titanlite.parallel.tensor.apply_tp`, in the order modules run.

    of_block: those of a block, from its arguments.
    """
    plan = {"tok_embeddings": "embedding"}
    for block, own in args.blocks().items():
        for name, kind in of_block(own).items():
            plan[f"{block}.{name}"] = kind
    plan["norm"] = "sequence"
    plan["output"] = "head"
    return plan


def tensor_sizes(args: LlamaArgs) -> dict[str, int]:
    """Return the numbers that tensor-parallel ranks must divide."""
    return {
        "n_heads": args.n_heads,
        "n_kv_heads": args.kv_heads,
        "the feed-forward's width": args.ffn_width,
    }


def decoder_spec(
    name: str,
    flavors: Mapping[str, LlamaArgs],
    hf: HFTable | None = None,
    block_plan: Callable[[Any], Mapping[str, str]] = block_plan,
    **different: Any,
) -> ModelSpec:
    """Return the spec of a family of decoders.

    hf: None: Llama's. block_plan: a block's tensor parallelism. different: fields unlike Llama's.
    """
    if hf is not None:
        own = {"hf_names": hf.hf_names, "hf_config": hf.hf_config, "args_from_hf": hf.args_from_hf}
        different = {**own, **different}
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
        tensor_plan=functools.partial(tensor_plan, block_plan),
        tensor_sizes=tensor_sizes,
        sublayer_names=sublayer_names,
        pipeline_costs=counts.pipeline_costs,
        context_parallel=True,
        tied=tied,
        hf_names=imported_when_called("titanlite.models.llama_hf:LLAMA.hf_names"),
        hf_config=imported_when_called("titanlite.models.llama_hf:LLAMA.hf_config"),
        args_from_hf=imported_when_called("titanlite.models.llama_hf:LLAMA.args_from_hf"),
    )
    return replace(spec, **different)


def _llama2(dim: int, n_layers: int, n_heads: int, **rest: Any) -> LlamaArgs:
    return LlamaArgs(dim, n_layers, n_heads, **{"vocab_size": 32000, "rope_theta": 1e4, **rest})


def _llama3(dim: int, n_layers: int, n_heads: int, **rest: Any) -> LlamaArgs:
    return LlamaArgs(dim, n_layers, n_heads, **{"vocab_size": 128256, "rope_theta": 5e5, **rest})


LLAMA2 = decoder_spec(
    "llama2",
    {
        "debugmodel": _llama2(256, 8, 16, vocab_size=None),
        "271M": _llama2(1024, 16, 8),
        "1B": _llama2(2048, 18, 16),
        "7B": _llama2(4096, 32, 32),
        "13B": _llama2(5120, 40, 40),
        "26B": _llama2(5120, 80, 40),
        "70B": _llama2(8192, 80, 64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
    },
)

_DEBUG = _llama3(256, 8, 16, vocab_size=None)
_8B = _llama3(4096, 32, 32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024)
_70B = _llama3(8192, 80, 64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096)
#: Rotary scaling of Llama 3.1, and of Llama 3.2.
_LONG = RopeScaling(factor=8.0)
_LONGER = RopeScaling(factor=32.0)
_405B = _llama3(
    16384, 126, 128, n_kv_heads=8, ffn_dim_multiplier=1.2, multiple_of=4096, rope_scaling=_LONG
)
_1B = _llama3(2048, 16, 32, n_kv_heads=8, ffn_dim_multiplier=1.5, rope_scaling=_LONGER, tied=True)
_3B = _llama3(3072, 28, 24, n_kv_heads=8, rope_scaling=_LONGER, tied=True)
#: "8B" and "70B" are Llama 3; Llama 3.1 and 3.2 say so in their names.
LLAMA3 = decoder_spec(
    "llama3",
    {
        "debugmodel": _DEBUG,
        "8B": _8B,
        "70B": _70B,
        "3.1-8B": replace(_8B, rope_scaling=_LONG),
        "3.1-70B": replace(_70B, rope_scaling=_LONG),
        "3.1-debugmodel": replace(_DEBUG, n_layers=6, rope_scaling=_LONG),
        "3.1-405B": _405B,
        "405B": _405B,
        "3.2-1B": _1B,
        "1B": _1B,
        "3.2-3B": _3B,
        "3B": _3B,
    },
)
