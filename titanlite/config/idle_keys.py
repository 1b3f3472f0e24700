"""Keys without effect, since the feature that they belong to is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titanlite.config.keys import keys
from titanlite.config.loaded import LoadedConfig
from titanlite.config.text_names import BUNDLED
from titanlite.utils import is_dotted

_LOADS = ("resume-or-fresh", "resume", "from")
_MOMENTS = ("momentum_dtype", "variance_dtype")
_TENSOR = ["training.enable_loss_parallel", "experimental.enable_async_tensor_parallel"]
_PIPELINE = [
    f"experimental.pipeline_parallel_{n}" for n in ("split_points", "schedule", "microbatches")
]


def _many(degree: int) -> bool:
    return degree > 1


def _not_bundled(dataset: str) -> bool:
    return dataset not in BUNDLED


def _optimizer(*names: str) -> Callable[[str], bool]:
    """Return a function that tells whether an optimizer is one of these, or a user's."""
    return lambda name: name in names or is_dotted(name)


_FIELDS = ("text_key", "prompt_key", "completion_key", "messages_key", "record")
_TEXTS = ("training.dataset_path", "data.source", "validation.dataset_path", "validation.sources")
_OWN_HELD_OUT = {
    "validation.dataset": _not_bundled,
    "validation.dataset_path": bool,
}
_OWN_TEXT = {
    **dict.fromkeys(_TEXTS, bool),
    "training.dataset": _not_bundled,
    "validation.dataset": _not_bundled,
}
_FOR_SYSTEM = {
    "kubernetes": (
        "kind",
        "namespace",
        "cpu_request",
        "memory_request",
        "shm_size",
        "labels",
        "annotations",
        "trainer_version",
        "token_secret",
    ),
    "slurm": ("spare_nodes",),
    "sagemaker": ("role", "channels", "checkpoint_s3", "spot_wait"),
}
_LOCAL = tuple(f"checkpoint.local_{name}" for name in ("interval", "keep_latest_k", "copies"))
#: Key, or section for its other keys → keys that it needs, any of them, with their value, or with a
#: function that is true for it. `bool` is true for any but 0 and none.
_SWITCHES: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint.enable_checkpoint": True},
    "checkpoint.export_dtype": {"checkpoint.model_weights_only": True},
    "checkpoint.export_ema": {"checkpoint.model_weights_only": True},
    "checkpoint.keep_every": {"checkpoint.keep_latest_k": bool},
    **{
        f"checkpoint.hub_{n}": {"checkpoint.hub": bool}
        for n in ("every", "private", "dtype", "ema")
    },
    **dict.fromkeys(_LOCAL, {"checkpoint.local_folder": bool}),
    "checkpoint.initial_load_model_only": {"checkpoint.initial_load_path": bool},
    **{
        f"checkpoint.{n}": {"checkpoint.start": _LOADS}
        for n in ("exclude_from_loading", "allow_missing", "allow_changes")
    },
    "validation": {"validation.enable": True},
    "validation.split": _OWN_HELD_OUT,
    "validation.format": {"validation.dataset_path": bool},
    "float8": {"float8.enable_float8_linear": True},
    "lora": {"lora.rank": bool},
    "mup": {"mup.base_dim": bool},
    **dict.fromkeys(_TENSOR, {"training.tensor_parallel_degree": _many}),
    "training.fsdp_min_params": {"training.fsdp_units": "size"},
    **dict.fromkeys(_PIPELINE, {"experimental.pipeline_parallel_degree": _many}),
    "optimizer.kahan": {"optimizer.name": _optimizer("AnyPrecisionAdamW", "AdamW8bit")},
    "optimizer.compensation_dtype": {"optimizer.kahan": True},
    **{f"optimizer.{n}": {"optimizer.name": _optimizer("AnyPrecisionAdamW")} for n in _MOMENTS},
    "optimizer.momentum": {"optimizer.name": _optimizer("Muon")},
    "optimizer.args": {"optimizer.name": is_dotted},
    "optimizer.implementation": {"optimizer.name": _optimizer("AdamW", "Adam")},
    **{f"data.{name}": _OWN_TEXT for name in _FIELDS},
    "data.token_dtype": dict.fromkeys(_TEXTS, bool),
    "data.subset": {"training.dataset": _not_bundled},
    "data.format": {"training.dataset": _not_bundled, "training.dataset_path": bool},
    "data.split": {"training.dataset": _not_bundled, "training.dataset_path": bool},
    **{f"data.{name}": {"data.streaming": bool} for name in ("lanes", "shuffle_buffer")},
    "data.persistent_workers": {"validation.enable": True},
    "data.chat_template": {
        "data.messages_key": bool,
        "data.record": ("messages", "sharegpt"),
        "training.dataset_path": bool,
        "data.source": bool,
        "validation.sources": bool,
    },
    "compile": {"training.compile": True},
    "compile.cache_dir": {"compile.backend": "inductor"},
    "activation_checkpoint.selective_ac_option": {"activation_checkpoint.mode": "selective"},
    "activation_checkpoint.memory_budget": {"activation_checkpoint.mode": "budget"},
    "metrics.save_tb_folder": {"metrics.enable_tensorboard": True},
    "metrics.rank_0_only": {"metrics.enable_tensorboard": True},
    "sample": {"sample.prompts": bool},
    "eval": {"eval.tasks": bool},
    "sample.seed": {"sample.temperature": bool},
    "profiling.save_traces_folder": {"profiling.enable_profiling": True},
    "profiling.save_memory_snapshot_folder": {"profiling.enable_memory_snapshot": True},
    "profiling.profiler_warmup": {"profiling.enable_profiling": True},
    "profiling.profiler_active": {"profiling.enable_profiling": True},
    "profiling.profile_freq": {
        "profiling.enable_profiling": True,
        "profiling.enable_memory_snapshot": True,
    },
    "guard.max_skips": {"guard.policy": ("skip", "rollback")},
    "guard.window": {"guard.policy": ("skip", "rollback"), "guard.spike_sigmas": bool},
    "launch.volumes": {"launch.system": ("kubernetes", "")},
    # A command may name the system, so keys of all systems count while the config names none.
    **{
        f"launch.{n}": {"launch.system": (system, "")}
        for system, names in _FOR_SYSTEM.items()
        for n in names
    },
}


