"""Other names and values of the same things, of torchtitan's later and oldest versions, turned into
the keys here. names.json has the table.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from titanlite import doors
from titanlite.config.keys import OTHERS, keys, sections, table_of, tables, type_of
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import NAMES, UNSUPPORTED
from titanlite.config.value_types import Count


class MicrobatchSize(NamedTuple):
    """A pipeline micro-batch given by its size; the count follows once the batch size is known."""

    size: int

    def __str__(self) -> str:
        return f"micro-batches of {self.size}"


class Conversion(NamedTuple):
    """How a value under another name becomes the key's."""

    #: Raises ValueError with the reason why a value is not taken.
    convert: Callable[[Any], Any]
    #: Type of the value under the other name.
    type: Any
    #: How the values relate, for `explain`.
    relation: str


class Alias(NamedTuple):
    """Another name of a key."""

    name: str
    key: str
    #: None: the value is the same.
    conversion: Conversion | None
    #: Whether this name shows that a file was written for torchtitan 0.2.x: the files of 2024 had
    #: another one.
    is_later: bool

    @property
    def type(self) -> Any:
        return self.conversion.type if self.conversion else keys()[self.key].type

    @property
    def relation(self) -> str:
        return self.conversion.relation if self.conversion else "the same"


#: Entries of `model.converters` in torchtitan 0.2.x.
FLOAT8 = "quantize.linear.float8"
MX = "quantize.linear.mx"
#: Recipe of torchtitan 0.2.x → the one here.
_MX_RECIPES = {"mxfp8_cublas": "mxfp8_floor", "mxfp8_cublas_rceil": "mxfp8"}


def _converters(value: list[str]) -> bool:
    for item in value:
        if item in NAMES["converters"]:
            raise ValueError(f"{item}: {NAMES['converters'][item]}")
    known = ("float8", FLOAT8, MX)
    if unknown := [quote(item) for item in value if item not in known]:
        raise ValueError(f"no converter {', '.join(unknown)}; there are {', '.join(known)}")
    if MX in value and len(set(value)) > 1:
        raise ValueError("a linear has one format, float8 or mx")
    return bool(value)


def _mx_recipe(value: str) -> str:
    if value == "mxfp8_emulated":
        raise ValueError("mxfp8_cublas with float8.emulate = true has its numbers")
    if value not in _MX_RECIPES:
        raise ValueError(f"the recipes here are {', '.join(_MX_RECIPES)}")
    return _MX_RECIPES[value]


def _split_points(parts: list[list[str]]) -> list[str]:
    """The parts must cover the layers in order."""
    names = [name for part in parts for name in part if re.fullmatch(r"layers\.\d+", name)]
    if names != [f"layers.{number}" for number in range(len(names))]:
        raise ValueError("the parts must hold layers.0, layers.1, … in order, none left out")
    return [part[0] for part in parts[1:]]


#: Conversions of values, by the names that names.json gives them.
_CONVERSIONS = {
    "not": Conversion(operator.not_, bool, "inverted"),
    "parts": Conversion(
        _split_points,
        list[Annotated[list[str], Meta(min_length=1)]],
        "the first module of each part but the first",
    ),
    "size": Conversion(
        MicrobatchSize, Count, "a size instead of a count: the batch size divided by it"
    ),
    "fp8": Conversion(bool, Literal["", "dynamic"], 'true for "dynamic", false for ""'),
    "converters": Conversion(
        _converters,
        list[str],
        'true for ["float8"], ["quantize.linear.float8"] or ["quantize.linear.mx"], this with '
        "MXFP8",
    ),
    "mx_recipe": Conversion(
        _mx_recipe, str, '"mxfp8_floor" for "mxfp8_cublas", "mxfp8" for "mxfp8_cublas_rceil"'
    ),
    "fused": Conversion(
        ("foreach", "fused").__getitem__, bool, 'true is "fused", false is "foreach"'
    ),
}


def _alias(name: str, meant: str | list[str], is_later: bool) -> Alias:
    if isinstance(meant, str):
        return Alias(name, meant, None, is_later)
    key, conversion = meant
    return Alias(name, key, _CONVERSIONS[conversion], is_later)


ALIASES: dict[str, Alias] = {
    name: _alias(name, meant, kind == "later")
    for kind in ("later", "older")
    for name, meant in NAMES[kind].items()
}
CONVERTED = frozenset(alias.name for alias in ALIASES.values() if alias.conversion)
"""Names whose values have another form than the key's."""
_COMMA_KEYS = (
    "float8.filter_fqns",
    "experimental.pipeline_parallel_split_points",
    "checkpoint.exclude_from_loading",
)
COMMA_LISTS = frozenset(
    [
        "model.converters",
        *_COMMA_KEYS,
        *(a.name for a in ALIASES.values() if a.key in _COMMA_KEYS and not a.conversion),
    ]
)
"""Names of lists of strings that files of other versions also write as one string, with commas
between its words.
"""
VALUES: dict[str, dict[str, str]] = NAMES["values"]
"""Key → other value → the value here."""
#: A class as Python's `import` names it.
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


@cache
def known_names() -> frozenset[str]:
    """Return all names that can be written: keys, other names, unsupported keys."""
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


#: Section of another package → why its code cannot be imported.
BROKEN: dict[str, str] = {}


def learn(section: str) -> None:
    """Make the keys of another package's feature of this name known."""
    if not section or section in known_sections():
        return
    place = doors.of_packages("features").get(section)
    if place is None:
        return
    try:
        owner = doors.load(place).section_class
    except Exception as error:
        # Whatever code of others raises.
        BROKEN[section] = f"{place} cannot be imported: {error!r}"
        return
    if owner is not None:
        OTHERS[section] = owner
        for names in (sections, keys, tables, known_names, known_sections):
            names.cache_clear()


def is_known(name: str) -> bool:
    """Return whether it is the name of a key or of an entry in a free table."""
    return name in known_names() or table_of(name) is not None


def is_subsection(name: str) -> bool:
    """Return whether the entries of a table under this name have names themselves."""
    return name in tables() or (name in known_sections() and name not in known_names())


def key_of(name: str) -> str:
    """Return the key behind a name."""
    return ALIASES[name].key if name in ALIASES else name


def names_of(key: str) -> list[Alias]:
    """Return every other name of a key."""
    return [alias for alias in ALIASES.values() if alias.key == key]


def type_of_name(name: str) -> Any:
    """Return the type of a value under any known name."""
    if name in UNSUPPORTED:
        return UNSUPPORTED[name].type
    return ALIASES[name].type if name in ALIASES else type_of(name)


def normalized(name: str, value: Any) -> Any:
    """Return a value with lists and choices as titanlite writes them."""
    if not isinstance(value, str):
        return value
    if name in COMMA_LISTS:
        return [word.strip() for word in value.split(",") if word.strip()]
    if name == "optimizer.name" and _CLASS.fullmatch(value):
        return ":".join(value.rsplit(".", 1))
    return VALUES.get(key_of(name), {}).get(value, value)


def refusal(name: str, value: Any) -> str:
    """Return why titanlite does not take a value of other trainers; "": it may."""
    reasons: dict[str, str] = NAMES["refused"].get(key_of(name), {})
    return reasons.get(value, "") if isinstance(value, str) else ""


def translated(name: str, value: Any) -> Any:
    """Return a value of a name's type as its key takes it. Raises ValueError with the reason."""
    conversion = ALIASES[name].conversion if name in ALIASES else None
    return conversion.convert(value) if conversion else value
