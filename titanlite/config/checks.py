"""Check the second stage of a config: keys that contradict each other, and files and packages that are missing.

The first stage checks each key by itself (`titanlite.config.load`), the third the ranks and the model
(`titanlite.fit`). No torch here.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from titanlite.config import extensions
from titanlite.config.errors import Problem
from titanlite.config.keys import keys
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import AUTO_FILTER, Config, DataSource, steps_of
from titanlite.config.text_names import fetch_hint, name_problem
from titanlite.config.toml import quote
from titanlite.config.urls import is_url, url_problem
from titanlite.utils import counted, is_dotted

_AC_OPTION = "activation_checkpoint.selective_ac_option"
_GATHER = "float8.enable_fsdp_float8_all_gather"

#: (code, key, message, what to do about it)
Finding = tuple[str, str, str, str]


def placed(config: LoadedConfig, found: Iterable[Finding]) -> list[Problem]:
    """Return findings as problems, each at the place of its key; of a default, at that of a key in the message."""

    def place(key: str, message: str) -> str:
        named = re.findall(r"\w+\.\w+", f"{key} {message}")
        places = map(config.place, [key, *filter(keys().__contains__, named)])
        return next(filter(None, places), "")

    return [Problem(place(key, message), key, message, hint, code=code) for code, key, message, hint in found]


# Stage 2: contradictions

_GIVEN = object()
#: (key, its value, the key that it needs, the value of that). _GIVEN: any value but none, and of the first key but 0.
_NEEDS: tuple[tuple[str, Any, str, Any], ...] = (
    ("checkpoint.start", "from", "checkpoint.initial_load_path", _GIVEN),
    ("checkpoint.start", "resume", "checkpoint.enable_checkpoint", True),
    ("checkpoint.initial_load_in_hf", True, "checkpoint.initial_load_path", _GIVEN),
    ("checkpoint.initial_load_path", _GIVEN, "checkpoint.enable_checkpoint", True),
    ("checkpoint.create_seed_checkpoint", True, "checkpoint.enable_checkpoint", True),
    ("checkpoint.last_save_in_hf", True, "checkpoint.model_weights_only", True),
    ("checkpoint.keep_best", _GIVEN, "validation.enable", True),
    ("guard.policy", "rollback", "checkpoint.enable_checkpoint", True),
    ("data.prompt_key", _GIVEN, "data.completion_key", _GIVEN),
    ("data.completion_key", _GIVEN, "data.prompt_key", _GIVEN),
    ("debug.deterministic_warn_only", True, "debug.deterministic", True),
    ("lr_scheduler.decay_type", "plateau", "lr_scheduler.plateau_ratio", _GIVEN),
    ("activation_checkpoint.mode", "budget", "training.compile", True),
    ("experimental.enable_async_tensor_parallel", True, "training.compile", True),
)
#: Keys that shape the decay of the learning rate.
_DECAY = ("decay_ratio", "decay_steps", "plateau_ratio", "min_lr_factor")


def contradictions(config: LoadedConfig) -> list[Problem]:
    """Return every pair of keys that cannot both hold, whatever the number of ranks."""
    d = config.sections
    found = [*_needs(config), *_training(d), *_sources(config), *_validation(d), *_runtime(d)]
    found += extensions.missing(config)
    if d.float8.enable_float8_linear:
        found += _float8_keys(d)
    return placed(config, found)


def _needs(config: LoadedConfig) -> Iterator[Finding]:
    for key, value, other, wanted in _NEEDS:
        given, there = config.value(key), config.value(other)
        applies = bool(given) if value is _GIVEN else given == value
        if applies and (there is None if wanted is _GIVEN else there != wanted):
            subject = f"{quote(given)} needs" if isinstance(value, str) else "needs"
            yield "needs", key, f"{subject} {other}{'' if wanted is _GIVEN else f' = {quote(wanted)}'}", ""


def _training(d: Config) -> Iterator[Finding]:
    """Check model, schedule, batch and compilation."""
    t, s, e, ac = d.training, d.lr_scheduler, d.experimental, d.activation_checkpoint
    overrides = d.model.overrides
    if d.model.vocab_size is not None and overrides.get("vocab_size", d.model.vocab_size) != d.model.vocab_size:
        other = f"model.overrides.vocab_size = {quote(overrides['vocab_size'])}"
        yield "conflict", "model.vocab_size", f"is {d.model.vocab_size}, but {other}", ""
    for name in ("norm_type", "rope_scaling"):
        if getattr(d.model, name) is not None and name in overrides:
            yield "conflict", f"model.overrides.{name}", f"is set by model.{name}", ""
    if t.data_parallel_type == "ddp" and t.data_parallel_shard_degree > 1:
        message = f'is {t.data_parallel_shard_degree}, but training.data_parallel_type = "ddp" shards nothing'
        yield "conflict", "training.data_parallel_shard_degree", message, ""
    if t.prefetch and t.fsdp_units == "root":
        message = f'is {t.prefetch}, but training.fsdp_units = "root" gathers everything at once'
        yield "conflict", "training.prefetch", message, ""
    for name in [name for name in _DECAY if getattr(s, name)]:
        if s.decay_type == "constant":
            message = 'has nothing to shape: lr_scheduler.decay_type = "constant"'
            yield "conflict", f"lr_scheduler.{name}", message, ""
        elif s.style == "fsdp" and name in ("decay_ratio", "decay_steps"):
            message = 'has no meaning under lr_scheduler.style = "fsdp", whose decay runs over the whole schedule'
            yield "conflict", f"lr_scheduler.{name}", message, ""
    if s.min_lr is not None and s.min_lr > d.optimizer.lr:
        message = f"is {quote(s.min_lr)}, above optimizer.lr = {quote(d.optimizer.lr)}"
        yield "conflict", "lr_scheduler.min_lr", message, ""
    for key, sources in (("data.source", d.data.source), ("validation.sources", d.validation.sources)):
        for number, source in enumerate(sources, 1):
            prompt = source.prompt_key or d.data.prompt_key
            completion = source.completion_key or d.data.completion_key
            if (prompt is None) != (completion is None):
                given, other = ("prompt_key", "completion_key") if prompt else ("completion_key", "prompt_key")
                yield "needs", key, f"entry {number} has {given} and needs {other}", ""
    for key, on in (
        ("activation_checkpoint.mode", ac.mode == "budget"),
        ("experimental.enable_async_tensor_parallel", e.enable_async_tensor_parallel),
    ):
        if on and t.compile and "model" not in d.compile.components:
            yield "needs", key, "needs model in compile.components", ""
    if e.enable_async_tensor_parallel and d.compile.backend != "inductor":
        message = f'needs compile.backend = "inductor", not {quote(d.compile.backend)}'
        yield "needs", "experimental.enable_async_tensor_parallel", message, ""
    if ac.offload and ac.mode == "selective" and ac.selective_ac_option == "op":
        message = f'does not work with {_AC_OPTION} = "op": its tensors are held elsewhere, on the device'
        hint = 'take mode = "full" or "none", or selective_ac_option = "N"'
        yield "conflict", "activation_checkpoint.offload", message, hint
    rows = max(t.batch_size // (e.pipeline_parallel_microbatches or e.pipeline_parallel_degree), 1)
    length = max(t.seq_len // e.context_parallel_degree, 1)
    if t.loss_chunks > rows * length:
        message = (
            f"is {t.loss_chunks}, but a rank computes the loss of {counted(rows * length, 'tokens')} at once "
            f"({counted(rows, 'sequences')} x {counted(length, 'tokens')})"
        )
        yield "conflict", "training.loss_chunks", message, f"take {rows * length} at most"


def _validation(d: Config) -> Iterator[Finding]:
    """Check the sources of validation: what names them, and keys that are for training."""
    v, key, seen = d.validation, "validation.sources", set[str]()
    if v.sources and (v.dataset_path is not None or v.dataset != keys()["validation.dataset"].default):
        other = "dataset" if v.dataset_path is None else "dataset_path"
        yield "conflict", f"validation.{other}", f"has no effect beside {key}", "make it one of the sources"
    for i, source in enumerate(v.sources):
        at, name = f"{key}[{i}]", source.name or ""
        if not name:
            yield "missing", f"{at}.name", "is missing, and the losses of a source have its name", 'as name = "wiki"'
        elif name in seen:
            yield "conflict", f"{at}.name", f"{quote(name)} is the name of two sources", "give each its own name"
        elif is_dotted(name):
            hint = "only validation.dataset takes a dotted path"
            yield "unknown-value", f"{at}.name", f"{quote(name)} is a dotted path", hint
        elif source.path is None and (problem := name_problem(name)):
            yield "unknown-value", f"{at}.name", f"{quote(name)} {problem[0]}", problem[1]
        seen.add(name)
        for field in ("weight", "epochs"):
            if getattr(source, field) != getattr(DataSource(), field):
                message = "is for mixtures of training text: validation reads each source by itself"
                yield "conflict", f"{at}.{field}", message, "remove it"


def _runtime(d: Config) -> Iterator[Finding]:
    """Check checkpoints, guard, watchdog and profiler."""
    c, p, deadline, timeout = d.checkpoint, d.profiling, d.stall.deadline_seconds, d.comm.train_timeout_seconds
    if c.start == "fresh":
        nothing = 'but checkpoint.start = "fresh" loads nothing'
        if c.load_step >= 0:
            yield "conflict", "checkpoint.load_step", f"is {c.load_step}, {nothing}", ""
        if c.initial_load_path is not None:
            message = f'is {quote(c.initial_load_path)}, {nothing}: "from" starts there'
            yield "conflict", "checkpoint.initial_load_path", message, ""
    if d.guard.policy != "stop" and d.guard.max_skips >= d.guard.window:
        message = f"is {d.guard.max_skips}, so a run that skips all of guard.window = {d.guard.window} steps never ends"
        yield "conflict", "guard.max_skips", message, "take less than guard.window"
    for item in d.data.skip_steps:
        if steps_of(item)[0] > steps_of(item)[1]:
            yield "out-of-range", "data.skip_steps", f"{quote(item)} ends before it begins", ""
    if deadline and deadline >= timeout:
        message = f"is {quote(deadline)}, but comm.train_timeout_seconds = {timeout} ends a run before that report"
        yield "conflict", "stall.deadline_seconds", message, "lower the one or raise the other"
    if p.enable_profiling and p.profile_freq < p.profiler_warmup + p.profiler_active:
        message = (
            f"a cycle of profiling.profile_freq = {p.profile_freq} steps is shorter than profiling.profiler_warmup "
            f"{p.profiler_warmup} + profiling.profiler_active {p.profiler_active}"
        )
        yield "conflict", "profiling.profile_freq", message, ""


def _float8_keys(d: Config) -> Iterator[Finding]:
    f, t = d.float8, d.training
    precompute = "float8.precompute_float8_dynamic_scale_for_fsdp"
    recipe = quote(f.recipe_name)
    if f.recipe_name == "rowwise_with_gw_hp" and AUTO_FILTER in f.filter_fqns:
        message = f"{quote(AUTO_FILTER)} does not work with float8.recipe_name = {recipe}: torchao has no sizes for it"
        hint = "leave it out; float8.min_features = 4096 keeps linears with fewer input or output features"
        yield "conflict", "float8.filter_fqns", message, hint
    if f.recipe_name != "tensorwise" and f.enable_fsdp_float8_all_gather:
        message = f"needs one scale for each weight, and float8.recipe_name = {recipe} has one for each row"
        yield "conflict", _GATHER, message, 'take "tensorwise", or set this to false'
    if f.recipe_name != "tensorwise" and t.tensor_parallel_degree > 1:
        message = f"{recipe} does not work with training.tensor_parallel_degree = {t.tensor_parallel_degree}"
        yield "conflict", "float8.recipe_name", message, 'torchao divides products of the recipe "tensorwise" only'
    if f.precompute_float8_dynamic_scale_for_fsdp and not f.enable_fsdp_float8_all_gather:
        yield "needs", precompute, f"needs {_GATHER} = true: other weights get their scales after the gathering", ""
    elif f.precompute_float8_dynamic_scale_for_fsdp and t.enable_cpu_offload:
        message = "does not work with training.enable_cpu_offload = true: weights in host memory lose their scales"
        yield "conflict", precompute, message, "set it to false: the scales are then computed one by one"
    if f.enable_fsdp_float8_all_gather and isinstance(t.reshard_after_forward, int):
        message = f"does not work with training.reshard_after_forward = {t.reshard_after_forward}"
        hint = 'torch gathers float8 weights from all ranks only: take "default", "always" or "never"'
        yield "conflict", _GATHER, message, hint


def _sources(config: LoadedConfig) -> Iterator[Finding]:
    """Find names of text that lead nowhere, and keys that a mixture excludes."""
    d = config.sections
    for section, text in (("training", d.training), ("validation", d.validation)):
        if text.dataset_path is not None and is_dotted(text.dataset):
            message = f"has no effect: {section}.dataset = {quote(text.dataset)} returns the text"
            yield "conflict", f"{section}.dataset_path", message, "give one of the two"
        if text.dataset_path is None and (problem := name_problem(text.dataset)):
            yield "unknown-value", f"{section}.dataset", f"{quote(text.dataset)} {problem[0]}", problem[1]
    tables: list[tuple[str, Any]] = [("data", d.data), *(("data.source", source) for source in d.data.source)]
    for key, table in (*tables, *(("validation.sources", source) for source in d.validation.sources)):
        for name in ("text_key", "prompt_key", "completion_key") if table.messages_key else ():
            if getattr(table, name):
                where = f"data.{name}" if key == "data" else key
                yield "conflict", where, f"has {name} beside messages_key, which names the text", "leave one out"
    names = [source.name or source.path for source in d.data.source]
    for number, source in enumerate(d.data.source):
        key = f"data.source[{number}]"
        if source.path is None:
            problem = name_problem(source.name) if source.name else ("has neither name nor path", "")
            if problem:
                yield "unknown-value", "data.source", f"{key} {quote(source.name or '')} {problem[0]}", problem[1]
        if names.index(names[number]) != number:
            yield "conflict", "data.source", f"two sources are named {quote(names[number])}", "give each a name"
    for number, phase in enumerate(d.data.phase):
        key = f"data.phase[{number}]"
        if (phase.step is None) == (phase.tokens is None):
            yield "conflict", "data.phase", f"{key} needs step or tokens, one of the two", ""
        for name in sorted(set(phase.weights) - set(names)):
            yield "unknown-value", "data.phase", f"{key} weighs {quote(name)}, which is no name of a data.source", ""
        if phase.weights and not any(phase.weights.values()):
            yield "conflict", "data.phase", f"{key} gives no source a share", ""
    for key in ("training.dataset_path", "training.epochs") if d.data.source else ():
        if config.is_given(key) and config.value(key) is not None:
            hint = "give epochs of each source" if key == "training.epochs" else "make it one of the sources"
            yield "conflict", key, "excludes data.source", hint


# Stage 2, on this machine: files and packages


def missing_files(config: LoadedConfig) -> list[Problem]:
    """Return a problem for each local file or folder that a key names and that does not exist."""
    names = ["model.tokenizer_path", "training.dataset_path"]
    if config.sections.validation.enable:
        names.append("validation.dataset_path")
    if not _has_checkpoints(config.sections):  # a run with checkpoints of its own does not read it
        names.append("checkpoint.initial_load_path")
    given = {key: config.value(key) for key in names}
    given |= {f"data.source[{i}].path": source.path for i, source in enumerate(config.sections.data.source)}
    if config.sections.validation.enable:
        sources = enumerate(config.sections.validation.sources)
        given |= {f"validation.sources[{i}].path": source.path for i, source in sources}
    paths = {key: path for key, path in given.items() if path and not is_url(path) and not _exists(path)}
    hints = {key: fetch_hint(path) if key == "model.tokenizer_path" else "" for key, path in paths.items()}
    return placed(config, (("no-file", key, f"no file or folder {quote(paths[key])}", hints[key]) for key in paths))


def _exists(path: str) -> bool:
    # Megatron's token files are named without their suffixes.
    return os.path.exists(path) or os.path.exists(f"{path}.idx") or any(glob.iglob(path, recursive=True))


def _has_checkpoints(d: Config) -> bool:
    """Return whether the checkpoint folder seems to hold checkpoints. True for a store, which is not asked."""
    if is_url(d.checkpoint.folder):
        return True
    folder = os.path.join(d.job.dump_folder, d.checkpoint.folder)
    return os.path.isdir(folder) and any(name.startswith("step-") for name in os.listdir(folder))


def missing_packages(config: LoadedConfig) -> list[Problem]:
    """Return problems for optional packages that a key needs and that are not installed, and unusable stores."""
    found: list[Finding] = []
    spec = importlib.util.find_spec("wandb") if config.sections.metrics.enable_wandb else None
    # A folder of that name, as wandb itself makes one in the working directory, is found too, but has no origin.
    if config.sections.metrics.enable_wandb and (spec is None or spec.origin is None):
        hint = "pip install 'titanlite[wandb]', or leave the key out"
        message = "needs the package wandb, which is not installed"
        found.append(("missing-package", "metrics.enable_wandb", message, hint))
    names = ("checkpoint.folder", "checkpoint.initial_load_path")
    for key in names if config.sections.checkpoint.enable_checkpoint else ():
        url = config.value(key)
        if url is not None and is_url(url) and (problem := url_problem(url)) is not None:
            found.append(("url", key, f"{quote(url)} {problem[0]}", problem[1]))
    return placed(config, found)
