"""Other names and values of the same things, of torchtitan's later and oldest versions, turned into
the keys here.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import Meta

from titanlite.config.keys import keys
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import NAMES, UNSUPPORTED
from titanlite.config.value_types import Count


class Refused(ValueError):
    """A value that other trainers know and titanlite does not take; the text is the reason."""


@dataclass(frozen=True)
class MicrobatchSize:
    """A pipeline micro-batch given by its size; the count follows once the batch size is known."""

    size: int

    def __str__(self) -> str:
        return f"micro-batches of {self.size}"


@dataclass(frozen=True)
class Alias:
    """Another name of a key."""

    name: str
    key: str
    #: Turns a value of `own_type` into the key's; raises Refused. None: the value is the same.
    convert: Callable[[Any], Any] | None = None
    #: Type of the value under this name; None: the key's own.
    own_type: Any = None
    #: How the values relate, for `explain`.
    relation: str = "the same"
    #: Whether this name shows that a file was written for torchtitan 0.2.x: the files of 2024 had
    #: another one.
    is_later: bool = False
    #: The name counts only where `model.converters` has this entry (`titanlite.config.converters`);
    #: "": everywhere.
    converter: str = ""

    @property
    def type(self) -> Any:
        return keys()[self.key].type if self.own_type is None else self.own_type

    def converted(self, value: Any) -> Any:
        """Return a value of `type` as the key's. Raises Refused."""
        return value if self.convert is None else self.convert(value)


#: Entries of `model.converters` in torchtitan 0.2.x.
FLOAT8 = "quantize.linear.float8"
MX = "quantize.linear.mx"


def _converters(value: list[str]) -> bool:
    for item in value:
        if item in NAMES["converters"]:
            raise Refused(f"{item}: {NAMES['converters'][item]}")
    known = ("float8", FLOAT8, MX)
    if unknown := [quote(item) for item in value if item not in known]:
        raise Refused(f"no converter {', '.join(unknown)}; there are {', '.join(known)}")
    if MX in value and len(set(value)) > 1:
        raise Refused("a linear has one format, float8 or mx")
    return bool(value)


#: Recipe of torchtitan 0.2.x → the one here.
_MX_RECIPES = {"mxfp8_cublas": "mxfp8_floor", "mxfp8_cublas_rceil": "mxfp8"}


def _mx_recipe(value: str) -> str:
    if value == "mxfp8_emulated":
        raise Refused("mxfp8_cublas with float8.emulate = true has its numbers")
    if value not in _MX_RECIPES:
        raise Refused(f"the recipes here are {', '.join(_MX_RECIPES)}")
    return _MX_RECIPES[value]


def _split_points(parts: list[list[str]]) -> list[str]:
    """Return the first module of each part but the first; parts must cover the layers in order."""
    layers = []
    for part in parts:
        for name in part:
            number = name.removeprefix("layers.")
            if number != name and number.isdecimal():
                layers.append(int(number))
    if layers != list(range(len(layers))):
        raise Refused("the parts must hold layers.0, layers.1, … in order, none left out")
    return [part[0] for part in parts[1:]]


_PIPELINE = "experimental.pipeline_parallel"
_MICROBATCHES = f"{_PIPELINE}_microbatches"
_SPLIT_POINTS = f"{_PIPELINE}_split_points"
_FLOAT8 = "float8.enable_float8_linear"

_NOT = (operator.not_, bool, "inverted")
_PARTS = (
    _split_points,
    list[Annotated[list[str], Meta(min_length=1)]],
    "the first module of each part but the first",
)
_SIZE = (MicrobatchSize, Count, "a size instead of a count: the batch size divided by it")
_FP8 = (bool, Literal["", "dynamic"], 'true for "dynamic", false for ""')
_LIST = (
    _converters,
    list[str],
    'true for ["float8"], ["quantize.linear.float8"] or ["quantize.linear.mx"], this with MXFP8',
)
_RECIPE = (_mx_recipe, str, '"mxfp8_floor" for "mxfp8_cublas", "mxfp8" for "mxfp8_cublas_rceil"')
_FUSED = (("foreach", "fused").__getitem__, bool, 'true is "fused", false is "foreach"')
_CONVERTED = [
    Alias(
        "parallelism.disable_loss_parallel", "training.enable_loss_parallel", *_NOT, is_later=True
    ),
    Alias("training.disable_loss_parallel", "training.enable_loss_parallel", *_NOT, is_later=True),
    Alias("metrics.disable_color_printing", "metrics.enable_color_printing", *_NOT, is_later=True),
    Alias("metrics.save_for_all_ranks", "metrics.rank_0_only", *_NOT, is_later=True),
    Alias("parallelism.module_fqns_per_model_part", _SPLIT_POINTS, *_PARTS, is_later=True),
    Alias("experimental.module_fqns_per_model_part", _SPLIT_POINTS, *_PARTS, is_later=True),
    Alias("parallelism.pipeline_parallel_microbatch_size", _MICROBATCHES, *_SIZE, is_later=True),
    Alias("experimental.pipeline_parallel_microbatch_size", _MICROBATCHES, *_SIZE, is_later=True),
    Alias("model.converters", _FLOAT8, *_LIST, is_later=True),
    Alias("training.fp8_linear", _FLOAT8, *_FP8),
    Alias("optimizer.fused", "optimizer.implementation", *_FUSED),
    Alias(f"{MX}.recipe_name", "float8.recipe_name", *_RECIPE, converter=MX),
    Alias(f"{MX}.filter_fqns", "float8.filter_fqns", converter=MX),
]
ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in [
        *(Alias(name, key, is_later=True) for name, key in NAMES["later"].items()),
        *(Alias(name, key) for name, key in NAMES["older"].items()),
        *_CONVERTED,
    ]
}

