"""The sizes of the Llama family, as plain numbers: arguments, published shapes, parameter and FLOP counts.

No torch here, so that the config can be checked without it.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from titanlite import exit_codes

NORM_TYPES = ("rmsnorm", "layernorm", "np_layernorm", "fused_rmsnorm")


class ShapeError(ValueError):
    """Numbers that make no decoder, or a name that no family has; the message says which."""

    exit_code = exit_codes.CONFIG


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the RoPE frequencies (Llama 3 model card; `transformers` calls it "llama3")."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: Tokens of context the model was first trained with.
    original_context: int = 8192

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise ShapeError(f"rope_scaling: factor must be at least 1, got {self.factor}")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ShapeError(
                "rope_scaling: needs 0 < low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.original_context < 1:
            raise ShapeError(f"rope_scaling: original_context must be positive, got {self.original_context}")

    @classmethod
    def parse(cls, value: object) -> RopeScaling | None:
        """What a TOML file may say: a table of this class's fields, a bare factor (1: no scaling), or "none"."""
        if value is None or isinstance(value, RopeScaling):
            return value
        if isinstance(value, str) and value == "none":
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return None if value == 1 else cls(factor=float(value))
        if isinstance(value, Mapping):
            if "factor" not in value:
                raise ShapeError('rope_scaling: the table needs a "factor"')
            return cls(**_checked_fields(cls, value, where="rope_scaling"))
        raise ShapeError(f'rope_scaling: expected a table, a factor or "none", got {value!r}')


