"""Check the second stage of a config: keys that contradict each other, and files and packages that
are missing.

The first stage checks each key by itself (`titanlite.config.load`), the third the ranks and the
model (`titanlite.resolve.load`). No torch here.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from titanlite import doors
from titanlite.config import import_path_keys
from titanlite.config.data_sections import Data, DataPhase, DataSource, steps_of
from titanlite.config.dataset_registry import BUNDLED_TOKENIZER_NAME, fetch_hint, name_problem
from titanlite.config.decays import DECAYS, KEYS_OF_END
from titanlite.config.errors import Problem
from titanlite.config.keys import keys
from titanlite.config.loaded import LoadedConfig
from titanlite.config.rules import Rule, broken_rules, contains, is_set, several
from titanlite.config.sections import Config
from titanlite.config.toml import quote, quote_key
from titanlite.config.urls import is_url, login_problem, public_name, url_problem
from titanlite.utils import is_dotted, is_hidden, pip_install

ConfigRule = Callable[[LoadedConfig], Iterable[Problem]]


def broken(config: LoadedConfig, rules: Iterable[ConfigRule]) -> list[Problem]:
    """Return what rules find in a config, at the places of its keys."""
    return placed(config, chain.from_iterable(rule(config) for rule in rules))


def placed(config: LoadedConfig, found: Iterable[Problem]) -> list[Problem]:
    """Return problems, each at the place of its key.

    Where the key has its default, the place of another key in the message serves.
    """
    problems = []
    for problem in found:
        names = re.findall(r"\w+\.\w+", f"{problem.key} {problem.message}")
        known = [problem.key, *(name for name in names if name in keys())]
        place = next(filter(None, map(config.place, known)), "")
        problems.append(replace(problem, where=place))
    return problems


# Stage 2: contradictions


_MODE = "activation_checkpoint.mode"
_RATE = "lr_scheduler."
_COMPILE = "training.compile"
_LOAD = "checkpoint.initial_load_path"
_START = "checkpoint.start"
_SAVES = "checkpoint.enable_checkpoint"
_TP = "training.tensor_parallel_degree"
_PP = "experimental.pipeline_parallel_degree"
_HELD_OUT = "validation.dataset"
_SOURCES = "validation.sources"
_ADVICE = "make it one of the sources"
_PAIR = ("prompt_key", "completion_key")
_TEXT_KEYS = ("text_key", *_PAIR)
_EARLY = "optimizer.early_step_in_backward"

#: A value of a key needs one of another.
NEEDS: tuple[Rule, ...] = (
    Rule(_START, "from", _LOAD, is_set),
    Rule(_START, "resume", _SAVES, True),
    Rule("checkpoint.initial_load_in_hf", True, _LOAD, is_set),
    Rule(_LOAD, bool, _SAVES, True),
    Rule("checkpoint.create_seed_checkpoint", True, _SAVES, True),
    Rule("checkpoint.last_save_in_hf", True, "checkpoint.model_weights_only", True),
    Rule("checkpoint.export_ema", True, "optimizer.ema_decay", bool),
    Rule("validation.ema", True, "optimizer.ema_decay", bool),
    Rule("eval.ema", True, "optimizer.ema_decay", bool),
    Rule("guard.policy", "rollback", _SAVES, True),
    *(
        Rule(f"{_RATE}decay_type", kind, f"{_RATE}{name}", is_set)
        for kind, decay in DECAYS.items()
        for name in decay.needs
    ),
    Rule(_MODE, "budget", _COMPILE, True),
    Rule(
        _EARLY,
        True,
        "training.max_norm",
        lambda norm: norm >= 1e9,
        "1e9 turns clipping off: its norm comes after the last update",
    ),
    Rule(_MODE, "budget", "compile.components", contains("model"), '"model" must be among them'),
)
#: A value of a key excludes one of another.
CONFLICTS: tuple[Rule, ...] = (
    Rule("sdc.freq", bool, _EARLY, True, "weights change in the pass that is repeated"),
    Rule(_LOAD, bool, _START, "fresh", '"from" starts there'),
    Rule("checkpoint.load_step", lambda step: step >= 0, _START, "fresh", "it loads nothing"),
    Rule("training.dataset_path", bool, "data.source", bool, _ADVICE),
    Rule("training.epochs", bool, "data.source", bool, "give epochs of each source"),
    Rule("training.dataset_path", bool, "training.dataset", is_dotted, "give one of the two"),
    Rule("validation.dataset_path", bool, _HELD_OUT, is_dotted, "give one of the two"),
    Rule("validation.dataset_path", bool, _SOURCES, bool, _ADVICE),
    Rule(_HELD_OUT, lambda name: name != "c4_validation", _SOURCES, bool, _ADVICE),
    *(
        Rule(f"training.{n}", bool, "training.loss", is_dotted, "add it there")
        for n in ("z_loss", "label_smoothing")
    ),
    Rule(
        "training.data_parallel_shard_degree",
        several,
        "training.data_parallel_type",
        "ddp",
        "it shards nothing",
    ),
    Rule("training.prefetch", bool, "training.fsdp_units", "root", "it gathers everything at once"),
    Rule(
        "optimizer.name",
        "Muon",
        "training.dtype",
        "bfloat16",
        "its updates would round away; AnyPrecisionAdamW keeps them",
    ),
    Rule(_EARLY, True, "guard.policy", "skip", "a bad step is in the weights by then"),
    Rule(_EARLY, True, _PP, several, "a pipeline accumulates gradients"),
    Rule(_EARLY, True, "training.enable_cpu_offload", True, "it keeps gradients in host memory"),
    Rule(_EARLY, True, "metrics.layer_norms", bool, "gradients are freed one by one"),
    Rule(
        _EARLY,
        True,
        "optimizer.name",
        lambda name: name == "Muon" or is_dotted(name),
        "it may need all gradients",
    ),
    Rule(
        "training.gradient_sync",
        "every",
        _PP,
        several,
        "a pipeline reduces gradients once, after the last micro-batch",
    ),
    *(
        Rule(f"{_RATE}{name}", bool, f"{_RATE}decay_type", kind, "it has no end to shape")
        for kind, decay in DECAYS.items()
        for name in KEYS_OF_END
        if not decay.has_end
    ),
    *(
        Rule(f"{_RATE}{name}", bool, f"{_RATE}style", "fsdp", "its decay runs over all steps")
        for name in ("decay_ratio", "decay_steps")
    ),
)


def _pairs(config: LoadedConfig) -> Iterator[Problem]:
    return broken_rules(config, NEEDS, CONFLICTS)


def _numbers(config: LoadedConfig) -> Iterator[Problem]:
    d = config.sections
    guard = d.guard
    profiling = d.profiling
    least = d.lr_scheduler.min_lr
    if least is not None and least > d.optimizer.peak_lr:
        message = f"is {quote(least)}, above optimizer.lr = {quote(d.optimizer.lr)}"
        yield Problem("conflict", f"{_RATE}min_lr", message)
    if guard.policy != "stop" and guard.max_skips >= guard.window:
        message = (
            f"is {guard.max_skips}, so a run that skips all of guard.window = {guard.window} "
            "steps never ends"
        )
        yield Problem("conflict", "guard.max_skips", message, "take less than guard.window")
    timeout = d.comm.train_timeout_seconds
    if (d.stall.deadline_seconds or 0) >= timeout:
        message = f"comes after comm.train_timeout_seconds = {timeout}, which ends the run"
        yield Problem("conflict", "stall.deadline_seconds", message, "lower the one")
    steps = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < steps:
        message = (
            f"is {profiling.profile_freq} steps, less than profiling.profiler_warmup "
            f"{profiling.profiler_warmup} + profiling.profiler_active {profiling.profiler_active}"
        )
        yield Problem("conflict", "profiling.profile_freq", message)


def _entries(config: LoadedConfig) -> Iterator[Problem]:
    d = config.sections
    for item in d.data.skip_steps:
        first, last = steps_of(item)
        if first > last:
            yield Problem("out-of-range", "data.skip_steps", f"{quote(item)} ends before it begins")
    for name in ("vocab_size", "norm_type", "rope_scaling"):
        ours = getattr(d.model, name)
        other = d.model.overrides.get(name)
        # The size of the vocabulary may be given twice, if it is the same.
        is_same = ours == other and name == "vocab_size"
        if ours is not None and other is not None and not is_same:
            message = f"is {quote(ours)}, but model.overrides.{name} = {quote(other)}"
            yield Problem("conflict", f"model.{name}", message, "give one of the two")
    for index, group in enumerate(d.optimizer.groups):
        try:
            re.compile(group.pattern)
        except re.error as error:
            message = f"{quote(group.pattern)} is no regular expression: {error}"
            yield Problem("unknown-value", f"optimizer.groups[{index}].pattern", message)
    for name in d.launch.environment:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            message = "a name of a variable has letters, digits and _, and no digit at its start"
            yield Problem("variable", f"launch.environment.{quote_key(name)}", message)


def _texts(config: LoadedConfig) -> Iterator[Problem]:
    d = config.sections
    for section, text in (("training", d.training), ("validation", d.validation)):
        if text.dataset_path is None:
            yield from _bad_name(f"{section}.dataset", text.dataset)
    plain = DataSource()
    for number, source in enumerate(d.validation.sources):
        key = f"{_SOURCES}[{number}]"
        if not source.name and source.path is not None:
            message = "is missing, and the losses of a source have its name"
            yield Problem("missing", f"{key}.name", message, 'as name = "wiki"')
        for field in ("weight", "epochs"):
            if getattr(source, field) != getattr(plain, field):
                message = "is for mixtures of training text"
                yield Problem("conflict", f"{key}.{field}", message, "remove it")
    yield from _fields(d, "data", d.data)
    yield from _sources(d, "data.source", d.data.source, "training.dataset")
    yield from _sources(d, _SOURCES, d.validation.sources, _HELD_OUT)


def _bad_name(key: str, name: str) -> Iterator[Problem]:
    problem = name_problem(name)
    if problem is not None:
        what, remedy = problem
        yield Problem("unknown-value", key, f"{quote(name)} {what}", remedy)


def _phases(config: LoadedConfig) -> Iterator[Problem]:
    d = config.sections
    names = {source.title for source in d.data.source}
    for number, phase in enumerate(d.data.phase):
        key = f"data.phase[{number}]"
        if (phase.step is None) == (phase.tokens is None):
            yield Problem("conflict", key, "needs step or tokens, one of the two")
        for name in sorted(set(map(public_name, phase.weights)) - names):
            message = f"weighs {quote(name)}, which is no name of a data.source"
            yield Problem("unknown-value", key, message)
        if phase.weights and not any(phase.weights.values()):
            yield Problem("conflict", key, "gives no source a share")
        if phase.seq_len is not None and d.data.packing == "best-fit":
            message = 'excludes data.packing = "best-fit", which fits documents into one length'
            yield Problem("conflict", f"{key}.seq_len", message, 'take packing = "split"')
        if phase.lr is not None and phase.lr_factor != DataPhase().lr_factor:
            message = "has lr and lr_factor, which both set the learning rate"
            yield Problem("conflict", key, message, "give one of the two")


def _sources(
    d: Config, list_key: str, sources: Sequence[DataSource], single: str
) -> Iterator[Problem]:
    """single: key that names a text alone."""
    seen: set[str] = set()
    for number, source in enumerate(sources):
        key = f"{list_key}[{number}]"
        name = source.title
        if not name:
            yield Problem("missing", f"{key}.name", "is missing, and so is path")
        elif name in seen:
            message = f"{quote(name)} is the name of two sources"
            yield Problem("conflict", f"{key}.name", message, "give each its own name")
        elif source.path is None and is_dotted(name):
            remedy = f"only {single} takes a dotted path"
            message = f"{quote(name)} is a dotted path"
            yield Problem("unknown-value", f"{key}.name", message, remedy)
        elif source.path is None:
            yield from _bad_name(f"{key}.name", name)
        seen.add(name)
        yield from _fields(d, key, source)


def _fields(d: Config, key: str, source: DataSource | Data) -> Iterator[Problem]:
    for name in _TEXT_KEYS if source.messages_key else ():
        if getattr(source, name):
            yield Problem("conflict", key, f"has messages_key and {name}", "leave one out")
    given = [name for name in _PAIR if getattr(source, name) or getattr(d.data, name)]
    if len(given) == 1:
        (other,) = {*_PAIR} - {*given}
        yield Problem("needs", key, f"has {given[0]} and needs {other}")


def _trackers(config: LoadedConfig) -> Iterator[Problem]:
    for name in config.sections.metrics.tracker_names:
        place = doors.place_of("trackers", name)
        message = f"there is no tracker {quote(name)}" if place is None else doors.lack(place)
        if message:
            hint = f"the trackers are {', '.join(doors.installed('trackers'))}"
            yield Problem("unknown-value", "metrics.trackers", message, hint)


#: Rules of a config alone, whatever its ranks and the machine. `titanlite.resolve.load` has the
#: features' own, and those of ranks and model.
RULES: tuple[ConfigRule, ...] = (
    _pairs,
    _numbers,
    _entries,
    _texts,
    _phases,
    _trackers,
    import_path_keys.missing,
)


# Stage 2, on this machine: files and packages


def missing_files(config: LoadedConfig) -> Iterator[Problem]:
    """Find local paths in keys that do not exist."""
    for key, path in _paths(config.sections):
        is_local = key == "model.tokenizer_path" or not is_url(path or "")
        if path and is_local and not is_there(path):
            remedy = fetch_hint(path) if key == "model.tokenizer_path" else ""
            yield Problem("no-file", key, f"no file or folder {quote(path)}", remedy)


def _paths(d: Config) -> Iterator[tuple[str, str | None]]:
    if d.model.tokenizer_path != BUNDLED_TOKENIZER_NAME:
        yield "model.tokenizer_path", d.model.tokenizer_path
    yield "training.dataset_path", d.training.dataset_path
    # A run that has checkpoints already reads neither, except for the weights under adapters. A
    # store is not asked.
    folder = glob.escape(os.path.join(d.job.dump_folder, d.checkpoint.folder))
    is_new = not is_url(d.checkpoint.folder) and not glob.glob(f"{folder}/step-*")
    if is_new or d.lora.rank:
        yield "checkpoint.initial_load_path", d.checkpoint.initial_load_path
    if is_new and d.lora.rank:
        yield "lora.adapter", d.lora.adapter
    for number, source in enumerate(d.data.source):
        yield f"data.source[{number}].path", source.path
    if d.validation.enable:
        yield "validation.dataset_path", d.validation.dataset_path
        for number, source in enumerate(d.validation.sources):
            yield f"{_SOURCES}[{number}].path", source.path


def is_there(path: str) -> bool:
    """Whether a key's local path, or pattern of paths, names something."""
    if os.path.exists(path):
        return True
    # Megatron's token files are named without their suffixes.
    if os.path.exists(f"{path}.idx"):
        return True
    return any(glob.iglob(path, recursive=True))