def _is_on(config: LoadedConfig, key: str) -> bool:
    """Return whether the feature that a key belongs to is on."""

    def holds(switch: str, wanted: Any) -> bool:
        value = config.value(switch)
        if callable(wanted):
            return bool(wanted(value))
        return value in wanted if isinstance(wanted, tuple) else value == wanted

    switches = _SWITCHES.get(key, _SWITCHES.get(key.partition(".")[0], {}))
    if not switches or key in switches:
        return True
    return any(
        holds(switch, wanted) and _is_on(config, switch) for switch, wanted in switches.items()
    )


def without_effect(config: LoadedConfig) -> list[str]:
    """Return the keys that were written and belong to something that is off, in order."""
    found = []
    for name, key in keys().items():
        changes = config.is_given(name) and config.value(name) != key.default
        if changes and not _is_on(config, name):
            found.append(name)
    return found


def idle_keys(config: LoadedConfig) -> tuple[list[str], list[str]]:
    """Return notes and warnings that name the keys of `without_effect`.

    Keys of a section whose switch is written as off are not named.
    """
    turned_off = set()
    for section, switch in (
        ("checkpoint", "checkpoint.enable_checkpoint"),
        ("validation", "validation.enable"),
    ):
        if config.is_given(switch) and not config.value(switch):
            turned_off.add(section)
    float8 = []
    others = []
    for key in without_effect(config):
        section = key.partition(".")[0]
        if section == "float8":
            float8.append(key)
        elif section not in turned_off:
            others.append(key)
    notes = []
    warnings = []
    if any(config.is_given(key) for key in keys() if key.startswith("ladder.")):
        notes.append("[ladder] is for `titanlite ladder`; a run reads none of it")
    # A run in bf16 looks like one in float8: so this is a warning.
    if float8:
        warnings.append(
            "float8 is disabled (float8.enable_float8_linear = false); these keys are ignored: "
            f"{', '.join(float8)}"
        )
    if others:
        notes.append(f"no effect, as their features are off: {', '.join(others)}")
    return notes, warnings
