"""The one registry of keys whose feature does not exist yet.

`titanlite config check` notes them; training refuses them. An entry goes when its feature comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlite.config.dialect import Dialect
from titanlite.config.errors import Problem
from titanlite.config.schema import keys, quote

if TYPE_CHECKING:
    # A config asks this registry what to write out.
    from titanlite.config.job import JobConfig

Predicate = Callable[[Dialect], bool]


@dataclass(frozen=True)
class Unbuilt:
    """One key of a feature to come."""

    feature: str
    #: Whether the feature would be used at all; its other keys have no effect until then.
    used: Predicate
    #: Values of this key that are built already, besides its default.
    built: tuple[object, ...] = ()
    #: What to do until then.
    advice: str = ""

    def on(self, config: JobConfig, key: str) -> bool:
        """Whether this key asks for what does not exist."""
        value = config.value(key)
        if value == keys()[key].default or value in self.built:
            return False
        return self.used(config.dialect)


def _always(_: Dialect) -> bool:
    return True


def _switched(section: str, field: str, *off: object) -> Predicate:
    return lambda d: getattr(getattr(d, section), field) not in off


_checkpoints = _switched("checkpoint", "enable_checkpoint", False)
_any_precision = _switched("optimizer", "name", "AdamW", "Adam", "Muon")
_estimates = _switched("memory_estimation", "enabled", False)


def _streams(d: Dialect) -> bool:
    return d.training.dataset == "c4" and d.training.dataset_path is None


def _mixes(d: Dialect) -> bool:
    return bool(d.data.source) or _streams(d)


def _feature(
    feature: str, used: Predicate, *names: str, built: tuple[object, ...] = (), advice: str = ""
) -> dict[str, Unbuilt]:
    return {name: Unbuilt(feature, used, built, advice) for name in names}


UNBUILT: dict[str, Unbuilt] = {
    **_feature("expert parallelism", _always, "parallelism.expert_parallel_degree"),
    **_feature("weights in bfloat16", _always, "training.dtype"),
    **_feature(
        "compiled autograd",
        _always,
        "experimental.enable_compiled_autograd",
        advice="it does not run the hooks that shard FSDP's gradients; training.compile compiles the backward of each "
        "block as well",
    ),
    **_feature("imports of one's own models", _always, "experimental.custom_import"),
    **_feature("this optimizer", _always, "optimizer.name", built=("Adam",)),
    **_feature("parameter groups", _always, "optimizer.groups"),
    **_feature(
        "AnyPrecisionAdamW",
        _any_precision,
        "optimizer.kahan",
        "optimizer.momentum_dtype",
        "optimizer.variance_dtype",
        "optimizer.compensation_dtype",
    ),
    **_feature(
        "streamed text",
        _streams,
        "training.dataset",
        advice="give a local file or folder as training.dataset_path, or take c4_test",
    ),
    **_feature("mixtures of sources", _always, "data.source", "validation.sources"),
    **_feature("streamed text", _mixes, "data.lanes", "data.shuffle_buffer"),
    **_feature("other packing", _always, "data.packing", "data.mask_documents"),
    **_feature(
        "saving in Hugging Face's format",
        _checkpoints,
        "checkpoint.last_save_in_hf",
        advice="leave it out, and run `titanlite checkpoint convert RUN TARGET --to hf` when the run has ended",
    ),
    **_feature(
        "reading Hugging Face's format at the start",
        _always,
        "checkpoint.initial_load_in_hf",
        advice="convert the folder with `titanlite checkpoint convert FOLDER TARGET --to checkpoint`, and give TARGET "
        "as checkpoint.initial_load_path",
    ),
    **_feature("the estimate of memory", _always, "memory_estimation.enabled"),
    **_feature("the estimate of memory", _estimates, "memory_estimation.disable_fake_mode"),
    **_feature(
        "`titanlite launch`",
        _always,
        *(f"launch.{f}" for f in Dialect.model_fields["launch"].annotation.model_fields),  # type: ignore[union-attr]
        advice="start torchrun by hand",
    ),
}
"""Key → what it waits for."""


def unbuilt_keys(config: JobConfig) -> list[str]:
    """Keys that ask for a feature to come, in the dialect's order."""
    return [key for key in keys() if key in UNBUILT and UNBUILT[key].on(config, key)]