def closed_urls(config: LoadedConfig) -> Iterator[Problem]:
    """Find URLs that lack their login or signature, or have a login that nothing reads.

    The config that a run keeps has URLs of the first kind.
    """
    message = "its login or signature is hidden in this file, as runs keep their config"
    remedy = (
        "give the whole URL again: --{key} URL; a config of yours may have it as ${{NAME}}, an "
        "environment variable"
    )
    for key, value in config.entries():
        texts = list(_texts_in(value))
        if any(map(is_hidden, texts)):
            yield Problem("hidden", key, message, remedy.format(key=key))
        for problem in dict.fromkeys(filter(None, map(login_problem, texts))):
            yield Problem("url", key, *problem)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    if isinstance(value, Struct):
        value = asdict(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts_in(item)


#: Tracker -> the module that it imports, and the package that brings it.
TRACKER_PACKAGES = {
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "comet": ("comet_ml", "comet-ml"),
    "trackio": ("trackio", "trackio"),
}


def missing_packages(config: LoadedConfig) -> Iterator[Problem]:
    """Find optional packages that are needed and missing, and unusable stores."""
    metrics = config.sections.metrics
    for tracker in metrics.tracker_names:
        module, package = TRACKER_PACKAGES.get(tracker, ("titanlite", ""))
        if is_installed(module):
            continue
        key = "metrics.trackers"
        if tracker == "wandb" and metrics.enable_wandb:
            key = "metrics.enable_wandb"
        message = f"needs the package {package}, which is not installed"
        remedy = f"{pip_install(package)}, or leave the key out"
        yield Problem("missing-package", key, message, remedy)
    if not config.sections.checkpoint.enable_checkpoint:
        return
    for key in ("checkpoint.folder", "checkpoint.initial_load_path"):
        url = config.value(key) or ""
        problem = url_problem(url) if is_url(url) else None
        if problem is not None:
            what, remedy = problem
            yield Problem("url", key, f"{quote(url)} {what}", remedy)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    # A folder of that name is found too, but has no origin. wandb itself makes one in the working
    # directory.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


#: Rules of a config on the machine where it shall run.
MACHINE_RULES: tuple[ConfigRule, ...] = (closed_urls, missing_files, missing_packages)
