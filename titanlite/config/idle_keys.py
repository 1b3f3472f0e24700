"""Keys without effect, since the feature that they belong to is off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from titanlite.config.keys import keys
from titanlite.config.loaded import LoadedConfig
from titanlite.config.notes import Note, Weight
from titanlite.config.rules import matches, several
from titanlite.config.toml import quote
from titanlite.utils import is_dotted

_PIPELINE = "experimental.pipeline_parallel"
#: Section, or key → its switch, and the switch's value with which it has an effect, or a function
#: that is true for such a value. `bool` is true for all but 0, none and what is empty.
_SWITCHES: dict[str, tuple[str, Any]] = {
    "checkpoint": ("checkpoint.enable_checkpoint", True),
    "validation": ("validation.enable", True),
    "float8": ("float8.enable_float8_linear", True),
    "lora": ("lora.rank", bool),
    "mup": ("mup.base_dim", bool),
    "compile": ("training.compile", True),
    "eval": ("eval.tasks", bool),
    "checkpoint.export_dtype": ("checkpoint.model_weights_only", True),
    "checkpoint.keep_every": ("checkpoint.keep_latest_k", bool),
    "checkpoint.hub_every": ("checkpoint.hub", bool),
    "checkpoint.local_interval": ("checkpoint.local_folder", bool),
    "checkpoint.local_copies": ("checkpoint.local_folder", bool),
    "checkpoint.initial_load_model_only": ("checkpoint.initial_load_path", bool),
    "training.enable_loss_parallel": ("training.tensor_parallel_degree", several),
    f"{_PIPELINE}_schedule": (f"{_PIPELINE}_degree", several),
    f"{_PIPELINE}_split_points": (f"{_PIPELINE}_degree", several),
    f"{_PIPELINE}_microbatches": (f"{_PIPELINE}_degree", several),
    "optimizer.kahan": (
        "optimizer.name",
        lambda name: name == "AnyPrecisionAdamW" or is_dotted(name),
    ),
    "optimizer.compensation_dtype": ("optimizer.kahan", True),
    "optimizer.momentum": ("optimizer.name", lambda name: name == "Muon" or is_dotted(name)),
    "optimizer.args": ("optimizer.name", is_dotted),
    "data.lanes": ("data.streaming", bool),
    "data.shuffle_buffer": ("data.streaming", bool),
    "activation_checkpoint.selective_ac_option": ("activation_checkpoint.mode", "selective"),
    "activation_checkpoint.memory_budget": ("activation_checkpoint.mode", "budget"),
    "metrics.save_tb_folder": ("metrics.enable_tensorboard", True),
    "metrics.rank_0_only": ("metrics.enable_tensorboard", True),
    "debug.deterministic_warn_only": ("debug.deterministic", True),
    "guard.max_skips": ("guard.policy", lambda policy: policy != "stop"),
}
#: Section → what its keys are about, where it is not the numbers of the run.
_WEIGHTS = {
    "checkpoint": Weight.WORK,
    "guard": Weight.WORK,
    "training": Weight.SPEED,
    "experimental": Weight.SPEED,
    "activation_checkpoint": Weight.SPEED,
    "compile": Weight.SPEED,
    "metrics": Weight.REST,
    "debug": Weight.REST,
}


def _is_on(config: LoadedConfig, key: str) -> bool:
    switch, wanted = _SWITCHES.get(key) or _SWITCHES.get(key.partition(".")[0], (key, None))
    return key == switch or (matches(config.value(switch), wanted) and _is_on(config, switch))


def idle_keys(config: LoadedConfig) -> Iterator[Note]:
    """Find written keys of what is off, but for sections written as off."""
    float8 = []
    others: dict[Weight, list[str]] = defaultdict(list)
    for name, key in keys().items():
        changes = config.is_given(name) and config.value(name) != key.default
        if not changes or _is_on(config, name):
            continue
        if key.section == "float8":
            float8.append(name)
        elif _is_on(config, key.section) or not config.is_given(_SWITCHES[key.section][0]):
            others[_WEIGHTS.get(key.section, Weight.NUMBERS)].append(name)
    # A run in bf16 looks like one in float8: so this is a warning.
    if float8:
        switch = "float8.enable_float8_linear"
        why = f"{switch} = false"
        written = [config.source(name).written or name for name in float8]
        if config.sections.job.dialect == "2026" and not config.is_given(switch):
            why = f"model.converters does not name {quote(written[0].rpartition('.')[0])}"
        text = f"float8 is disabled ({why}); these keys are ignored: {', '.join(written)}"
        yield Note(Weight.NUMBERS, text, warns=True)
    for weight, names in others.items():
        yield Note(weight, f"no effect, as their features are off: {', '.join(names)}")
