"""`ModelSpec`: all that the rest of titanlite asks of a model, and how a config's numbers become a model's arguments.

No torch here, so that a config with a built-in model is checked without it.
"""

from __future__ import annotations

import difflib
import json
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from titanlite import exit_codes
from titanlite.utils import is_dotted, resolve_as

if TYPE_CHECKING:
    from torch import Tensor, nn

    from titanlite.config.sections import Model


class Misfit(typing.NamedTuple):
    """One thing that is wrong with a model's arguments."""

    message: str
    #: The key of `[model]` to blame, as `flavor` or `overrides.dim`; empty where several are.
    field: str = ""
    advice: str = ""


class ShapeError(ValueError):
    """Numbers that make no model, or a name that no model has; `misfits` says which."""

    exit_code = exit_codes.CONFIG

    def __init__(self, *misfits: Misfit) -> None:
        self.misfits = misfits
        lines = [f"model{m.field and '.'}{m.field}: {m.message}{m.advice and '; '}{m.advice}" for m in misfits]
        super().__init__("; ".join(lines))


@dataclass(frozen=True)
class Init:
    """The distribution that one parameter is drawn from."""

    kind: Literal["ones", "zeros", "normal", "trunc_normal"]
    std: float = 0.0
    #: trunc_normal only: no value lies outside [-bound, bound].
    bound: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What one module costs."""

    #: Per training token, forward and backward.
    flops: int
    parameters: int


@dataclass(frozen=True)
class Size:
    """A linear's: its weight is [out_features, in_features]."""

    in_features: int
    out_features: int


def _no_hf(*_: Any) -> NoReturn:
    raise ValueError("this model offers no conversion from or to Hugging Face's format (ModelSpec.hf_names)")


@dataclass(frozen=True)
class ModelSpec:
    """A model family as functions of its arguments.

    The arguments are a frozen dataclass of the model's own. Two of its fields are fixed: `vocab_size` (None only in a
    flavor that takes the tokenizer's) and `max_seq_len`, the longest sequence in tokens. A pipeline also reads `dim`,
    the width of hidden states. A `__post_init__` that raises ValueError refuses arguments.

    The module maps tokens [batch, seq] int64 to logits [batch, seq, vocab]. It keeps its blocks where `block_names`
    says, and may have `init_buffers()`, which computes the buffers that no checkpoint holds. For
    `training.loss_chunks` it takes `labels` and `loss` and returns `head(x, labels, loss)` if there are labels. For
    `data.mask_documents` it takes `doc_ids` [batch, seq] int32, the number of each token's document in its row.

    Fields with the default None are features that a model need not offer; a config that asks for one is then refused.
    """

    name: str
    #: Class of the arguments; `model.overrides` sets its fields.
    args_class: type[Any]
    #: Value of `model.flavor` → arguments.
    flavors: Mapping[str, Any]
    #: Builds the module on the current default device (`with torch.device("meta")` for none).
    build: Callable[[Any], nn.Module]
    #: (full parameter name, arguments) → how to draw it.
    init_rule: Callable[[str, Any], Init]
    #: Names of the blocks, in the order they run: each is wrapped, recomputed and compiled as one.
    block_names: Callable[[Any], list[str]]
    #: A shared parameter counts once.
    count_parameters: Callable[[Any], int]
    #: (arguments, tokens per sequence) → model FLOPs of one training token, forward and backward.
    flops_per_token: Callable[[Any, int], int]
    #: Name of the linear that computes the logits.
    head: str = "output"
    #: Names of modules to shard together, in order of last use. None: each block, and the rest.
    fsdp_units: Callable[[Any], list[tuple[str, ...]]] | None = None
    #: For float8. Name → size of every linear, in the model's order.
    linears: Callable[[Any], dict[str, Size]] | None = None
    #: For tensor parallelism. Module name → how it is divided, see `titanlite.parallel.tensor.apply_tp`.
    tensor_plan: Callable[[Any], dict[str, str]] | None = None
    #: For tensor parallelism. Name for messages → number that the ranks must divide, besides the vocabulary.
    tensor_sizes: Callable[[Any], dict[str, int]] = lambda args: {}
    #: For tensor parallelism with `torch.compile`. Names of the parts of each block, each compiled as one.
    sublayer_names: Callable[[Any], list[str]] | None = None
    #: For pipelines. (arguments, tokens per sequence) → cost of each module that a stage may start with: embedding,
    #: blocks, last norm, head. The module must run with the others set to None, as `titanlite.models.layers.Llama`.
    pipeline_costs: Callable[[Any, int], dict[str, Cost]] | None = None
    #: For context parallelism: blocks have an `inner_attention`, the model a `rope`, and its call takes `positions`.
    context_parallel: bool = False
    #: State dictionaries to and from Hugging Face's names.
    to_hf: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]] = _no_hf
    from_hf: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]] = _no_hf
    #: Our parameter name → Hugging Face's, of every tensor that its files hold.
    hf_names: Callable[[Any], dict[str, str]] = _no_hf
    #: (names in its files, arguments) → its name → ours.
    names_from_hf: Callable[[Collection[str], Any], dict[str, str]] = _no_hf
    #: The content of Hugging Face's config.json, and the arguments that one describes.
    hf_config: Callable[[Any], dict[str, Any]] = _no_hf
    args_from_hf: Callable[[Mapping[str, Any]], Any] = _no_hf

    def build_on_meta(self, args: Any) -> nn.Module:
        """Build the module on the meta device, in float32 (the masters of mixed precision) with every default dtype."""
        import torch

        with torch.device("meta"):
            return self.build(args).float()

    def fsdp_groups(self, args: Any) -> list[tuple[str, ...]]:
        """Return the modules that are sharded together: `fsdp_units`, or each block."""
        return self.fsdp_units(args) if self.fsdp_units else [(name,) for name in self.block_names(args)]


