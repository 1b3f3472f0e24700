"""Keys whose feature does not exist yet, and keys without effect while the feature they belong to is off.

`titanlite config check` notes them; training refuses the first. An entry goes when its feature comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from titanlite.config.errors import Problem
from titanlite.config.keys import keys, sections
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.utils import is_dotted


class Missing(NamedTuple):
    """A key of a feature to come."""

    feature: str
    #: What to do until then.
    advice: str = ""
    #: Values that are implemented, besides the default.
    implemented: tuple[object, ...] = ()


_AUTOGRAD = "it skips the hooks that shard FSDP's gradients; training.compile also compiles the backward of each block"
_CONVERT = "leave it out, and run `titanlite checkpoint convert RUN TARGET --to hf` when the run has ended"
_LOAD_HF = (
    "convert the folder with `titanlite checkpoint convert FOLDER TARGET --to checkpoint`, and give TARGET as "
    "checkpoint.initial_load_path"
)
_MIXTURE = Missing("mixtures of sources")
_STREAM = Missing("streamed text")
_STREAM_ADVICE = "give a local file or folder as training.dataset_path, or take c4_test"
_PACKING = Missing("other packing")
_MEMORY = Missing("the estimate of memory")
_ANY_PRECISION = [f"optimizer.{n}" for n in ("kahan", "momentum_dtype", "variance_dtype", "compensation_dtype")]
_TENSOR = ["training.enable_loss_parallel", "experimental.enable_async_tensor_parallel"]
_PIPELINE = [f"experimental.pipeline_parallel_{n}" for n in ("split_points", "schedule", "microbatches")]

NOT_IMPLEMENTED: dict[str, Missing] = {
    "parallelism.expert_parallel_degree": Missing("expert parallelism"),
    "training.dtype": Missing("weights in bfloat16"),
    "experimental.enable_compiled_autograd": Missing("compiled autograd", _AUTOGRAD),
    "experimental.custom_import": Missing(
        "imports for their effect", 'name the model by model.name = "package.module:SPEC"'
    ),
    "optimizer.name": Missing("this optimizer", implemented=("Adam",)),
    "optimizer.groups": Missing("parameter groups"),
    **dict.fromkeys(_ANY_PRECISION, Missing("AnyPrecisionAdamW")),
    "training.dataset": _STREAM._replace(advice=_STREAM_ADVICE),
    "data.source": _MIXTURE,
    "validation.sources": _MIXTURE,
    "data.lanes": _STREAM,
    "data.shuffle_buffer": _STREAM,
    "data.packing": _PACKING,
    "data.mask_documents": _PACKING,
    "checkpoint.last_save_in_hf": Missing("saving in Hugging Face's format", _CONVERT),
    "checkpoint.initial_load_in_hf": Missing("reading Hugging Face's format at the start", _LOAD_HF),
    "memory_estimation.enabled": _MEMORY,
    "memory_estimation.disable_fake_mode": _MEMORY,
    **{
        f"launch.{name}": Missing("`titanlite launch`", "start torchrun by hand")
        for name in sections()["launch"].__struct_fields__
    },
}


def _streams(c: Config) -> bool:
    return c.training.dataset == "c4" and c.training.dataset_path is None


_SWITCHES: dict[str, Callable[[Config], bool]] = {
    "checkpoint": lambda c: c.checkpoint.enable_checkpoint,
    "checkpoint.export_dtype": lambda c: c.checkpoint.enable_checkpoint and c.checkpoint.model_weights_only,
    "checkpoint.keep_every": lambda c: c.checkpoint.enable_checkpoint and c.checkpoint.keep_latest_k > 0,
    "checkpoint.initial_load_model_only": lambda c: (
        c.checkpoint.enable_checkpoint and c.checkpoint.initial_load_path is not None
    ),
    "validation": lambda c: c.validation.enable,
    "float8": lambda c: c.float8.enable_float8_linear,
    **dict.fromkeys(_TENSOR, lambda c: c.training.tensor_parallel_degree > 1),
    "training.fsdp_min_params": lambda c: c.training.fsdp_units == "size",
    **dict.fromkeys(_PIPELINE, lambda c: c.experimental.pipeline_parallel_degree > 1),
    **dict.fromkeys(_ANY_PRECISION, lambda c: c.optimizer.name == "AnyPrecisionAdamW"),
    "data.lanes": lambda c: bool(c.data.source) or _streams(c),
    "data.shuffle_buffer": lambda c: bool(c.data.source) or _streams(c),
    "data.persistent_workers": lambda c: c.validation.enable and c.data.prefetch > 0,
    "compile": lambda c: c.training.compile,
    "compile.cache_dir": lambda c: c.training.compile and c.compile.backend == "inductor",
    "activation_checkpoint.selective_ac_option": lambda c: c.activation_checkpoint.mode == "selective",
    "activation_checkpoint.memory_budget": lambda c: c.activation_checkpoint.mode == "budget",
    "metrics.save_tb_folder": lambda c: c.metrics.enable_tensorboard,
    "metrics.rank_0_only": lambda c: c.metrics.enable_tensorboard,
    "profiling.save_traces_folder": lambda c: c.profiling.enable_profiling,
    "profiling.save_memory_snapshot_folder": lambda c: c.profiling.enable_memory_snapshot,
    "profiling.profiler_warmup": lambda c: c.profiling.enable_profiling,
    "profiling.profiler_active": lambda c: c.profiling.enable_profiling,
    "profiling.profile_freq": lambda c: c.profiling.enable_profiling or c.profiling.enable_memory_snapshot,
    "guard.max_skips": lambda c: c.guard.policy != "stop",
    "guard.window": lambda c: c.guard.policy != "stop" or c.guard.spike_sigmas > 0,
    "memory_estimation.disable_fake_mode": lambda c: c.memory_estimation.enabled,
}
"""Key, or section for its other keys → whether the feature that it belongs to is on."""


def _is_on(config: LoadedConfig, key: str) -> bool:
    return _SWITCHES.get(key, _SWITCHES.get(key.partition(".")[0], lambda c: True))(config.sections)


def not_implemented(config: LoadedConfig) -> list[str]:
    """Return the keys that ask for a feature to come, in order."""

    def asks(key: str) -> bool:
        value, entry = config.value(key), NOT_IMPLEMENTED[key]
        if key == "training.dataset" and not _streams(config.sections):
            return False  # with a path of one's own it is the name of that text
        if isinstance(value, str) and is_dotted(value):
            return False
        return value != keys()[key].default and value not in entry.implemented and _is_on(config, key)

    return [key for key in keys() if key in NOT_IMPLEMENTED and asks(key)]


def without_effect(config: LoadedConfig) -> list[str]:
    """Return the keys that were written and belong to something that is off, in order."""
    return [
        key.name
        for key in keys().values()
        if config.is_given(key.name) and config.value(key.name) != key.default and not _is_on(config, key.name)
    ]


def notes(config: LoadedConfig) -> list[str]:
    """Return a line per key that asks for a feature to come, for `config check`."""
    return [f"{config.source(key)}: {key} = {_text(config, key)}" for key in not_implemented(config)]


def refused(config: LoadedConfig) -> list[Problem]:
    """Return a problem per key that asks for a feature to come."""
    return [
        Problem(config.place(key), key, _text(config, key), _advice(key), code="not-implemented")
        for key in not_implemented(config)
    ]


def _advice(key: str) -> str:
    return NOT_IMPLEMENTED[key].advice or "remove it until then"


def _text(config: LoadedConfig, key: str) -> str:
    return f"{quote(config.value(key))} is not built yet: {NOT_IMPLEMENTED[key].feature}"
