"""Keys of torchtitan without a counterpart here, and names that other trainers give to keys.

A key without a counterpart is accepted with the values that switch it off, so that a file which only spells out
defaults still loads. Any other value is refused with the reason.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Unsupported(NamedTuple):
    """A key that is known but does nothing."""

    #: The values that change nothing; the first is torchtitan's default.
    off: tuple[Any, ...]
    reason: str


_BY_REASON: dict[str, dict[str, tuple[Any, ...]]] = {
    "fault tolerance by TorchFT is not part of titanlite; checkpoints and guard.policy are its answer to faults": {
        "fault_tolerance.enable": (False,),
        "fault_tolerance.process_group": ("gloo",),
        "fault_tolerance.process_group_timeout_ms": (10000,),
        "fault_tolerance.replica_id": (0,),
        "fault_tolerance.group_size": (0,),
        "fault_tolerance.min_replica_size": (1,),
        "fault_tolerance.semi_sync_method": ("",),
        "fault_tolerance.sync_steps": (5,),
        "fault_tolerance.should_quantize": (False,),
        "fault_tolerance.fragment_sync_delay": (0,),
        "fault_tolerance.fragment_update_alpha": (0.0,),
        "fault_tolerance.module_fqns_per_model_fragment": ([],),
        "fault_tolerance.num_fragments": (1,),
        "checkpoint.enable_ft_dataloader_checkpoints": (True, False),
    },
    "MX formats are not part of titanlite; float8.* is what it has": {
        "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": ("triton",),
        "quantize.linear.mx.recipe_name": ("mxfp8_cublas",),
        "quantize.linear.mx.filter_fqns": (["output"], []),
        "mx.mxfp8_dim1_cast_kernel_choice": ("triton",),
        "mx.recipe_name": ("mxfp8_cublas", "mxfp8"),
        "mx.filter_fqns": (["output"], []),
        "mx.moe_fqns_prototype": ([],),
    },
    "quantised grouped products (mixtures of experts) are not part of titanlite": {
        "quantize.grouped_mm.float8.fqns": ([],),
        "quantize.grouped_mm.mx.recipe_name": ("mxfp8",),
        "quantize.grouped_mm.mx.fqns": ([],),
        "float8.moe_fqns_prototype": ([],),
    },
    "torchao no longer has this switch": {"float8.force_recompute_fp8_weight_in_bwd": (False,)},
    "Liger kernels are not part of titanlite": {"liger_kernel.enable_fused_linear_cross_entropy": (False,)},
    "runs without real collectives are not part of titanlite: use 1 or 2 ranks": {"comm.mode": ("default",)},
    "flight recorder dumps go where TORCH_FR_DUMP_TEMP_FILE says": {"comm.save_traces_folder": ("comm_traces",)},
    "flight recorder dumps are named by TORCH_FR_DUMP_TEMP_FILE": {"comm.save_traces_file_prefix": ("rank_",)},
    "the keys are fixed; own loops import titanlite": {
        "job.custom_config_module": ("", "torchtitan.config"),
        "experimental.custom_args_module": ("",),
    },
    "printing the model is not part of a run": {"model.print_after_conversion": (False,)},
    "collecting at every step is training.gc_freq = 1": {"training.gc_debug": (False,)},
    "mixtures of experts have no forced balance here": {
        "debug.moe_force_load_balance": (False,),
        "training.debug_moe_force_load_balance": (False,),
    },
    "data.num_workers, prefetch, pin_memory and persistent_workers are for the validation text too": {
        "validation.dataloader.num_workers": (0,),
        "validation.dataloader.persistent_workers": (False,),
        "validation.dataloader.pin_memory": (False,),
        "validation.dataloader.prefetch_factor": (2,),
    },
    "a run that may not save is checkpoint.interval beyond its last step": {"checkpoint.load_only": (False,)},
    "float8 weights are recognised by their type": {"checkpoint.initial_load_in_hf_quantized": (False, True)},
    "activation checkpointing takes torch's own choice here": {
        "activation_checkpoint.early_stop": (False,),
        "activation_checkpoint.determinism_check": ("default",),
        "activation_checkpoint.debug": (False,),
        "activation_checkpoint.visualize_memory_budget_pareto": (False,),
    },
    "nothing in these models draws numbers": {"activation_checkpoint.preserve_rng_state": (True, False)},
    "the policy by operation is fixed": {
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (["moe.router.gate"], []),
    },
    "context parallelism has this way only": {
        "parallelism.context_parallel_rotate_method": ("allgather",),
        "parallelism.context_parallel_load_balancer": ("headtail",),
    },
    "experts are not divided by tensor parallelism": {"parallelism.expert_tensor_parallel_degree": (1,)},
    "rows for experts travel by torch's all-to-all": {"parallelism.expert_parallel_comm_backend": ("standard",)},
    "the exchange of experts does not overlap with other micro-batches": {
        "parallelism.pipeline_parallel_expert_parallel_overlap": (True, False),
    },
    "stages are set by experimental.pipeline_parallel_split_points": {
        "parallelism.pipeline_parallel_layers_per_stage": (0,),
        "parallelism.pipeline_parallel_first_stage_less_layers": (1,),
        "parallelism.pipeline_parallel_last_stage_less_layers": (1,),
    },
    "schedules are named, not read from a file": {"parallelism.pipeline_parallel_schedule_csv": ("",)},
}

UNSUPPORTED: dict[str, Unsupported] = {
    name: Unsupported(off, reason) for reason, names in _BY_REASON.items() for name, off in names.items()
}


def unsupported_type(name: str) -> Any:
    """Return the type of an unsupported key, for reading the command line."""
    off = UNSUPPORTED[name].off[0]
    return list[str] if isinstance(off, list) else type(off)


def is_off(name: str, value: Any) -> bool:
    """Return whether a value switches the key off. A number equal to a boolean (0, False) is not taken for one."""
    return any(type(value) is type(off) and value == off for off in UNSUPPORTED[name].off)


OTHER_TRAINERS: dict[str, str] = {
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
"""Names that other trainers use → the key here, for the hint under an unknown key."""