@dataclass(frozen=True)
class LlamaArgs:
    """Everything that determines a decoder's shape and arithmetic."""

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

    # The derived numbers are properties, so that replacing `dim` or `n_heads` can never leave a stale one behind.

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_width(self) -> int:
        """`ffn_dim`, or the rule of Llama's reference code: int(2 * 4 * dim / 3) times the multiplier, rounded up."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        width = int(self.ffn_dim_multiplier * int(2 * 4 * self.dim / 3))
        return -(-width // self.multiple_of) * self.multiple_of

    @property
    def context(self) -> int:
        """Tokens of context of the published models with this RoPE, or `max_seq_len` where that is more."""
        if self.rope_scaling is not None:
            return max(self.max_seq_len, 16 * self.rope_scaling.original_context)  # 131072 of Llama 3.1 and 3.2
        return max(self.max_seq_len, {1e4: 4096, 5e5: 8192}.get(self.rope_theta, 0))  # Llama 2, Llama 3

    @property
    def n_vocab(self) -> int:
        """`vocab_size`, or a ShapeError while it is still to be taken from a tokenizer."""
        if self.vocab_size is None:
            raise ShapeError("this flavor takes its vocabulary from the tokenizer: pass vocab_size or tokenizer_size")
        return self.vocab_size


_LLAMA3_VOCAB = 128256


def _llama2(dim: int, n_layers: int, n_heads: int, **rest: typing.Any) -> LlamaArgs:
    return LlamaArgs(dim, n_layers, n_heads, **{"vocab_size": 32000, "rope_theta": 1e4, **rest})


def _llama3(dim: int, n_layers: int, n_heads: int, **rest: typing.Any) -> LlamaArgs:
    return LlamaArgs(dim, n_layers, n_heads, **{"vocab_size": _LLAMA3_VOCAB, "rope_theta": 5e5, **rest})


def _shapes() -> dict[str, Mapping[str, LlamaArgs]]:
    llama2 = {
        "debugmodel": _llama2(256, 8, 16, vocab_size=None),
        "271M": _llama2(1024, 16, 8),
        "1B": _llama2(2048, 18, 16),
        "7B": _llama2(4096, 32, 32),
        "13B": _llama2(5120, 40, 40),
        "26B": _llama2(5120, 80, 40),
        "70B": _llama2(8192, 80, 64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
    }
    llama3 = {
        "debugmodel": _llama3(256, 8, 16, vocab_size=None),
        "8B": _llama3(4096, 32, 32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024),
        "70B": _llama3(8192, 80, 64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
    }
    for size in ("8B", "70B"):
        llama3[f"3.1-{size}"] = replace(llama3[size], rope_scaling=RopeScaling(factor=8.0))
    llama3["3.1-debugmodel"] = replace(llama3["debugmodel"], n_layers=6, rope_scaling=RopeScaling(factor=8.0))
    llama3["3.1-405B"] = llama3["405B"] = _llama3(
        16384, 126, 128, n_kv_heads=8, ffn_dim_multiplier=1.2, multiple_of=4096, rope_scaling=RopeScaling(factor=8.0)
    )
    llama3["3.2-1B"] = llama3["1B"] = _llama3(
        2048, 16, 32, n_kv_heads=8, ffn_dim_multiplier=1.5, rope_scaling=RopeScaling(factor=32.0), tied=True
    )
    llama3["3.2-3B"] = llama3["3B"] = _llama3(
        3072, 28, 24, n_kv_heads=8, rope_scaling=RopeScaling(factor=32.0), tied=True
    )
    return {"llama2": types.MappingProxyType(llama2), "llama3": types.MappingProxyType(llama3)}


#: Family → flavor → arguments. "8B" and "70B" of llama3 are Llama 3; Llama 3.1 and 3.2 say so in their names.
SHAPES: Mapping[str, Mapping[str, LlamaArgs]] = types.MappingProxyType(_shapes())


def resolve_args(
    family: str,
    flavor: str,
    overrides: Mapping[str, object] | None = None,
    *,
    vocab_size: int | None = None,
    tokenizer_size: int | None = None,
    max_seq_len: int | None = None,
) -> LlamaArgs:
    """The arguments of one flavor with a user's changes, checked.

    `overrides`: fields of `LlamaArgs` to replace; widths that follow from them (feed-forward, head) follow.
    `vocab_size`: replaces the flavor's. `tokenizer_size`: ids the tokenizer can produce; it becomes the
    vocabulary of a flavor that has none of its own (`debugmodel`), and must not exceed any other.
    `max_seq_len`: longest sequence in tokens that the RoPE tables must serve.

    Raises ShapeError for an unknown name, a wrong type, or numbers that make no decoder.
    """
    flavors = SHAPES.get(family)
    if flavors is None:
        raise ShapeError(f"unknown model {family!r}{_nearest(family, SHAPES)}; there are {', '.join(SHAPES)}")
    base = flavors.get(flavor)
    if base is None:
        raise ShapeError(
            f"unknown flavor {flavor!r} of {family}{_nearest(flavor, flavors)}; there are {', '.join(flavors)}"
        )

    changes = _checked_fields(LlamaArgs, overrides or {}, where="model overrides")
    without_effect = [name for name in ("ffn_dim_multiplier", "multiple_of") if name in changes]
    if changes.get("ffn_dim") is not None and without_effect:
        raise ShapeError(f"model overrides: ffn_dim is given, so {' and '.join(without_effect)} would do nothing")
    if vocab_size is not None:
        if changes.get("vocab_size", vocab_size) != vocab_size:
            raise ShapeError(f"vocab_size is {vocab_size} but the overrides say {changes['vocab_size']}")
        changes["vocab_size"] = vocab_size
    if max_seq_len is not None:
        wanted = changes.setdefault("max_seq_len", max_seq_len)
        if wanted < max_seq_len:
            raise ShapeError(f"max_seq_len = {wanted} is shorter than the sequences of {max_seq_len} tokens")
    args = replace(base, **changes)
    if args.vocab_size is None:
        args = replace(args, vocab_size=tokenizer_size)
    _check(args, tokenizer_size)
    return args


def as_record(family: str, args: LlamaArgs) -> dict[str, typing.Any]:
    """A model as JSON has it; `from_record` reads it."""
    return {"family": family, **asdict(args)}


def from_record(record: Mapping[str, typing.Any]) -> tuple[str, LlamaArgs]:
    """Family and arguments. Raises ShapeError for what describes no model."""
    values = dict(record)
    family = values.pop("family", None)
    if family not in SHAPES:
        raise ShapeError(f"unknown model {family!r}; there are {', '.join(SHAPES)}")
    checked = _checked_fields(LlamaArgs, values, where="model")
    if missing := [name for name in ("dim", "n_layers", "n_heads") if name not in checked]:
        raise ShapeError(f"model: {', '.join(missing)} is missing")
    args = LlamaArgs(**checked)
    _check(args, None)
    return family, args


def count_parameters(args: LlamaArgs) -> int:
    """Parameters of the decoder, closed form; a tied head is counted once."""
    norm = 0 if args.norm_type == "np_layernorm" else args.dim
    heads = args.n_heads * args.head_dim
    attention = args.dim * (2 * heads + 2 * args.kv_heads * args.head_dim)
    block = attention + 3 * args.dim * args.ffn_width + 2 * norm
    return args.n_layers * block + norm + args.n_vocab * args.dim * (1 if args.tied else 2)


def flops_per_token(args: LlamaArgs, seq_len: int) -> int:
    """Model FLOPs of one training token, forward and backward.

    6 per weight that is multiplied (PaLM, appendix B) plus 12 * layers * heads * head_dim * seq_len for attention,
    causality not discounted. The embedding is a look-up and costs nothing; a tied one still costs as the head.
    """
    embedding = 0 if args.tied else args.n_vocab * args.dim
    attention = 12 * args.n_layers * args.n_heads * args.head_dim * seq_len
    return 6 * (count_parameters(args) - embedding) + attention


def _check(args: LlamaArgs, tokenizer_size: int | None) -> None:
    """Refuse numbers that make no decoder, all of them at once."""
    wrong = []
    for name in ("dim", "n_layers", "n_heads", "kv_heads", "ffn_dim", "multiple_of", "vocab_size", "max_seq_len"):
        value = getattr(args, name)
        if value is not None and value < 1:
            wrong.append(f"{name} must be positive, got {value}")
    for name in ("norm_eps", "rope_theta", "ffn_dim_multiplier"):
        if not 0 < getattr(args, name) < math.inf:
            wrong.append(f"{name} must be positive, got {getattr(args, name)}")
    if args.norm_type not in NORM_TYPES:
        wrong.append(f"norm_type must be one of {', '.join(NORM_TYPES)}, got {args.norm_type!r}")
    if not wrong:
        if args.ffn_width < 1:
            wrong.append(f"ffn_width must be positive, got {args.ffn_width}")
        if args.dim % args.n_heads:
            wrong.append(f"n_heads = {args.n_heads} does not divide dim = {args.dim}")
        elif args.head_dim % 2:
            wrong.append(f"dim / n_heads = {args.head_dim} is odd: RoPE rotates pairs")
        if args.n_heads % args.kv_heads:
            wrong.append(f"n_kv_heads = {args.kv_heads} does not divide n_heads = {args.n_heads}")
        if tokenizer_size is not None and args.vocab_size is not None and tokenizer_size > args.vocab_size:
            wrong.append(
                f"the tokenizer has {tokenizer_size} entries but the model's vocabulary only {args.vocab_size}: "
                "choose the model's own tokenizer, or set model.vocab_size"
            )
    if wrong:
        raise ShapeError("model: " + "; ".join(wrong))


def _checked_fields(cls: type, values: Mapping[str, object], *, where: str) -> dict[str, typing.Any]:
    """Values for fields of `cls`, each of the annotated type (an int will do for a float, nothing else converts)."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    checked: dict[str, typing.Any] = {}
    for name, value in values.items():
        if name not in names:
            raise ShapeError(f"{where}: unknown field {name!r}{_nearest(name, names)}; there are {', '.join(names)}")
        if name == "rope_scaling":
            checked[name] = RopeScaling.parse(value)
            continue
        allowed = typing.get_args(hints[name]) or (hints[name],)
        if float in allowed and type(value) is int:
            value = float(value)
        if type(value) not in allowed:
            expected = " or ".join("none" if t is type(None) else t.__name__ for t in allowed)
            raise ShapeError(f"{where}: {name} must be {expected}, got {value!r}")
        checked[name] = value
    return checked


def _nearest(word: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