_COMMA_KEYS = ("float8.filter_fqns", _SPLIT_POINTS, "checkpoint.exclude_from_loading")
COMMA_LISTS = frozenset(
    [
        "model.converters",
        *_COMMA_KEYS,
        *(a.name for a in ALIASES.values() if a.key in _COMMA_KEYS and not a.convert),
    ]
)
"""Names of lists of strings that files of other versions also write as one string, with commas
between its words.
"""


@cache
def known_names() -> frozenset[str]:
    """Return every name that can be written: keys, other names, unsupported keys."""
    return frozenset([*keys(), *ALIASES, *UNSUPPORTED])


@cache
def known_sections() -> frozenset[str]:
    """Return every section and subsection that holds a known name."""
    found = set()
    for name in known_names():
        while "." in name:
            name = name.rpartition(".")[0]
            found.add(name)
    return frozenset(found)


def is_subsection(name: str) -> bool:
    """Return whether the entries of a table under this name have names themselves."""
    if name in keys():
        return keys()[name].is_table
    return name in known_sections() and name not in known_names()


def key_of(name: str) -> str:
    """Return the key behind a name."""
    return ALIASES[name].key if name in ALIASES else name


def names_of(key: str) -> list[Alias]:
    """Return every other name of a key."""
    return [alias for alias in ALIASES.values() if alias.key == key]


#: A class as Python's `import` names it.
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def normalized(name: str, value: Any) -> Any:
    """Return a value under a name with lists and choices as titanlite writes them. Raises
    Refused.
    """
    if isinstance(value, str):
        if name in COMMA_LISTS:
            return [word.strip() for word in value.split(",") if word.strip()]
        if key_of(name) == "optimizer.name" and _CLASS.fullmatch(value):
            return ":".join(value.rsplit(".", 1))
        value = VALUE_NAMES.get((key_of(name), value), value)
        if reason := REFUSED_VALUES.get((key_of(name), value)):
            raise Refused(reason)
    return value


VALUE_NAMES: dict[tuple[str, str], str] = {
    ("activation_checkpoint.mode", "memory_budget"): "budget",
    ("metrics.log_style", "fsdp"): "aws_fsdp",  # its first name here
    ("model.name", "transformers_modeling_backend"): "hf",
    ("model.norm_type", "compiled_rmsnorm"): "rmsnorm",
    ("training.dataset", "c4_mini"): "c4_test",
}
"""(key, other value) → the value here."""

VALUE_NOTES: dict[tuple[str, str], str] = {
    (
        "training.dataset",
        "c4_mini",
    ): "c4_mini is not bundled with titanlite: c4_test is read instead"
}
"""(key, other value) → how the value here differs."""

_DELAYED = "delayed scaling is gone from torchao; dynamic scaling is what it has"
_FLOAT16 = "float16 needs loss scaling, which titanlite does not do; take bfloat16"
REFUSED_VALUES: dict[tuple[str, str], str] = {
    **{
        (f"float8.scaling_type_{name}", "delayed"): _DELAYED
        for name in ("input", "weight", "grad_output")
    },
    (_FLOAT8, "delayed"): _DELAYED,
    **{
        (f"training.{k}", "float16"): _FLOAT16
        for k in ("mixed_precision_param", "mixed_precision_reduce", "dtype")
    },
    ("launch.kind", "HyperPodPyTorchJob"): "take PyTorchJob, which HyperPod's clusters run, too",
}
"""(key, value) → why a value is not taken that other trainers or earlier versions know."""
