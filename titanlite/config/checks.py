"""Keys that contradict each other, whatever the number of ranks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

from titanlite.config.errors import Problem
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import steps_of
from titanlite.config.toml import quote
from titanlite.config.urls import is_url, url_problem
from titanlite.utils import counted


def contradictions(config: LoadedConfig) -> list[Problem]:
    """Every pair of keys that cannot both be meant."""
    found: list[Problem] = []

    def contradict(key: str, message: str, *others: str) -> None:
        found.append(Problem(config.place(key), key, message, about=(key, *others)))

    _schedule(config, contradict)
    _activations(config, contradict)
    d = config.sections
    if d.training.data_parallel_type == "ddp" and d.training.data_parallel_shard_degree > 1:
        contradict(
            "training.data_parallel_shard_degree",
            f'is {d.training.data_parallel_shard_degree}, but training.data_parallel_type = "ddp" shards nothing',
            "training.data_parallel_type",
        )
    if d.training.prefetch and d.training.fsdp_units == "root":
        contradict(
            "training.prefetch",
            f'is {d.training.prefetch}, but training.fsdp_units = "root" gathers everything at once',
            "training.fsdp_units",
        )
    _profiler(config, contradict)
    _async_tensor(config, contradict)
    _float8(config, contradict)
    _loss_chunks(config, contradict)
    _stall(config, contradict)
    _guard(config, contradict)
    if d.training.compile and not d.compile.components:
        contradict("compile.components", "is empty, but training.compile = true", "training.compile")
    _saves(config, contradict)
    if d.checkpoint.last_save_in_hf and not d.checkpoint.model_weights_only:
        contradict(
            "checkpoint.last_save_in_hf",
            "needs checkpoint.model_weights_only = true: it holds weights only",
            "checkpoint.model_weights_only",
        )
    _start(config, contradict)
    if d.debug.deterministic_warn_only and not d.debug.deterministic:
        contradict("debug.deterministic_warn_only", "needs debug.deterministic = true", "debug.deterministic")
    if d.model.vocab_size is not None and d.model.overrides.get("vocab_size", d.model.vocab_size) != d.model.vocab_size:
        contradict(
            "model.vocab_size",
            f"is {d.model.vocab_size}, but model.overrides.vocab_size = {quote(d.model.overrides['vocab_size'])}",
            "model.overrides.vocab_size",
        )
    if "norm_type" in d.model.overrides:
        contradict("model.overrides.norm_type", "is set by model.norm_type")
    if d.model.rope_scaling is not None and "rope_scaling" in d.model.overrides:
        contradict("model.overrides.rope_scaling", "is set by model.rope_scaling already", "model.rope_scaling")
    return found


def _profiler(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    """A cycle holds its warm-up and the steps recorded."""
    p = config.sections.profiling
    if p.enable_profiling and p.profile_freq < p.profiler_warmup + p.profiler_active:
        keys = [f"profiling.{name}" for name in ("profile_freq", "profiler_warmup", "profiler_active")]
        contradict(
            next((key for key in keys if config.is_given(key)), keys[0]),
            f"a cycle of profiling.profile_freq = {p.profile_freq} steps is shorter than profiling.profiler_warmup "
            f"{p.profiler_warmup} + profiling.profiler_active {p.profiler_active}",
            *keys,
        )


def _start(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    """What a run starts from."""
    c = config.sections.checkpoint
    for key in ("start", "initial_load_in_hf"):
        wanted = c.start == "from" if key == "start" else c.initial_load_in_hf
        if wanted and c.initial_load_path is None:
            contradict(f"checkpoint.{key}", "needs checkpoint.initial_load_path", "checkpoint.initial_load_path")
    if c.start == "fresh":
        nothing = 'but checkpoint.start = "fresh" loads nothing'
        if c.load_step >= 0:
            contradict("checkpoint.load_step", f"asks for step {c.load_step}, {nothing}", "checkpoint.start")
        if c.initial_load_path is not None:
            message = f'is {quote(c.initial_load_path)}, {nothing}: "from" starts there'
            contradict("checkpoint.initial_load_path", message, "checkpoint.start")
    needed = {
        "start": (c.start == "resume", '"resume" needs'),
        "initial_load_path": (c.initial_load_path is not None, "needs"),
    }
    for key, (wanted, needs) in needed.items():
        if wanted and not c.enable_checkpoint:
            message = f"{needs} checkpoint.enable_checkpoint = true"
            contradict(f"checkpoint.{key}", message, "checkpoint.enable_checkpoint")


def _schedule(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    schedule, peak = config.sections.lr_scheduler, config.sections.optimizer.lr
    shapers = [k for k in ("decay_ratio", "decay_steps", "plateau_ratio") if getattr(schedule, k) is not None]
    if schedule.decay_type == "plateau" and schedule.plateau_ratio is None:
        contradict(
            "lr_scheduler.decay_type",
            '"plateau" needs lr_scheduler.plateau_ratio, the share it is held for',
            "lr_scheduler.plateau_ratio",
        )
    if schedule.decay_type == "constant":
        if schedule.min_lr_factor:
            shapers.append("min_lr_factor")
        for key in shapers:
            message = 'has nothing to shape: lr_scheduler.decay_type = "constant"'
            contradict(f"lr_scheduler.{key}", message, "lr_scheduler.decay_type")
    if schedule.style == "fsdp":
        for key in ("decay_ratio", "decay_steps"):
            if getattr(schedule, key) is not None:
                contradict(
                    f"lr_scheduler.{key}",
                    'has no meaning under lr_scheduler.style = "fsdp", whose decay runs over the whole schedule',
                    "lr_scheduler.style",
                )
    if schedule.min_lr is not None and schedule.min_lr > peak:
        contradict(
            "lr_scheduler.min_lr", f"is {quote(schedule.min_lr)}, above optimizer.lr = {quote(peak)}", "optimizer.lr"
        )


def _activations(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    d = config.sections
    ac = d.activation_checkpoint
    if ac.mode == "budget" and not (d.training.compile and "model" in d.compile.components):
        lacking = "compile.components" if d.training.compile else "training.compile"
        contradict(
            "activation_checkpoint.mode",
            f'"budget" is kept by the compiler: it needs {"model in " if d.training.compile else ""}{lacking}'
            f"{'' if d.training.compile else ' = true'}. Without it, full and selective save memory",
            lacking,
        )
    if ac.offload and ac.mode == "selective" and ac.selective_ac_option == "op":
        contradict(
            "activation_checkpoint.offload",
            "moves what autograd saves, but what the per-op policy saves is held elsewhere, on the device: take "
            'mode = "full", "none", or selective_ac_option = "N"',
            "activation_checkpoint.selective_ac_option",
        )


def _saves(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    d = config.sections
    if d.checkpoint.keep_best and not d.validation.enable:
        contradict(
            "checkpoint.keep_best",
            f"is {d.checkpoint.keep_best}, but there is no validation loss to judge by: it needs "
            "validation.enable = true",
            "validation.enable",
        )
    never = [step for step in d.checkpoint.milestones if isinstance(step, int) and step < 1]
    if never:
        contradict("checkpoint.milestones", f"holds {never[0]}: the first step is 1")
    if d.checkpoint.create_seed_checkpoint and not d.checkpoint.enable_checkpoint:
        contradict(
            "checkpoint.create_seed_checkpoint",
            "needs checkpoint.enable_checkpoint = true",
            "checkpoint.enable_checkpoint",
        )


def _async_tensor(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    """The overlap is made by inductor, in the graphs of the blocks."""
    d, key = config.sections, "experimental.enable_async_tensor_parallel"
    if not d.experimental.enable_async_tensor_parallel:
        return
    if not d.training.compile:
        contradict(key, "needs training.compile = true", "training.compile")
    elif "model" not in d.compile.components:
        contradict(key, "needs model in compile.components", "compile.components")
    elif d.compile.backend != "inductor":
        contradict(key, f'needs compile.backend = "inductor", not {quote(d.compile.backend)}', "compile.backend")


def _float8(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    d, recipe = config.sections, config.sections.float8.recipe_name
    if not d.float8.enable_float8_linear:
        return
    gather, precompute = "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"
    if recipe != "tensorwise":
        if d.float8.enable_fsdp_float8_all_gather:
            contradict(
                f"float8.{gather}",
                "needs one scale for each weight, and float8.recipe_name = "
                f'{quote(recipe)} has one for each row: take "tensorwise", or set this to false',
                "float8.recipe_name",
            )
        if d.training.tensor_parallel_degree > 1:
            contradict(
                "float8.recipe_name",
                f"{quote(recipe)} does not work with training.tensor_parallel_degree = "
                f'{d.training.tensor_parallel_degree}: torchao divides products of the recipe "tensorwise" only',
                "training.tensor_parallel_degree",
            )
    if d.float8.precompute_float8_dynamic_scale_for_fsdp:
        if not d.float8.enable_fsdp_float8_all_gather:
            contradict(
                f"float8.{precompute}",
                f"needs float8.{gather} = true: weights gathered in high precision are scaled after that",
                f"float8.{gather}",
            )
        elif d.training.enable_cpu_offload:
            contradict(
                f"float8.{precompute}",
                "does not work with training.enable_cpu_offload = true: weights lose their scales on the way from "
                "host memory. Without it they are computed there, one by one",
                "training.enable_cpu_offload",
            )
    if d.float8.enable_fsdp_float8_all_gather and isinstance(d.training.reshard_after_forward, int):
        contradict(
            f"float8.{gather}",
            f"does not work with training.reshard_after_forward = {d.training.reshard_after_forward}: torch keeps no "
            'weights gathered in float8 sharded over fewer ranks. "default", "always" and "never" work',
            "training.reshard_after_forward",
        )


def _loss_chunks(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    """A piece of the loss holds a token at least."""
    t, e = config.sections.training, config.sections.experimental
    rows = max(t.batch_size // (e.pipeline_parallel_microbatches or e.pipeline_parallel_degree), 1)
    length = max(t.seq_len // e.context_parallel_degree, 1)
    if t.loss_chunks > rows * length:
        contradict(
            "training.loss_chunks",
            f"is {t.loss_chunks}, but a rank computes the loss of {counted(rows * length, 'tokens')} at once ("
            f"{counted(rows, 'sequences')} x {counted(length, 'tokens')}): take so many pieces at most",
            "training.batch_size",
            "training.seq_len",
            "experimental.pipeline_parallel_microbatches",
            "experimental.context_parallel_degree",
        )


def _stall(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    deadline, timeout = config.sections.stall.deadline_seconds, config.sections.comm.train_timeout_seconds
    if deadline is None or deadline == 0:
        return
    if deadline >= timeout:
        contradict(
            "stall.deadline_seconds",
            f"is {quote(deadline)}, but comm.train_timeout_seconds = {timeout} ends a run that waits before that is "
            "reported: lower the one or raise the other",
            "comm.train_timeout_seconds",
        )
    beat = config.sections.stall.heartbeat_seconds
    if config.is_given("stall.heartbeat_seconds") and beat > deadline:
        contradict(
            "stall.heartbeat_seconds",
            f"is {quote(beat)}, more than stall.deadline_seconds = {quote(deadline)}: nobody would say in that time "
            "where it is",
            "stall.deadline_seconds",
        )


def _guard(config: LoadedConfig, contradict: Callable[..., None]) -> None:
    d = config.sections
    if d.guard.policy == "rollback" and not d.checkpoint.enable_checkpoint:
        contradict(
            "guard.policy",
            '"rollback" goes back to a checkpoint: it needs checkpoint.enable_checkpoint = true',
            "checkpoint.enable_checkpoint",
        )
    if d.guard.policy != "stop" and d.guard.max_skips >= d.guard.window:
        contradict(
            "guard.max_skips",
            f"is {d.guard.max_skips} of the last {d.guard.window} steps (guard.window): a run that does nothing but "
            "skip would never end. Take less than guard.window",
            "guard.window",
        )
    for item in d.data.skip_steps:
        if isinstance(item, str) and steps_of(item)[0] > steps_of(item)[1]:
            contradict("data.skip_steps", f"{quote(item)} ends before it begins")


def missing_files(config: LoadedConfig) -> list[Problem]:
    """Files and folders that are named and not there, on this machine."""
    named = ["model.tokenizer_path", "training.dataset_path"]
    if config.sections.validation.enable:
        named.append("validation.dataset_path")
    if not _has_checkpoints(config):  # else it is not used any more
        named.append("checkpoint.initial_load_path")
    return [
        Problem(config.place(key), key, f"no file or folder {quote(config.value(key))}")
        for key in named
        if config.value(key) is not None and not is_url(config.value(key)) and not os.path.exists(config.value(key))
    ]


def _has_checkpoints(config: LoadedConfig) -> bool:
    """Whether the folder that the run saves in looks as if it held some; a store is not asked here."""
    if is_url(config.sections.checkpoint.folder):
        return True
    folder = os.path.join(config.sections.job.dump_folder, config.sections.checkpoint.folder)
    return os.path.isdir(folder) and any(name.startswith("step-") for name in os.listdir(folder))


def missing_packages(config: LoadedConfig) -> list[Problem]:
    """Optional packages that a key needs and that are not installed here."""
    return _missing_wandb(config) + unusable_urls(config)


def unusable_urls(config: LoadedConfig) -> list[Problem]:
    """Stores of checkpoints that cannot be reached from here whatever they hold."""
    found = []
    for key in (
        ("checkpoint.folder", "checkpoint.initial_load_path") if config.value("checkpoint.enable_checkpoint") else ()
    ):
        url = config.value(key)
        if url is not None and is_url(url) and (problem := url_problem(url)) is not None:
            found.append(Problem(config.place(key), key, f"{quote(url)} {problem[0]}", problem[1]))
    return found


def _missing_wandb(config: LoadedConfig) -> list[Problem]:
    key = "metrics.enable_wandb"
    spec = importlib.util.find_spec("wandb") if config.value(key) else None
    # A folder of that name, as wandb itself makes one in the working directory, is found too, but has no origin.
    if not config.value(key) or (spec is not None and spec.origin is not None):
        return []
    advice = "pip install 'titanlite[wandb]', or leave the key out"
    return [Problem(config.place(key), key, "needs the package wandb, which is not installed", advice)]