def get_spec(name: str) -> ModelSpec:
    """Return the spec of a built-in model, or of a dotted path. Raises ShapeError for any other name."""
    from titanlite.models import SPECS

    if is_dotted(name):
        try:
            return resolve_as(name, lambda found: isinstance(found, ModelSpec), "a titanlite.ModelSpec")
        except ValueError as error:
            hint = 'name a ModelSpec as "package.module:NAME" or "./my_model.py:NAME"'
            raise ShapeError(Misfit(str(error), "name", hint)) from error
    if name not in SPECS:
        raise ShapeError(Misfit(f"no model {shown(name)}", "name", _known(name, SPECS)))
    return SPECS[name]


def resolve_args(
    family: str,
    flavor: str,
    overrides: Mapping[str, object] | None = None,
    *,
    vocab_size: int | None = None,
    tokenizer_size: int | None = None,
    max_seq_len: int | None = None,
) -> Any:
    """Return the arguments of one flavor with a user's changes, checked.

    `overrides`: fields of the model's arguments to replace.
    `vocab_size`: replaces the flavor's. `tokenizer_size`: ids the tokenizer can produce; it becomes the
    vocabulary of a flavor that has none of its own (`debugmodel`), and must not exceed any other.
    `max_seq_len`: longest sequence in tokens that the model must serve.

    Raises ShapeError for an unknown name, a wrong type, or numbers that make no model.
    """
    spec = get_spec(family)
    if (base := spec.flavors.get(flavor)) is None:
        message = f"{spec.name} has no flavor {shown(flavor)}"
        raise ShapeError(Misfit(message, "flavor", _known(flavor, spec.flavors)))
    changes = checked_fields(spec.args_class, overrides or {}, "overrides")
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
    if changes.get("vocab_size", base.vocab_size) is None:
        changes["vocab_size"] = tokenizer_size
    args = _made(lambda: replace(base, **changes))
    if tokenizer_size is not None and tokenizer_size > args.vocab_size:
        message = (
            f"the tokenizer has {tokenizer_size} entries but the model's vocabulary only {args.vocab_size}: "
            "choose the model's own tokenizer, or set model.vocab_size"
        )
        raise ShapeError(Misfit(message))
    return args


