"""Files of torchtitan 0.2.x: the defaults and models that they expect; torchtitan.json has the
tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from titanlite.config.aliases import MX, MicrobatchSize, key_of, translated
from titanlite.config.errors import DEFAULT, Problem, Source
from titanlite.config.keys import keys
from titanlite.config.notes import Weight
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import UNSUPPORTED

if TYPE_CHECKING:
    from titanlite.config.load import Layers
    from titanlite.config.raw_values import Entry


class Later(msgspec.Struct, frozen=True):
    """Our name for a model of torchtitan 0.2.x."""

    #: Flavor here.
    flavor: str
    #: How the flavor there differs, beside its name, for a note.
    difference: str
    #: Family here, where it has another name.
    name: str = ""
    #: Keys that the model brings, where nothing else sets them.
    settings: dict[str, Any] = {}


_TABLES: dict[str, Any] = msgspec.json.decode(
    Path(__file__).with_name("torchtitan.json").read_bytes()
)
LATER_DEFAULTS: dict[str, Any] = {
    key_of(name): translated(name, value) for name, value in _TABLES["defaults"].items()
}
"""Defaults of torchtitan 0.2.x where they differ."""
LATER_MODELS: dict[tuple[str, str], Later] = {
    (name, flavor): msgspec.convert(later, Later)
    for name, flavors in _TABLES["models"].items()
    for flavor, later in flavors.items()
}
"""(`model.name`, `model.flavor`) in torchtitan 0.2.x → the model here."""
#: Context of the published DeepSeek models. torchtitan scales RoPE for longer sequences only.
_DEEPSEEK_CONTEXT = 4096
#: Flavor of deepseek_v3 in torchtitan → its `mscale`.
_DEEPSEEK_MSCALE = {"debugmodel": 0.7, "debugmodel_flex_attn": 0.7, "16B": 0.7}
#: Name of a model of transformers in a file of torchtitan's experiment of that name.
TRANSFORMERS = "transformers_modeling_backend"
#: Flavor of that experiment → entries of the config.json that it replaces.
TRANSFORMERS_FLAVORS: dict[str, dict[str, Any]] = _TABLES["transformers"]
_RECIPE = "float8.recipe_name"


def apply_later(layers: Layers, later: Entry | None) -> None:
    """Give a file of torchtitan 0.2.x its model and defaults, where no layer sets them.

    It says so, or uses one of its names. later: the first one.
    """
    said = layers.values.get("job.dialect")
    if said is not None and said.value == "2026":
        sign, why = said.source, 'says dialect "2026"'
    elif said is None and later:
        sign, why = later.source, f"uses the later name {later.name}"
    else:
        return
    source = Source("dialect", sign.file, sign.line)
    if "job.dialect" not in layers.values:
        layers.put("job.dialect", "2026", source)
    taken = _put_missing(layers, LATER_DEFAULTS, source)
    if taken:
        defaults = [
            f"{name} = {quote(value)}"
            for name, value in _TABLES["defaults"].items()
            if key_of(name) in taken
        ]
        layers.note(Weight.NUMBERS, f"{sign.place} {why}: later defaults {', '.join(defaults)}")
    kept = [
        f"{key} = {quote(keys()[key].default)} (there {quote(there)})"
        for key, (switch, there) in _TABLES["other_defaults"].items()
        if layers.get(switch) and key not in layers.values
    ]
    if kept:
        layers.note(Weight.NUMBERS, f"unset, with titanlite's defaults: {', '.join(kept)}")
    if "lr_scheduler.style" in taken:
        layers.note(
            Weight.NUMBERS,
            'the warm-up of torchtitan 0.2.x is n / W at step n: lr_scheduler.style = "titan-0.2"',
        )
    name = layers.values.get("model.name")
    if name is not None and name.raw == TRANSFORMERS:
        _take_transformers_flavor(layers, source)
    model = (layers.get("model.name"), layers.get("model.flavor"))
    if model in LATER_MODELS:
        _take_later_model(layers, model, sign)


def _put_missing(layers: Layers, settings: Mapping[str, Any], source: Source) -> list[str]:
    taken = [key for key in settings if key not in layers.values]
    for key in taken:
        layers.put(key, settings[key], source)
    return taken


def _take_later_model(layers: Layers, model: tuple[str, str], sign: Source) -> None:
    name, flavor = model
    later = LATER_MODELS[model]
    if later.name:
        layers.put("model.name", later.name, _written_as(layers, "model.name", name, sign))
    if later.flavor != flavor:
        layers.put("model.flavor", later.flavor, _written_as(layers, "model.flavor", flavor, sign))
    source = Source("dialect", sign.file, sign.line)
    own_scaling = {"model.rope_scaling", "model.overrides.rope_scaling"} & layers.values.keys()
    if name == "deepseek_v3" and not own_scaling:
        # As torchtitan does, RoPE is scaled by YaRN for sequences over the published context alone.
        mscale = _DEEPSEEK_MSCALE.get(flavor, 1.0)
        scaling: Any = {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": _DEEPSEEK_CONTEXT,
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }
        if layers.get("training.seq_len") <= _DEEPSEEK_CONTEXT:
            scaling = "none"
            layers.note(
                Weight.NUMBERS,
                f"torchtitan scales RoPE of deepseek_v3 for sequences over {_DEEPSEEK_CONTEXT} "
                'tokens alone: model.rope_scaling = "none"',
            )
        layers.put("model.rope_scaling", scaling, source)
    taken = _put_missing(layers, later.settings, source)
    here = quote(later.flavor)
    if later.name:
        here = f"{here} of {later.name}"
    note = f"model.flavor {quote(flavor)} of torchtitan 0.2.x is {here}: {later.difference}"
    if taken:
        note = f"{note} ({', '.join(taken)})"
    layers.note(Weight.NUMBERS, note)


def _written_as(layers: Layers, key: str, value: str, sign: Source) -> Source:
    settled = layers.values.get(key)
    given = DEFAULT if settled is None else settled.source
    if given.file == sign.file or given.kind == "command line":
        return replace(given, written=f"{key} = {quote(value)}")
    return Source("dialect", sign.file, sign.line)


def _take_transformers_flavor(layers: Layers, source: Source) -> None:
    flavor = layers.get("model.flavor")
    if flavor in TRANSFORMERS_FLAVORS:
        # Models of transformers have no flavors here: the default stands for none.
        given = _written_as(layers, "model.flavor", flavor, source)
        layers.put("model.flavor", "debugmodel", given)
    entries = TRANSFORMERS_FLAVORS.get(flavor, {})
    settings = {f"model.overrides.{entry}": value for entry, value in entries.items()}
    if _put_missing(layers, settings, source):
        layers.note(
            Weight.NUMBERS,
            f"model.flavor {quote(flavor)} of torchtitan's {TRANSFORMERS} replaces entries of the "
            f"config.json: {', '.join(entries)}",
        )


def settle_mx(layers: Layers, converters: Entry | None) -> None:
    """Give torchtitan's default recipe to a file with the MX converter; refuse other formats."""
    if converters is None or MX not in str(converters.value):
        return
    source = converters.source
    settled = layers.values.get(_RECIPE)
    if settled is None:
        # There it is "mxfp8_cublas".
        layers.put(_RECIPE, "mxfp8_floor", Source("dialect", source.file, source.line))
    elif not settled.value.startswith("mx"):
        message = f"has {quote(MX)}, and {_RECIPE} = {quote(settled.value)} is no MX format"
        hint = f'{_RECIPE} = "mxfp8" or "mxfp8_floor", or the converter "float8"'
        layers.problems.append(Problem("conflict", "model.converters", message, hint, source.place))


