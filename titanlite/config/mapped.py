"""Config → plans where one follows from the other key by key, without the number of ranks or the model."""

from __future__ import annotations

import os
from typing import TypeVar

from msgspec.structs import replace

from titanlite.config import plans
from titanlite.config.run_sections import Section
from titanlite.config.sections import AUTO_FILTER, Config, steps_of
from titanlite.config.urls import is_url

S = TypeVar("S", bound=Section)

#: Of the time after which collectives fail: when it is reported that they wait.
_STALL_SHARE = 0.6
#: The same where steps are slow: with enough time left for the report.
_LATEST_SHARE = 0.8


def below(dump_folder: str, folder: str) -> str:
    """A folder of the run: below `dump_folder`, unless it is absolute or a URL."""
    return folder if is_url(folder) else os.path.join(dump_folder, folder)


def resolved(d: Config) -> Config:
    """The sections, with folders joined to `job.dump_folder` and the sizes of validation filled in."""
    root, training, validation = d.job.dump_folder, d.training, d.validation

    def with_folders(section: S, *names: str) -> S:
        return replace(section, **{n: below(root, v) for n in names if (v := getattr(section, n)) is not None})

    sizes = {
        "batch_size": training.batch_size if validation.batch_size is None else validation.batch_size,
        "seq_len": training.seq_len if validation.seq_len is None else validation.seq_len,
    }
    return replace(
        d,
        job=with_folders(d.job, "save_config_file"),
        checkpoint=with_folders(d.checkpoint, "folder"),
        metrics=with_folders(d.metrics, "save_tb_folder"),
        profiling=with_folders(d.profiling, "save_traces_folder", "save_memory_snapshot_folder"),
        validation=replace(validation, **sizes),
    )


def data_plan(d: Config) -> plans.DataPlan:
    return plans.DataPlan(
        dataset=d.training.dataset,
        path=d.training.dataset_path,
        seq_len=d.training.seq_len,
        seed=d.data.seed,
        shuffle=d.data.shuffle,
        epochs=d.training.epochs,
        num_workers=d.data.num_workers,
        token_cache=d.data.token_cache,
        prefetch=d.data.prefetch,
        pin_memory=d.data.pin_memory,
        persistent_workers=d.data.persistent_workers,
        skip_steps=tuple(sorted(map(steps_of, d.data.skip_steps))),
    )


def float8_plan(d: Config) -> plans.Float8Plan:
    section = d.float8
    if not section.enable_float8_linear:
        return plans.Float8Plan()
    return plans.Float8Plan(
        enable=True,
        recipe=section.recipe_name,
        all_gather=section.enable_fsdp_float8_all_gather,
        precompute=section.precompute_float8_dynamic_scale_for_fsdp,
        keep=tuple(part for part in section.filter_fqns if part != AUTO_FILTER),
        emulate=section.emulate,
        min_features=section.min_features,
        drift_check=section.drift_check,
        skip_small=AUTO_FILTER in section.filter_fqns,
    )


def compile_plan(d: Config) -> plans.CompilePlan:
    on, section = d.training.compile, d.compile
    return plans.CompilePlan(
        model=on and "model" in section.components,
        loss=on and "loss" in section.components,
        backend=section.backend,
        cache_dir=section.cache_dir,
    )


def optimizer_plan(d: Config) -> plans.OptimizerPlan:
    optimizer, training = d.optimizer, d.training
    return plans.OptimizerPlan(
        name=optimizer.name,
        lr=optimizer.lr,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        implementation=optimizer.implementation,
        max_norm=training.max_norm,
    )


def validation_plan(d: Config) -> plans.ValidationPlan:
    v, training = d.validation, d.training
    return plans.ValidationPlan(
        enable=v.enable,
        freq=v.freq,
        steps=v.steps,
        batch_size=training.batch_size if v.batch_size is None else v.batch_size,
        seq_len=training.seq_len if v.seq_len is None else v.seq_len,
        dataset=v.dataset,
        path=v.dataset_path,
    )


def checkpoint_plan(d: Config) -> plans.CheckpointPlan:
    c = d.checkpoint
    return plans.CheckpointPlan(
        enable=c.enable_checkpoint,
        folder=below(d.job.dump_folder, c.folder),
        interval=c.interval,
        interval_type=c.interval_type,
        milestones=c.milestones if isinstance(c.milestones, str) else tuple(c.milestones),
        first_step=c.enable_first_step_checkpoint,
        weights_only=c.export_dtype if c.model_weights_only else None,
        seed_only=c.create_seed_checkpoint,
        start=c.start,
        load_step=None if c.load_step == -1 else c.load_step,
        exclude_from_loading=tuple(c.exclude_from_loading),
        allow_missing=tuple(c.allow_missing),
        allow_changes=tuple(c.allow_changes),
        initial_load_path=c.initial_load_path,
        initial_load_model_only=c.initial_load_model_only,
        verify=c.verify,
        verify_saves=c.verify_saves,
        keep_latest_k=c.keep_latest_k,
        keep_every=c.keep_every,
        keep_best=c.keep_best,
        async_mode=c.async_mode,
    )


def stall_plan(d: Config) -> plans.StallPlan:
    share, deadline = _STALL_SHARE, d.stall.deadline_seconds
    if deadline is None:
        deadline = share * d.comm.train_timeout_seconds
    return plans.StallPlan(
        deadline_seconds=deadline,
        latest_seconds=_LATEST_SHARE * d.comm.train_timeout_seconds,
        patience_seconds=max(deadline, share * d.comm.init_timeout_seconds),
        heartbeat_seconds=min(d.stall.heartbeat_seconds, deadline / 2) if deadline else d.stall.heartbeat_seconds,
    )


def profile_plan(d: Config) -> plans.ProfilePlan:
    job, profiling = d.job, d.profiling
    traces, snapshots = profiling.save_traces_folder, profiling.save_memory_snapshot_folder
    return plans.ProfilePlan(
        trace_folder=below(job.dump_folder, traces) if profiling.enable_profiling else None,
        snapshot_folder=below(job.dump_folder, snapshots) if profiling.enable_memory_snapshot else None,
        freq=profiling.profile_freq,
        warmup=profiling.profiler_warmup,
        active=profiling.profiler_active,
    )


def observe_plan(d: Config) -> plans.ObservePlan:
    job, metrics = d.job, d.metrics
    saved = job.save_config_file
    return plans.ObservePlan(
        dump_folder=job.dump_folder,
        description=job.description,
        log_freq=metrics.log_freq,
        log_style=metrics.log_style,
        color=metrics.enable_color_printing,
        progress=metrics.enable_progress,
        tensorboard_folder=below(job.dump_folder, metrics.save_tb_folder) if metrics.enable_tensorboard else None,
        rank_0_only=metrics.rank_0_only,
        wandb=metrics.enable_wandb,
        layer_norms=metrics.layer_norms,
        peak_flops=None if metrics.peak_tflops is None else metrics.peak_tflops * 1e12,
        print_config=job.print_config,
        save_config_file=None if saved is None else below(job.dump_folder, saved),
    )
