"""Check the second stage of a config: keys that contradict each other, and files and packages that
are missing.

The first stage checks each key by itself (`titanlite.config.load`), the third the ranks and the
model (`titanlite.start.fit`). No torch here.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from titanlite.config import extensions
from titanlite.config.data_sections import DataSource, steps_of
from titanlite.config.errors import Problem
from titanlite.config.keys import keys
from titanlite.config.loaded import LoadedConfig
from titanlite.config.rules import Finding, Rule, broken_rules, is_set, several
from titanlite.config.sections import Config
from titanlite.config.text_names import fetch_hint, name_problem
from titanlite.config.toml import quote, quote_key
from titanlite.config.urls import is_url, login_problem, url_problem
from titanlite.utils import is_dotted, is_hidden


def placed(config: LoadedConfig, found: Iterable[Finding]) -> list[Problem]:
    """Return findings as problems, each at the place of its key; of a default, at that of a key in
    the message.
    """

    def place(key: str, message: str) -> str:
        named = re.findall(r"\w+\.\w+", f"{key} {message}")
        places = map(config.place, [key, *filter(keys().__contains__, named)])
        return next(filter(None, places), "")

    return [
        Problem(place(key, message), key, message, hint, code=code)
        for code, key, message, hint in found
    ]


# Stage 2: contradictions


def _has_model(components: list[str]) -> bool:
    return "model" in components


def _is_huge(norm: float) -> bool:
    return norm >= 1e9


_MODE, _RATE, _COMPILE = "activation_checkpoint.mode", "lr_scheduler.", "training.compile"
_LOAD, _START, _SAVES = (
    "checkpoint.initial_load_path",
    "checkpoint.start",
    "checkpoint.enable_checkpoint",
)
_TP = "training.tensor_parallel_degree"
_PP = "experimental.pipeline_parallel_degree"
_HELD_OUT, _SOURCES, _ADVICE = (
    "validation.dataset",
    "validation.sources",
    "make it one of the sources",
)
_TEXT_KEYS = ("text_key", "prompt_key", "completion_key")
_EARLY = "optimizer.early_step_in_backward"
#: A value of a key needs one of another.
NEEDS: tuple[Rule, ...] = (
    Rule(_START, "from", _LOAD, is_set),
    Rule(_START, "resume", _SAVES, True),
    Rule("checkpoint.initial_load_in_hf", True, _LOAD, is_set),
    Rule(_LOAD, bool, _SAVES, True),
    Rule("checkpoint.create_seed_checkpoint", True, _SAVES, True),
    Rule("checkpoint.last_save_in_hf", True, "checkpoint.model_weights_only", True),
    Rule("checkpoint.keep_best", bool, "validation.enable", True),
    Rule("checkpoint.export_ema", True, "optimizer.ema_decay", bool),
    Rule("validation.ema", True, "optimizer.ema_decay", bool),
    Rule("guard.policy", "rollback", _SAVES, True),
    Rule("data.prompt_key", bool, "data.completion_key", is_set),
    Rule("data.completion_key", bool, "data.prompt_key", is_set),
    Rule("debug.deterministic_warn_only", True, "debug.deterministic", True),
    Rule(f"{_RATE}decay_type", "plateau", f"{_RATE}plateau_ratio", is_set),
    Rule(_MODE, "budget", _COMPILE, True),
    Rule(
        _EARLY,
        True,
        "training.max_norm",
        _is_huge,
        "1e9 turns clipping off: its norm comes after the last update",
    ),
    Rule(_MODE, "budget", "compile.components", _has_model, '"model" must be among them'),
)
#: A value of a key excludes one of another.
CONFLICTS: tuple[Rule, ...] = (
    Rule(_LOAD, bool, _START, "fresh", '"from" starts there'),
    Rule("checkpoint.load_step", lambda step: step >= 0, _START, "fresh", "it loads nothing"),
    *(
        Rule("data.messages_key", bool, f"data.{name}", bool, "it names the text")
        for name in _TEXT_KEYS
    ),
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
    Rule(
        "optimizer.name",
        "AdamW8bit",
        _TP,
        lambda ranks: ranks % 16 == 0,
        "it quantizes rows in blocks, which 8 ranks fit",
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
        "sample.prompts", bool, _PP, several, "no rank of a pipeline computes the next token alone"
    ),
    Rule(
        "training.gradient_sync",
        "every",
        _PP,
        several,
        "a pipeline reduces gradients once, after the last micro-batch",
    ),
    *(
        Rule(f"{_RATE}{name}", bool, f"{_RATE}decay_type", "constant", "there is nothing to shape")
        for name in ("decay_ratio", "decay_steps", "plateau_ratio", "min_lr_factor")
    ),
    Rule(
        f"{_RATE}decay_ratio",
        bool,
        f"{_RATE}style",
        "fsdp",
        "its decay runs over the whole schedule",
    ),
    Rule(
        f"{_RATE}decay_steps",
        bool,
        f"{_RATE}style",
        "fsdp",
        "its decay runs over the whole schedule",
    ),
)


def _of_extensions(config: LoadedConfig) -> list[tuple[str, str, str, str]]:
    return [*extensions.missing(config), *extensions.optimizer_problems(config)]


def contradictions(config: LoadedConfig) -> list[Problem]:
    """Return every pair of keys that cannot both hold, whatever the number of ranks."""
    d = config.sections
    sources = [
        *_sources(d, "data.source", d.data.source),
        *_sources(d, _SOURCES, d.validation.sources),
    ]
    found = [*broken_rules(config, NEEDS, CONFLICTS), *_of_features(config)]
    found += [*_numbers(d), *_text(d), *sources, *_of_extensions(config)]
    return placed(config, found)


def _of_features(config: LoadedConfig) -> Iterator[Finding]:
    from titanlite.features import features_of

    for feature in features_of(config.sections).on:
        yield from feature.contradictions(config)


def _numbers(d: Config) -> Iterator[Finding]:
    """Check values against each other."""
    p, s, ac = d.profiling, d.lr_scheduler, d.activation_checkpoint
    timeout, deadline = d.comm.train_timeout_seconds, d.stall.deadline_seconds or 0
    if s.min_lr is not None and s.min_lr > d.optimizer.peak_lr:
        yield (
            "conflict",
            f"{_RATE}min_lr",
            f"is {quote(s.min_lr)}, above optimizer.lr = {quote(d.optimizer.lr)}",
            "",
        )
    if ac.offload and ac.mode == "selective" and ac.selective_ac_option == "op":
        message = (
            'excludes activation_checkpoint.selective_ac_option = "op", whose tensors are held on '
            "the device"
        )
        yield (
            "conflict",
            "activation_checkpoint.offload",
            message,
            'take mode = "full", or selective_ac_option = "N"',
        )
    if d.guard.policy != "stop" and d.guard.max_skips >= d.guard.window:
        message = (
            f"is {d.guard.max_skips}, so a run that skips all of guard.window = {d.guard.window} "
            "steps never ends"
        )
        yield "conflict", "guard.max_skips", message, "take less than guard.window"
    if deadline >= timeout:
        message = (
            f"is {quote(deadline)}, but comm.train_timeout_seconds = {timeout} ends a run before "
            "that report"
        )
        yield "conflict", "stall.deadline_seconds", message, "lower the one or raise the other"
    if p.enable_profiling and p.profile_freq < p.profiler_warmup + p.profiler_active:
        cycle = (
            f"profiling.profiler_warmup {p.profiler_warmup} + profiling.profiler_active "
            f"{p.profiler_active}"
        )
        yield (
            "conflict",
            "profiling.profile_freq",
            f"is {p.profile_freq} steps, less than {cycle}",
            "",
        )
    for item in d.data.skip_steps:
        if steps_of(item)[0] > steps_of(item)[1]:
            yield "out-of-range", "data.skip_steps", f"{quote(item)} ends before it begins", ""
    for name in ("vocab_size", "norm_type", "rope_scaling"):
        ours, other = getattr(d.model, name), d.model.overrides.get(name)
        if None not in (ours, other) and (ours != other or name != "vocab_size"):
            message = f"is {quote(ours)}, but model.overrides.{name} = {quote(other)}"
            yield "conflict", f"model.{name}", message, "give one of the two"
    for index, group in enumerate(d.optimizer.groups):
        try:
            re.compile(group.pattern)
        except re.error as error:
            message = f"{quote(group.pattern)} is no regular expression: {error}"
            yield "unknown-value", f"optimizer.groups[{index}].pattern", message, ""
    for name in d.launch.environment:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            message = "a name of a variable has letters, digits and _, and no digit at its start"
            yield "variable", f"launch.environment.{quote_key(name)}", message, ""


def _text(d: Config) -> Iterator[Finding]:
    """Find names of text that lead nowhere, and wrong phases of a mixture."""
    for section, text in (("training", d.training), ("validation", d.validation)):
        if text.dataset_path is None and (problem := name_problem(text.dataset)):
            yield (
                "unknown-value",
                f"{section}.dataset",
                f"{quote(text.dataset)} {problem[0]}",
                problem[1],
            )
    for i, source in enumerate(d.validation.sources):
        at = f"{_SOURCES}[{i}]"
        if not source.name and source.path is not None:
            yield (
                "missing",
                f"{at}.name",
                "is missing, and the losses of a source have its name",
                'as name = "wiki"',
            )
        elif source.name and is_dotted(source.name):
            hint = "only validation.dataset takes a dotted path"
            yield "unknown-value", f"{at}.name", f"{quote(source.name)} is a dotted path", hint
        for field in ("weight", "epochs"):
            if getattr(source, field) != getattr(DataSource(), field):
                yield "conflict", f"{at}.{field}", "is for mixtures of training text", "remove it"
    names = [source.name or source.path for source in d.data.source]
    for number, phase in enumerate(d.data.phase):
        key = f"data.phase[{number}]"
        if (phase.step is None) == (phase.tokens is None):
            yield "conflict", key, "needs step or tokens, one of the two", ""
        for name in sorted(set(phase.weights) - set(names)):
            yield (
                "unknown-value",
                key,
                f"weighs {quote(name)}, which is no name of a data.source",
                "",
            )
        if phase.weights and not any(phase.weights.values()):
            yield "conflict", key, "gives no source a share", ""


def _sources(d: Config, key: str, sources: Sequence[DataSource]) -> Iterator[Finding]:
    """Check the names and fields of a list of sources."""
    names = [source.name or source.path for source in sources]
    for i, source in enumerate(sources):
        at, name = f"{key}[{i}]", names[i]
        if name is None:
            yield "missing", f"{at}.name", "is missing, and so is path", ""
        elif names.index(name) != i:
            yield (
                "conflict",
                f"{at}.name",
                f"{quote(name)} is the name of two sources",
                "give each its own name",
            )
        elif source.path is None and (problem := name_problem(name)):
            yield "unknown-value", f"{at}.name", f"{quote(name)} {problem[0]}", problem[1]
        for name in _TEXT_KEYS if source.messages_key else ():
            if getattr(source, name):
                yield (
                    "conflict",
                    at,
                    f"has {name} beside messages_key, which names the text",
                    "leave one out",
                )
        prompt, completion = (
            source.prompt_key or d.data.prompt_key,
            source.completion_key or d.data.completion_key,
        )
        if (prompt is None) != (completion is None):
            given, other = (
                ("prompt_key", "completion_key") if prompt else ("completion_key", "prompt_key")
            )
            yield "needs", at, f"has {given} and needs {other}", ""


# Stage 2, on this machine: files and packages


def missing_files(config: LoadedConfig) -> list[Problem]:
    """Return a problem for each local file or folder that a key names and that does not exist."""
    names = ["model.tokenizer_path", "training.dataset_path"]
    if config.sections.validation.enable:
        names.append("validation.dataset_path")
    if not _has_checkpoints(config.sections):  # a run with checkpoints of its own does not read it
        names.append("checkpoint.initial_load_path")
    given = {key: config.value(key) for key in names}
    given |= {
        f"data.source[{i}].path": source.path
        for i, source in enumerate(config.sections.data.source)
    }
    if config.sections.validation.enable:
        sources = enumerate(config.sections.validation.sources)
        given |= {f"validation.sources[{i}].path": source.path for i, source in sources}
    paths = {
        key: path for key, path in given.items() if path and not is_url(path) and not _exists(path)
    }
    hints = {
        key: fetch_hint(path) if key == "model.tokenizer_path" else ""
        for key, path in paths.items()
    }
    return placed(
        config,
        (("no-file", key, f"no file or folder {quote(paths[key])}", hints[key]) for key in paths),
    )


def _exists(path: str) -> bool:
    # Megatron's token files are named without their suffixes.
    return (
        os.path.exists(path)
        or os.path.exists(f"{path}.idx")
        or any(glob.iglob(path, recursive=True))
    )


def _has_checkpoints(d: Config) -> bool:
    """Return whether the checkpoint folder seems to hold checkpoints.

    True for a store, which is not asked.
    """
    if is_url(d.checkpoint.folder):
        return True
    folder = os.path.join(d.job.dump_folder, d.checkpoint.folder)
    return os.path.isdir(folder) and any(name.startswith("step-") for name in os.listdir(folder))


def closed_urls(config: LoadedConfig) -> list[Problem]:
    """Return problems for URLs without the login or signature that they had, and with a login that
    nothing reads.

    The config that a run keeps has URLs of the first kind.
    """
    message = "its login or signature is hidden in this file, as runs keep their config"
    hint = (
        "give the whole URL again: --{key} URL; a config of yours may have it as ${{NAME}}, an "
        "environment variable"
    )
    found: list[Finding] = []
    for key, value in config.entries():
        texts = list(_texts(value))
        if any(map(is_hidden, texts)):
            found.append(("hidden", key, message, hint.format(key=key)))
        problems = dict.fromkeys(filter(None, map(login_problem, texts)))
        found += [("url", key, *problem) for problem in problems]
    return placed(config, found)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of a key, in lists and tables too."""
    if isinstance(value, str):
        yield value
    if isinstance(value, Struct):
        value = asdict(value)
    if isinstance(value, dict):
        value = list(value.values())
    for item in value if isinstance(value, (list, tuple)) else ():
        yield from _texts(item)


def missing_packages(config: LoadedConfig) -> list[Problem]:
    """Return problems for optional packages that a key needs and that are not installed, and
    unusable stores.
    """
    found: list[Finding] = []
    spec = importlib.util.find_spec("wandb") if config.sections.metrics.enable_wandb else None
    # A folder of that name, as wandb itself makes one in the working directory, is found too, but
    # has no origin.
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
