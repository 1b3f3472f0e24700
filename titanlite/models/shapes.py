"""The sizes of the Llama family, as plain numbers: arguments, published shapes, parameter and FLOP counts.

No torch here, so that the config can be checked without it.
"""

from __future__ import annotations

import difflib
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace

from titanlite import exit_codes

if typing.TYPE_CHECKING:
    from titanlite.config.sections import Model

NORM_TYPES = ("rmsnorm", "layernorm", "np_layernorm", "fused_rmsnorm")


class Misfit(typing.NamedTuple):
    """One thing that is wrong with a model's arguments."""

    message: str
    #: The key of `[model]` to blame, as `flavor` or `overrides.dim`; empty where several are.
    field: str = ""
    advice: str = ""


class ShapeError(ValueError):
    """Numbers that make no decoder, or a name that no family has; `misfits` says which."""

    exit_code = exit_codes.CONFIG

    def __init__(self, *misfits: Misfit) -> None:
        self.misfits = misfits
        lines = [f"model{m.field and '.'}{m.field}: {m.message}{m.advice and '; '}{m.advice}" for m in misfits]
        super().__init__("; ".join(lines))


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
            raise _scaling_error(f"factor must be at least 1, got {self.factor}")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise _scaling_error(
                f"needs 0 < low_freq_factor < high_freq_factor, got {self.low_freq_factor} and {self.high_freq_factor}"
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
            raise _scaling_error(f'expected a table, a factor or "none", got {_shown(value)}')
        if "factor" not in value:
            raise _scaling_error('the table needs a "factor"')
        return cls(**_checked_fields(cls, value, "rope_scaling"))


def _scaling_error(message: str) -> ShapeError:
    return ShapeError(Misfit(message, "rope_scaling"))


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
            message = "this flavor takes its vocabulary from the tokenizer: pass vocab_size or tokenizer_size"
            raise ShapeError(Misfit(message, "vocab_size"))
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
        raise ShapeError(Misfit(f"no model {_shown(family)}", "name", _known(family, SHAPES)))
    base = flavors.get(flavor)
    if base is None:
        raise ShapeError(Misfit(f"{family} has no flavor {_shown(flavor)}", "flavor", _known(flavor, flavors)))

    changes = _checked_fields(LlamaArgs, overrides or {}, "overrides")
    without_effect = [name for name in ("ffn_dim_multiplier", "multiple_of") if name in changes]
    if changes.get("ffn_dim") is not None and without_effect:
        message = f"ffn_dim is given, so {' and '.join(without_effect)} would do nothing"
        raise ShapeError(Misfit(message, f"overrides.{without_effect[0]}"))
    if vocab_size is not None:
        if changes.get("vocab_size", vocab_size) != vocab_size:
            message = f"is {vocab_size}, but model.overrides.vocab_size = {changes['vocab_size']}"
            raise ShapeError(Misfit(message, "vocab_size"))
        changes["vocab_size"] = vocab_size
    if max_seq_len is not None:
        wanted = changes.setdefault("max_seq_len", max_seq_len)
        if wanted < max_seq_len:
            message = f"is {wanted}, shorter than the sequences of {max_seq_len} tokens"
            raise ShapeError(Misfit(message, "overrides.max_seq_len"))
    args = replace(base, **changes)
    if args.vocab_size is None:
        args = replace(args, vocab_size=tokenizer_size)
    _check(args, tokenizer_size)
    return args


def model_args(model: Model, max_seq_len: int, tokenizer_size: int | None = None) -> LlamaArgs:
    """Return the arguments of the model that section `[model]` describes; the rest is as for `resolve_args`."""
    own = {"norm_type": model.norm_type, "rope_scaling": model.rope_scaling}
    overrides = {**model.overrides, **{name: value for name, value in own.items() if value is not None}}
    return resolve_args(
        model.name,
        model.flavor,
        overrides,
        vocab_size=model.vocab_size,
        tokenizer_size=tokenizer_size,
        max_seq_len=max_seq_len,
    )


def as_record(family: str, args: LlamaArgs) -> dict[str, typing.Any]:
    """A model as JSON has it; `from_record` reads it."""
    return {"family": family, **asdict(args)}


def from_record(record: Mapping[str, typing.Any]) -> tuple[str, LlamaArgs]:
    """Return family and arguments. Raises ShapeError for a record that describes no model."""
    values = dict(record)
    family = values.pop("family", None)
    if family not in SHAPES:
        raise ShapeError(Misfit(f"no model {_shown(family)}", "name", _known(str(family), SHAPES)))
    checked = _checked_fields(LlamaArgs, values, "")
    if missing := [name for name in ("dim", "n_layers", "n_heads") if name not in checked]:
        raise ShapeError(Misfit(f"{', '.join(missing)} is missing"))
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
        raise ShapeError(*map(Misfit, wrong))


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _checked_fields(cls: type, values: Mapping[str, object], table: str) -> dict[str, typing.Any]:
    """Return values for fields of `cls`, each of the annotated type; an integer also fits a float.

    table: of `[model]`, for messages. Raises ShapeError with all that do not fit.
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    checked: dict[str, typing.Any] = {}
    wrong: list[Misfit] = []
    for name, value in values.items():
        where = f"{table}.{name}".removeprefix(".")
        allowed = typing.get_args(hints.get(name)) or (hints.get(name),)
        if name not in names:
            wrong.append(Misfit(f"no argument {_shown(name)}", where, _known(name, names)))
        elif name == "rope_scaling":
            checked[name] = RopeScaling.parse(value)
        elif type(value) in allowed and (not isinstance(value, float) or math.isfinite(value)):
            checked[name] = value
        elif type(value) is int and float in allowed:
            checked[name] = float(value)
        else:
            expected = " or ".join(_NAMES[kind] for kind in allowed if kind in _NAMES)
            wrong.append(Misfit(f"expected {expected}, got {_shown(value)}", where))
    if wrong:
        raise ShapeError(*wrong)
    return checked


def _shown(value: object) -> str:
    """Return a value as TOML writes it."""
    return json.dumps(value, default=str, ensure_ascii=False)


def _known(word: str, known: Iterable[str]) -> str:
    """Return the names that exist, those nearest to `word` first."""
    by_lower = {name.lower(): name for name in known}
    close = [by_lower[name] for name in difflib.get_close_matches(word.lower(), list(by_lower))]
    lead = f"nearest: {', '.join(close)}; " if close else ""
    return f"{lead}there are {', '.join(by_lower.values())}"