def model_args(model: Model, max_seq_len: int, tokenizer_size: int | None = None) -> Any:
    """Return the arguments of the model that section `[model]` describes; the rest is as for `resolve_args`."""
    overrides = dict(model.overrides)
    known = {field.name for field in fields(get_spec(model.name).args_class)}
    for name, value in {"norm_type": model.norm_type, "rope_scaling": model.rope_scaling}.items():
        if name in known and value is not None:
            overrides[name] = value
        elif value not in (None, "rmsnorm"):
            raise ShapeError(Misfit(f"the model {model.name} has no such argument", name, "remove it"))
    return resolve_args(
        model.name,
        model.flavor,
        overrides,
        vocab_size=model.vocab_size,
        tokenizer_size=tokenizer_size,
        max_seq_len=max_seq_len,
    )


def as_record(family: str, args: Any) -> dict[str, Any]:
    """Return a model as JSON has it; `from_record` reads it."""
    return {"family": family, **asdict(args)}


def from_record(record: Mapping[str, Any]) -> tuple[str, Any]:
    """Return family and arguments. Raises ShapeError for a record that describes no model."""
    values = dict(record)
    family = str(values.pop("family", None))
    cls = get_spec(family).args_class
    checked = checked_fields(cls, values, "")
    required = [field.name for field in fields(cls) if field.default is field.default_factory is MISSING]
    if missing := [name for name in required if name not in checked]:
        raise ShapeError(Misfit(f"{', '.join(missing)} is missing"))
    return family, _made(lambda: cls(**checked))


def _made(make: Callable[[], Any]) -> Any:
    """Return the arguments that `make` makes; an error of their class becomes a ShapeError."""
    try:
        return make()
    except ShapeError:
        raise
    except ValueError as error:
        raise ShapeError(Misfit(str(error))) from error


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def checked_fields(cls: type, values: Mapping[str, object], table: str) -> dict[str, Any]:
    """Return values for fields of `cls`, each of the annotated type; an integer also fits a float.

    A type with a class method `parse` reads values of all kinds. table: of `[model]`, for messages. Raises ShapeError
    with all that do not fit.
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    checked: dict[str, Any] = {}
    wrong: list[Misfit] = []
    for name, value in values.items():
        where = f"{table}.{name}".removeprefix(".")
        allowed = typing.get_args(hints.get(name)) or (hints.get(name),)
        parse = next((kind.parse for kind in allowed if hasattr(kind, "parse")), None)
        if name not in names:
            wrong.append(Misfit(f"no argument {shown(name)}", where, _known(name, names)))
        elif parse is not None:
            checked[name] = parse(value)
        elif type(value) in allowed and (not isinstance(value, float) or math.isfinite(value)):
            checked[name] = value
        elif type(value) is int and float in allowed:
            checked[name] = float(value)
        else:
            expected = " or ".join(_NAMES[kind] for kind in allowed if kind in _NAMES)
            wrong.append(Misfit(f"expected {expected}, got {shown(value)}", where))
    if wrong:
        raise ShapeError(*wrong)
    return checked


def shown(value: object) -> str:
    """Return a value as TOML writes it."""
    return json.dumps(value, default=str, ensure_ascii=False)


def _known(word: str, known: Iterable[str]) -> str:
    """Return the names that exist, those nearest to `word` first."""
    by_lower = {name.lower(): name for name in known}
    close = [by_lower[name] for name in difflib.get_close_matches(word.lower(), list(by_lower))]
    lead = f"nearest: {', '.join(close)}; " if close else ""
    return f"{lead}there are {', '.join(by_lower.values())}"
