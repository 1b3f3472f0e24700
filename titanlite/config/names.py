"""Other names of the same things: the later versions' and the oldest ones, turned into the dialect's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titanlite.config.schema import keys, quote

_DELAYED = "delayed scaling is gone from torchao; dynamic scaling is what it has"


class Unfit(ValueError):
    """A value that does not fit the other name; the text says what was expected."""


@dataclass(frozen=True)
class MicrobatchSize:
    """A pipeline micro-batch given by its size; the count follows once the batch size is settled."""

    size: int


@dataclass(frozen=True)
class Alias:
    """Another name of a key."""

    name: str
    canonical: str
    #: Turns the value; raises Unfit. None: the value is the same.
    convert: Callable[[Any], Any] | None = None
    #: Type on the command line; None: the key's own.
    annotation: Any = None
    #: How the values relate, for `explain`.
    relation: str = "the same"
    #: False: an older spelling, which says nothing about the defaults a file expects.
    later: bool = True

    @property
    def implies_later_defaults(self) -> bool:
        """Whether using this name shows that a file was written for the later versions."""
        return self.later and self.canonical in AUTUMN_2024


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unfit(f"expected true or false, got {quote(value)}")
    return value


def _invert(value: Any) -> bool:
    return not _boolean(value)


def _fused(value: Any) -> str:
    return "fused" if _boolean(value) else "foreach"


def _microbatch_size(value: Any) -> MicrobatchSize:
    if type(value) is not int or value < 1:
        raise Unfit(f"expected an integer >= 1, got {quote(value)}")
    return MicrobatchSize(value)


def _fp8_linear(value: Any) -> bool:
    if value == "delayed":
        raise Unfit(_DELAYED)
    if value not in ("", "dynamic"):
        raise Unfit(f'expected "" or "dynamic", got {quote(value)}')
    return bool(value)


_FLOAT8_CONVERTERS = ("float8", "quantize.linear.float8")


def _converters(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Unfit(f"expected a list of strings, got {quote(value)}")
    unknown = [item for item in value if item not in _FLOAT8_CONVERTERS]
    if unknown:
        raise Unfit(f"no converter {', '.join(quote(u) for u in unknown)}; there are {', '.join(_FLOAT8_CONVERTERS)}")
    return bool(value)


def _split_points(value: Any) -> list[str]:
    """The first module of each part but the first; parts must cover the layers in order."""
    well_formed = isinstance(value, list) and all(
        isinstance(part, list) and part and all(isinstance(name, str) for name in part) for part in value
    )
    if not well_formed:
        raise Unfit(f"expected a list of lists of module names, none of them empty, got {quote(value)}")
    layers = [int(n.split(".")[1]) for part in value for n in part if n.startswith("layers.") and n[7:].isdigit()]
    if layers != list(range(len(layers))):
        raise Unfit("the parts must hold layers.0, layers.1, … in order, none left out")
    return [part[0] for part in value[1:]]


def _same(canonical: str, *names: str) -> list[Alias]:
    return [Alias(name, canonical) for name in names]


def _older(canonical: str, *names: str) -> list[Alias]:
    return [Alias(name, canonical, later=False) for name in names]


def _inverted(canonical: str, *names: str) -> list[Alias]:
    return [Alias(name, canonical, _invert, bool, "inverted") for name in names]


_PIPELINE_KEYS = (
    "enable_async_tensor_parallel",
    "pipeline_parallel_degree",
    "pipeline_parallel_split_points",
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatches",
    "enable_compiled_autograd",
    "context_parallel_degree",
)
_FLOAT8_KEYS = (
    "enable_fsdp_float8_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp",
    "scaling_type_input",
    "scaling_type_weight",
    "scaling_type_grad_output",
    "recipe_name",
    "filter_fqns",
    "emulate",
)
_SIZE = "a size instead of a count: the batch size divided by it"

ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in [
        *_older("experimental.pipeline_parallel_degree", "training.pipeline_parallel_degree"),
        *_older("float8.enable_float8_linear", "training.enable_float8_linear"),
        Alias(
            "training.fp8_linear",
            "float8.enable_float8_linear",
            _fp8_linear,
            str,
            'true for "dynamic", false for ""',
            later=False,
        ),
        *_same("training.batch_size", "training.local_batch_size"),
        *_same("training.warmup_steps", "lr_scheduler.warmup_steps"),
        *_same("training.compile", "compile.enable"),
        *_same("training.seed", "debug.seed"),
        *_same("training.tensor_parallel_degree", "parallelism.tensor_parallel_degree"),
        *_same("training.data_parallel_replicate_degree", "parallelism.data_parallel_replicate_degree"),
        *_same("training.data_parallel_shard_degree", "parallelism.data_parallel_shard_degree"),
        *_older("training.data_parallel_shard_degree", "training.data_parallel_degree"),
        *_inverted(
            "training.enable_loss_parallel", "parallelism.disable_loss_parallel", "training.disable_loss_parallel"
        ),
        *(Alias(f"parallelism.{field}", f"experimental.{field}") for field in _PIPELINE_KEYS),
        *(
            Alias(
                f"{section}.module_fqns_per_model_part",
                "experimental.pipeline_parallel_split_points",
                _split_points,
                list[list[str]],
                "the first module of each part but the first",
            )
            for section in ("parallelism", "experimental")
        ),
        *(
            Alias(
                f"{section}.pipeline_parallel_microbatch_size",
                "experimental.pipeline_parallel_microbatches",
                _microbatch_size,
                int,
                _SIZE,
            )
            for section in ("parallelism", "experimental")
        ),
        *_same("model.tokenizer_path", "model.hf_assets_path"),
        *_inverted("metrics.enable_color_printing", "metrics.disable_color_printing"),
        *_inverted("metrics.rank_0_only", "metrics.save_for_all_ranks"),
        Alias(
            "optimizer.fused",
            "optimizer.implementation",
            _fused,
            bool,
            'true is "fused", false is "foreach"',
            later=False,
        ),
        *_same("checkpoint.enable_checkpoint", "checkpoint.enable"),
        *_same(
            "checkpoint.model_weights_only",
            "checkpoint.last_save_model_weights_only",
            "checkpoint.last_save_model_only",
        ),
        Alias(
            "model.converters",
            "float8.enable_float8_linear",
            _converters,
            list[str],
            'true for ["float8"] or ["quantize.linear.float8"]',
        ),
        *_same("float8.enable_float8_linear", "quantize.linear.float8.enable_float8_linear"),
        *(Alias(f"quantize.linear.float8.{field}", f"float8.{field}") for field in _FLOAT8_KEYS),
        *_same("memory_estimation.enabled", "memory_estimation.enable"),
        *_same("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"),
        *_same("checkpoint.initial_load_model_only", "checkpoint.initial_load_model_weights_only"),
        *_same("job.print_config", "job.print_args"),
        *_same("debug.deterministic", "training.deterministic"),
        *_same("validation.batch_size", "validation.local_batch_size"),
        *_same("validation.enable", "validation.enabled"),
        *(
            Alias(f"training.dataloader.{field}", f"data.{field}")
            for field in ("num_workers", "persistent_workers", "pin_memory")
        ),
        *_same("data.prefetch", "training.dataloader.prefetch_factor"),
        *_same(
            "training.reshard_after_forward",
            "parallelism.fsdp_reshard_after_forward",
            "training.fsdp_reshard_after_forward",
        ),
    ]
}

_COMMA_KEYS = ("float8.filter_fqns", "experimental.pipeline_parallel_split_points", "checkpoint.exclude_from_loading")
COMMA_LISTS = frozenset(
    [
        "model.converters",
        *_COMMA_KEYS,
        *(alias.name for alias in ALIASES.values() if alias.canonical in _COMMA_KEYS and alias.convert is None),
    ]
)
"""Names of lists of strings that files of other versions also write as one string, with commas between its words."""


def listed(name: str, value: Any) -> Any:
    """A value as it was meant: one string with commas as the list of its words, under a name of `COMMA_LISTS`."""
    if name not in COMMA_LISTS or not isinstance(value, str):
        return value
    return [word.strip() for word in value.split(",") if word.strip()]


VALUE_NAMES: dict[tuple[str, str], str] = {
    ("activation_checkpoint.mode", "memory_budget"): "budget",
    ("model.norm_type", "compiled_rmsnorm"): "rmsnorm",
    ("training.dataset", "c4_mini"): "c4_test",
}
"""(key, other value) → the value here."""

VALUE_NOTES: dict[tuple[str, str], str] = {
    ("training.dataset", "c4_mini"): "c4_mini does not travel with titanlite: c4_test is read instead",
}
"""(key, other value) → how the value here differs from what was meant."""

_FLOAT16 = "float16 needs loss scaling, which titanlite does not do; take bfloat16"
REFUSED_VALUES: dict[tuple[str, str], str] = {
    ("float8.scaling_type_input", "delayed"): _DELAYED,
    ("float8.scaling_type_weight", "delayed"): _DELAYED,
    ("float8.scaling_type_grad_output", "delayed"): _DELAYED,
    ("training.mixed_precision_param", "float16"): _FLOAT16,
    ("training.mixed_precision_reduce", "float16"): _FLOAT16,
    ("training.dtype", "float16"): _FLOAT16,
    **{
        ("model.flavor", flavor): "attention within each document (data.mask_documents) is not built yet"
        for flavor in ("debugmodel_flex_attn", "debugmodel_varlen_attn", "8B_flex", "8B_varlen")
    },
}
"""(key, value) → why a value that other trainers know is not taken."""

LATER_DEFAULTS: dict[str, Any] = {
    "checkpoint.keep_latest_k": 10,
    "optimizer.implementation": "fused",
    "metrics.enable_color_printing": True,
    "experimental.pipeline_parallel_microbatches": MicrobatchSize(1),
    "lr_scheduler.style": "titan-0.2",
}
"""Defaults that a file of the later dialect expects where they differ."""

LATER_FLAVORS: dict[str, tuple[str, str]] = {
    "debugmodel": (
        "3.1-debugmodel",
        "6 layers and RoPE scaled by 8. The vocabulary is the tokenizer's, not 2048",
    ),
    "8B": ("3.1-8B", "RoPE scaled by 8"),
    "70B": ("3.1-70B", "RoPE scaled by 8"),
    "405B": ("3.1-405B", "RoPE scaled by 8"),
}
"""Flavor of llama3 in a file of the later dialect → the flavor here, and what it is."""

AUTUMN_2024 = frozenset(
    f"{section}.{field}"
    for section, fields in {
        "job": "config_file dump_folder description use_for_integration_test",
        "profiling": "enable_profiling save_traces_folder profile_freq enable_memory_snapshot "
        "save_memory_snapshot_folder",
        "metrics": "log_freq enable_color_printing enable_tensorboard save_tb_folder rank_0_only",
        "model": "name flavor norm_type tokenizer_path",
        "optimizer": "name lr",
        "training": "dataset dataset_path batch_size seq_len warmup_steps max_norm steps "
        "data_parallel_replicate_degree data_parallel_shard_degree data_parallel_type enable_cpu_offload "
        "tensor_parallel_degree enable_loss_parallel mixed_precision_param mixed_precision_reduce compile gc_freq seed",
        "experimental": "enable_async_tensor_parallel pipeline_parallel_degree pipeline_parallel_split_points "
        "pipeline_parallel_schedule pipeline_parallel_microbatches enable_compiled_autograd context_parallel_degree",
        "checkpoint": "enable_checkpoint folder interval_type interval model_weights_only export_dtype "
        "create_seed_checkpoint async_mode keep_latest_k",
        "activation_checkpoint": "mode selective_ac_option",
        "float8": "enable_float8_linear enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp "
        "scaling_type_input scaling_type_weight scaling_type_grad_output",
        "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size",
        "memory_estimation": "enabled disable_fake_mode",
    }.items()
    for field in fields.split()
)
"""Keys that the autumn-2024 dialect had. A later name of one of these marks a file as of the later dialect."""

ELSEWHERE: dict[str, str] = {
    "activation_checkpointing": "activation_checkpoint.mode",
    "checkpoint_dir": "checkpoint.folder",
    "checkpoint_freq": "checkpoint.interval",
    "cpu_offload": "training.enable_cpu_offload",
    "grad_clip": "training.max_norm",
    "gradient_accumulation_steps": "training.global_batch_size",
    "learning_rate": "optimizer.lr",
    "logging_freq": "metrics.log_freq",
    "lr_decay_iters": "lr_scheduler.total_steps",
    "lr_decay_style": "lr_scheduler.decay_type",
    "max_context_width": "training.seq_len",
    "max_steps": "training.steps",
    "offload_activations": "activation_checkpoint.offload",
    "plateau": "lr_scheduler.plateau_ratio",
    "resume_from_checkpoint": "checkpoint.folder",
    "sharding_strategy": "training.data_parallel_replicate_degree and training.reshard_after_forward",
    "train_batch_size": "training.batch_size",
    "val_batch_size": "validation.batch_size",
    "validation_batches": "validation.steps",
    "validation_freq": "validation.freq",
    "warmup": "lr_scheduler.warmup_ratio",
}
"""What other trainers call things → the key here, for the hint under an unknown key."""


def later_names(canonical: str) -> list[Alias]:
    """Every other name of a key."""
    return [alias for alias in ALIASES.values() if alias.canonical == canonical]


def annotation_of(alias: Alias) -> Any:
    """The type an alias takes on the command line."""
    return keys()[alias.canonical].annotation if alias.annotation is None else alias.annotation
