"""Names of torchtitan 0.2.x that count only where `model.converters` has their converter.

Its files may have tables of several converters: [quantize.linear.float8] and [quantize.linear.mx]
set the same keys here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.config.aliases import FLOAT8, MX, key_of
from titanlite.config.errors import Problem, Source
from titanlite.config.toml import quote

if TYPE_CHECKING:
    from titanlite.config.load import Layers

_RECIPE = "float8.recipe_name"
#: The recipe of torchtitan's converter where its table has none: "mxfp8_cublas".
_DEFAULT = "mxfp8_floor"


def settle(layers: Layers) -> None:
    """Put the values of [quantize.linear.mx] where they count, and drop those of the other
    table.
    """
    said = layers.converters
    is_named = said is not None and MX in said.raw
    if is_named:
        _drop_float8(layers)
    elif not layers.get(_RECIPE).startswith("mx"):
        if layers.of_mx:
            names = ", ".join(layers.of_mx)
            layers.notes.append(f"no effect, as model.converters does not have {MX}: {names}")
        return
    for name, value in layers.of_mx.items():
        _put(layers, name, value.source)
    if said is not None and is_named:
        _check_recipe(layers, said.source)


def _drop_float8(layers: Layers) -> None:
    """Drop what [quantize.linear.float8] sets."""
    dropped = []
    for key, value in list(layers.values.items()):
        if value.source.written.startswith(f"{FLOAT8}."):
            dropped.append(value.source.written)
            del layers.values[key]
    if dropped:
        names = ", ".join(dropped)
        layers.notes.append(f"no effect, as model.converters has {MX}: {names}")


def _put(layers: Layers, name: str, source: Source) -> None:
    key = key_of(name)
    value = layers.of_mx[name]
    other = layers.values.get(key)
    if other is not None and other.source.kind == "command line" != source.kind:
        return
    if other is not None and other.value != value.value and other.source.file == source.file:
        message = (
            f"two names of one thing, {key}, differ: {other.source.written} ({other.source.place}) "
            f"and {name} ({source.place})"
        )
        layers.problems.append(Problem("given-twice", name, message, where=source.place))
    layers.values[key] = value


def _check_recipe(layers: Layers, source: Source) -> None:
    """Give the recipe of torchtitan's default, where there is none."""
    settled = layers.values.get(_RECIPE)
    if settled is None:
        layers.put(_RECIPE, _DEFAULT, Source("dialect", source.file, source.line))
    elif not settled.value.startswith("mx"):
        message = f"has {quote(MX)}, and {_RECIPE} = {quote(settled.value)} is no MX format"
        hint = f'{_RECIPE} = "mxfp8" or "mxfp8_floor", or the converter {quote(FLOAT8)}'
        layers.problems.append(Problem("conflict", "model.converters", message, hint, source.place))