def settle_microbatches(layers: Layers) -> None:
    """Turn a micro-batch size into the count, now that the batch size is known."""
    key = "experimental.pipeline_parallel_microbatches"
    given = layers.values.get(key)
    if given is None or not isinstance(given.value, MicrobatchSize):
        return
    batch_size = layers.get("training.batch_size")
    layers.put(key, max(batch_size // given.value.size, 1), given.source)
    # With other problems the batch size may be wrong.
    if batch_size % given.value.size and not layers.problems:
        message = f"{given.value} do not divide training.batch_size = {batch_size}"
        name = f"{given.source.written} ({key})"
        where = given.source.place
        layers.problems.append(Problem("does-not-fit", name, message, where=where))


def settle_unsupported(layers: Layers) -> None:
    """Refuse unsupported keys that ask for something; note those of features that are off."""
    without_effect = []
    for name, entry in layers.unsupported.items():
        key = UNSUPPORTED[name]
        if key.is_off(entry.value):
            continue
        # A switch that is no key here is refused when it is on.
        is_on = key.switch in keys() and layers.get(key.switch) != keys()[key.switch].default
        if key.switch and not is_on:
            without_effect.append(name)
            continue
        message = f"{quote(entry.value)} is not supported: {key.reason}"
        hint = f"remove it, or leave it at {' or '.join(map(quote, key.off))}"
        layers.problems.append(Problem("unsupported", name, message, hint, entry.source.place))
    if without_effect:
        layers.note(
            Weight.REST, f"no effect, as their features are off: {', '.join(without_effect)}"
        )
