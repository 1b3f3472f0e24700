"""Keys of the later versions for things titanlite does not do, and names that show the file of another trainer.

The keys are accepted with the value that means "off", so that a file which only spells out defaults still loads,
and refused with the reason otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Foreign:
    """A key that is known but has nothing behind it."""

    #: The values that change nothing; the first is the default there.
    off: tuple[Any, ...]
    reason: str


_TORCHFT = "fault tolerance by TorchFT is not part of titanlite; checkpoints and guard.policy are its answer to faults"
_MX = "MX formats are not part of titanlite; float8.* is what it has"
_GROUPED = "quantised grouped products (mixtures of experts) are not part of titanlite"
_PIPELINE = "stages are set by experimental.pipeline_parallel_split_points"
_CP = "context parallelism has this way only"
_MOE_BALANCE = "mixtures of experts have no forced balance here"
_VALIDATION_TEXT = "data.num_workers, prefetch, pin_memory and persistent_workers are for the validation text too"
_AC = "activation checkpointing takes torch's own choice here"

FOREIGN: dict[str, Foreign] = {
    "fault_tolerance.enable": Foreign((False,), _TORCHFT),
    "fault_tolerance.process_group": Foreign(("gloo",), _TORCHFT),
    "fault_tolerance.process_group_timeout_ms": Foreign((10000,), _TORCHFT),
    "fault_tolerance.replica_id": Foreign((0,), _TORCHFT),
    "fault_tolerance.group_size": Foreign((0,), _TORCHFT),
    "fault_tolerance.min_replica_size": Foreign((1,), _TORCHFT),
    "fault_tolerance.semi_sync_method": Foreign(("",), _TORCHFT),
    "fault_tolerance.sync_steps": Foreign((5,), _TORCHFT),
    "fault_tolerance.should_quantize": Foreign((False,), _TORCHFT),
    "fault_tolerance.fragment_sync_delay": Foreign((0,), _TORCHFT),
    "fault_tolerance.fragment_update_alpha": Foreign((0.0,), _TORCHFT),
    "fault_tolerance.module_fqns_per_model_fragment": Foreign(([],), _TORCHFT),
    "fault_tolerance.num_fragments": Foreign((1,), _TORCHFT),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": Foreign(("triton",), _MX),
    "quantize.linear.mx.recipe_name": Foreign(("mxfp8_cublas",), _MX),
    "quantize.linear.mx.filter_fqns": Foreign((["output"], []), _MX),
    "quantize.grouped_mm.float8.fqns": Foreign(([],), _GROUPED),
    "quantize.grouped_mm.mx.recipe_name": Foreign(("mxfp8",), _GROUPED),
    "quantize.grouped_mm.mx.fqns": Foreign(([],), _GROUPED),
    "mx.mxfp8_dim1_cast_kernel_choice": Foreign(("triton",), _MX),
    "mx.recipe_name": Foreign(("mxfp8_cublas", "mxfp8"), _MX),
    "mx.filter_fqns": Foreign((["output"], []), _MX),
    "mx.moe_fqns_prototype": Foreign(([],), _MX),
    "float8.moe_fqns_prototype": Foreign(([],), _GROUPED),
    "float8.force_recompute_fp8_weight_in_bwd": Foreign((False,), "torchao no longer has this switch"),
    "liger_kernel.enable_fused_linear_cross_entropy": Foreign((False,), "Liger kernels are not part of titanlite"),
    "comm.mode": Foreign(("default",), "runs without real collectives are not part of titanlite: use 1 or 2 ranks"),
    "comm.save_traces_folder": Foreign(("comm_traces",), "flight recorder dumps go where TORCH_FR_DUMP_TEMP_FILE says"),
    "comm.save_traces_file_prefix": Foreign(("rank_",), "flight recorder dumps are named by TORCH_FR_DUMP_TEMP_FILE"),
    "job.custom_config_module": Foreign(("", "torchtitan.config"), "the dialect is fixed; own loops import titanlite"),
    "experimental.custom_args_module": Foreign(("",), "the dialect is fixed; own loops import titanlite"),
    "model.print_after_conversion": Foreign((False,), "printing the model is not part of a run"),
    "optimizer.early_step_in_backward": Foreign((False,), "it contradicts gradient clipping and the finite guard"),
    "training.gc_debug": Foreign((False,), "collecting at every step is training.gc_freq = 1"),
    "debug.moe_force_load_balance": Foreign((False,), _MOE_BALANCE),
    "training.debug_moe_force_load_balance": Foreign((False,), _MOE_BALANCE),
    "checkpoint.enable_ft_dataloader_checkpoints": Foreign((True, False), _TORCHFT),
    "validation.dataloader.num_workers": Foreign((0,), _VALIDATION_TEXT),
    "validation.dataloader.persistent_workers": Foreign((False,), _VALIDATION_TEXT),
    "validation.dataloader.pin_memory": Foreign((False,), _VALIDATION_TEXT),
    "validation.dataloader.prefetch_factor": Foreign((2,), _VALIDATION_TEXT),
    "checkpoint.load_only": Foreign((False,), "a run that may not save is checkpoint.interval beyond its last step"),
    "checkpoint.initial_load_in_hf_quantized": Foreign((False,), "quantised weights cannot start a training run"),
    "activation_checkpoint.early_stop": Foreign((False,), _AC),
    "activation_checkpoint.preserve_rng_state": Foreign((True, False), "nothing in these models draws numbers"),
    "activation_checkpoint.determinism_check": Foreign(("default",), _AC),
    "activation_checkpoint.debug": Foreign((False,), _AC),
    "activation_checkpoint.visualize_memory_budget_pareto": Foreign((False,), _AC),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Foreign(
        (["moe.router.gate"], []), "the policy by operation is fixed"
    ),
    "parallelism.context_parallel_rotate_method": Foreign(("allgather",), _CP),
    "parallelism.context_parallel_load_balancer": Foreign(("headtail",), _CP),
    "parallelism.expert_tensor_parallel_degree": Foreign((1,), "experts are not divided by tensor parallelism"),
    "parallelism.expert_parallel_comm_backend": Foreign(("standard",), "expert parallelism is not built"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Foreign(
        (True, False), "without expert parallelism there is nothing to overlap"
    ),
    "parallelism.pipeline_parallel_layers_per_stage": Foreign((0,), _PIPELINE),
    "parallelism.pipeline_parallel_first_stage_less_layers": Foreign((1,), _PIPELINE),
    "parallelism.pipeline_parallel_last_stage_less_layers": Foreign((1,), _PIPELINE),
    "parallelism.pipeline_parallel_schedule_csv": Foreign(("",), "schedules are named, not read from a file"),
}


OTHER_TRAINERS: dict[str, tuple[str, ...]] = {
    "flame": ("model.config", "training.context_len", "training.varlen", "training.skip_nan_inf"),
    "KempnerForge": ("[train]", "[scheduler]", "[distributed]"),
}
"""Trainer → sections and keys that its files have and no torchtitan file has; two of them are a sign."""


def trainer_of(tree: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """The other trainer whose file a parsed TOML file looks like, and the names that say so."""
    tables = {name: table for name, table in tree.items() if isinstance(table, dict)}
    names = {f"[{name}]" for name in tables} | {f"{name}.{key}" for name, table in tables.items() for key in table}
    for trainer, marks in OTHER_TRAINERS.items():
        found = [mark for mark in marks if mark in names]
        if len(found) > 1:
            return trainer, found
    return None


def annotation(name: str) -> Any:
    """The type of a foreign key, for reading the command line."""
    off = FOREIGN[name].off[0]
    return list[str] if isinstance(off, list) else type(off)


def check(name: str, value: Any) -> str | None:
    """Why a value is refused, or None. A number equal to a boolean (0, False) is not taken for one."""
    entry = FOREIGN[name]
    if any(type(value) is type(off) and value == off for off in entry.off):
        return None
    return f"not supported: {entry.reason}"