def without_effect(config: JobConfig) -> list[str]:
    """Keys that were written but belong to something switched off, in the dialect's order."""
    dialect = config.dialect
    off = [
        key
        for key, entry in UNBUILT.items()
        if config.is_given(key)
        and config.value(key) != keys()[key].default
        and not entry.used(dialect)
        and key != "training.dataset"  # with a path of one's own it is the name of that text
    ]
    switches = {
        "checkpoint": dialect.checkpoint.enable_checkpoint,
        "checkpoint.export_dtype": dialect.checkpoint.enable_checkpoint and dialect.checkpoint.model_weights_only,
        "checkpoint.keep_every": dialect.checkpoint.enable_checkpoint and dialect.checkpoint.keep_latest_k > 0,
        "checkpoint.initial_load_model_only": dialect.checkpoint.enable_checkpoint
        and dialect.checkpoint.initial_load_path is not None,
        "validation": dialect.validation.enable,
        "float8": dialect.float8.enable_float8_linear,
        "training.enable_loss_parallel": dialect.training.tensor_parallel_degree > 1,
        "experimental.enable_async_tensor_parallel": dialect.training.tensor_parallel_degree > 1,
        **dict.fromkeys(
            (f"experimental.pipeline_parallel_{name}" for name in ("split_points", "schedule", "microbatches")),
            dialect.experimental.pipeline_parallel_degree > 1,
        ),
        "training.fsdp_min_params": dialect.training.fsdp_units == "size",
        "compile": dialect.training.compile,
        "compile.cache_dir": dialect.training.compile and dialect.compile.backend == "inductor",
        "activation_checkpoint.selective_ac_option": dialect.activation_checkpoint.mode == "selective",
        "activation_checkpoint.memory_budget": dialect.activation_checkpoint.mode == "budget",
        "data.persistent_workers": dialect.validation.enable and dialect.data.prefetch > 0,
        "metrics.save_tb_folder": dialect.metrics.enable_tensorboard,
        "metrics.rank_0_only": dialect.metrics.enable_tensorboard,
        "profiling.save_traces_folder": dialect.profiling.enable_profiling,
        "profiling.save_memory_snapshot_folder": dialect.profiling.enable_memory_snapshot,
        "profiling.profiler_warmup": dialect.profiling.enable_profiling,
        "profiling.profiler_active": dialect.profiling.enable_profiling,
        "guard.max_skips": dialect.guard.policy != "stop",
        "guard.window": dialect.guard.policy != "stop" or dialect.guard.spike_sigmas > 0,
        "profiling.profile_freq": dialect.profiling.enable_profiling or dialect.profiling.enable_memory_snapshot,
    }
    for key in keys():
        switch = switches.get(key, switches.get(key.partition(".")[0], True))
        if not switch and config.is_given(key) and config.value(key) != keys()[key].default and key not in UNBUILT:
            off.append(key)
    return [key for key in keys() if key in off]


def _text(config: JobConfig, key: str) -> str:
    return f"{quote(config.value(key))} is not built yet: {UNBUILT[key].feature}"


def unbuilt_notes(config: JobConfig) -> list[str]:
    """One line per key that asks for a feature to come, for `config check`."""
    return [f"{config.source(key)}: {key} = {_text(config, key)}" for key in unbuilt_keys(config)]


def implied_unbuilt(config: JobConfig) -> list[str]:
    """Those among them that nobody wrote: defaults a later file expects. A run goes on without them, with a warning."""
    return [key for key in unbuilt_keys(config) if not config.is_given(key)]


def refused(config: JobConfig) -> list[Problem]:
    """Every key that was written and asks for a feature to come."""
    return [
        Problem(config.place(key), key, _text(config, key), UNBUILT[key].advice or "remove it until then")
        for key in unbuilt_keys(config)
        if config.is_given(key)
    ]
