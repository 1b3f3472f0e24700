"""Files of torchtitan 0.2.x and 0.1.0: the defaults and flavors that they expect."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.config.aliases import MicrobatchSize
from titanlite.config.errors import DEFAULT, Source
from titanlite.config.toml import quote

if TYPE_CHECKING:
    from titanlite.config.load import Layers

#: Defaults of torchtitan 0.2.x where they differ.
LATER_DEFAULTS: dict[str, Any] = {
    "checkpoint.keep_latest_k": 10,
    "optimizer.implementation": "fused",
    "metrics.enable_color_printing": True,
    "experimental.pipeline_parallel_microbatches": MicrobatchSize(1),
    "lr_scheduler.style": "titan-0.2",
}
#: Flavor of llama3 in torchtitan 0.2.x → the flavor here, and what it is.
LATER_FLAVORS: dict[str, tuple[str, str]] = {
    "debugmodel": (
        "3.1-debugmodel",
        "6 layers and RoPE scaled by 8. The vocabulary is the tokenizer's, not 2048",
    ),
    "8B": ("3.1-8B", "RoPE scaled by 8"),
    "70B": ("3.1-70B", "RoPE scaled by 8"),
    "405B": ("3.1-405B", "RoPE scaled by 8"),
}


def apply_later(layers: Layers, sign: Source, why: str) -> None:
    """Give a file of torchtitan 0.2.x the model and the defaults it expects, for keys that no layer
    sets.

    sign: what says that it is one. why: what it says.
    """
    source = Source("dialect", sign.file, sign.line)
    if "job.dialect" not in layers.values:
        layers.put("job.dialect", "2026", source)
    taken = [key for key in LATER_DEFAULTS if key not in layers.values]
    for key in taken:
        layers.put(key, LATER_DEFAULTS[key], source)
    if taken:
        layers.notes.append(f"{sign.place} {why}: later defaults for {', '.join(taken)}")
    if "lr_scheduler.style" in taken:
        layers.notes.append(
            'the warm-up of torchtitan 0.2.x is n / W at step n: lr_scheduler.style = "titan-0.2"'
        )
    name = layers.get("model.name")
    flavor = layers.get("model.flavor")
    if name == "qwen3" and flavor == "debugmodel":
        layers.notes.append(
            'the "debugmodel" of qwen3 is titanlite\'s own: that of torchtitan has another shape'
        )
    if name != "llama3" or flavor not in LATER_FLAVORS:
        return
    if _is_of_0_1_0(layers, sign):
        _apply_0_1_0(layers, flavor, source)
    else:
        _take_later_flavor(layers, flavor, sign)
        ours, difference = LATER_FLAVORS[flavor]
        layers.notes.append(
            f"model.flavor {quote(flavor)} of torchtitan 0.2.x is {quote(ours)}: {difference}"
        )


def _take_later_flavor(layers: Layers, flavor: str, sign: Source) -> None:
    """Replace a flavor of torchtitan 0.2.x by ours. sign: what says that it is one."""
    settled = layers.values.get("model.flavor")
    given = DEFAULT if settled is None else settled.source
    source = Source("dialect", sign.file, sign.line)
    if given.file == sign.file or given.kind == "command line":
        source = replace(given, written=f"model.flavor = {quote(flavor)}")
    layers.put("model.flavor", LATER_FLAVORS[flavor][0], source)


def _is_of_0_1_0(layers: Layers, sign: Source) -> bool:
    """Return whether a file with later names is of torchtitan 0.1.0 (spring 2025).

    That names the tokenizer model.tokenizer_path, and 0.2.x names it model.hf_assets_path: so
    do all their files.
    """
    if "job.dialect" in layers.values and layers.values["job.dialect"].source.kind != "dialect":
        return False
    told = layers.tokenizer_path
    return told is not None and told.file == sign.file and layers.hf_assets_path is None


def _apply_0_1_0(layers: Layers, flavor: str, source: Source) -> None:
    """Give a file of torchtitan 0.1.0 its models: RoPE without scaling, and 6 layers in the
    debug model.
    """
    if flavor == "debugmodel":
        _take_later_flavor(layers, flavor, source)
        source = layers.values["model.flavor"].source
    is_scaled = flavor in ("debugmodel", "405B")
    if is_scaled and not layers.gives_scaling:
        # It follows from the flavor, where that is given.
        scaling = Source("dialect", source.file, source.line)
        layers.put("model.rope_scaling", "none", scaling)
    place = layers.tokenizer_path.place if layers.tokenizer_path else ""
    layers.notes.append(
        f"{place} names model.tokenizer_path, as torchtitan 0.1.0 does, where 0.2.x has "
        f"model.hf_assets_path: model.flavor {quote(flavor)} has RoPE without scaling. "
        '[job] dialect = "2026" gives it that of 0.2.x'
    )
