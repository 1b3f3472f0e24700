"""`titanlite config`: check, explain, show; and the pages generated from the keys."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from titanlite.cli.parser import (
    FILES,
    FLAGS,
    Commands,
    add_group,
    add_to_group,
    files_of,
)
from titanlite.config.aliases import ALIASES, key_of, learn, names_of
from titanlite.config.checks import broken, missing_files
from titanlite.config.dialect import LATER_DEFAULTS
from titanlite.config.errors import COMMAND_LINE, bad_flag, unfit
from titanlite.config.keys import Key, keys, sections, table_of
from titanlite.config.load import load
from titanlite.config.loaded import LoadedConfig
from titanlite.config.toml import quote
from titanlite.config.unknown_keys import unknown
from titanlite.config.unsupported_keys import UNSUPPORTED
from titanlite.config.value_types import Section
from titanlite.models.families import SPECS
from titanlite.resolve.load import check_config, unnamed_tokenizer
from titanlite.run.config import RunConfig
from titanlite.runs.tables import Style
from titanlite.utils import REMOVED, counted


def add_commands(commands: Commands) -> None:
    """Add `titanlite config` to argparse."""
    about = "check, explain and show config files"
    actions = add_group(commands, "config", about)
    _add_check(actions)
    _add_explain(actions)
    _add_show(actions)
    add_to_group(
        actions,
        _schema,
        "print a JSON Schema of all keys, with which editors complete and check files",
    )


def _add_check(actions: Commands) -> None:
    stages = (
        "All problems of a stage are reported at once: first each key by itself, then "
        "contradictions between keys, then numbers that do not fit the ranks or the model."
    )
    exits = f"{FLAGS} Exit status: 0 when it is right, 2 when not."
    add = add_to_group(
        actions, _check, "check a config and show what a run of it would do", stages, exits
    ).add
    add("files", FILES, "FILE", nargs="*")
    ranks = "ranks (default: WORLD_SIZE or NGPU of the environment, else the fewest that fit)"
    add("--world-size", ranks, "N", type=int)
    strict = "also refuse files that are not there, as training does"
    add("--strict", strict)


def _add_explain(actions: Commands) -> None:
    add = add_to_group(
        actions,
        _explain,
        "show every key, or one: value, source, type, default, meaning",
        "Nothing given: the defaults of all keys.",
        FLAGS,
    ).add
    add("words", "a key or section to explain in depth, and the TOML file", "KEY|FILE", nargs="*")


def _add_show(actions: Commands) -> None:
    about = "It loads to the same values, under titanlite's own names, with sources as comments."
    help = "print a config as one TOML file with all its values"
    add = add_to_group(actions, _show, help, about, FLAGS).add
    add("files", FILES, "FILE", nargs="*")
    add("--changed", "only values that are no defaults, without comments")


def _show(arguments: argparse.Namespace) -> str:
    from titanlite.runs.provenance import config_text

    config = load([*files_of(arguments), *arguments.flags])
    return config_text(config.to_toml(defaults=not arguments.changed)).rstrip()


def _schema(arguments: argparse.Namespace) -> str:
    from titanlite.cli.schema import schema_text

    return schema_text().removesuffix("\n")


# Check


def _check(arguments: argparse.Namespace) -> str:
    argv = [*files_of(arguments), *arguments.flags]
    world_size, why = world_size_of(arguments.world_size)
    config, run = check_config(argv, world_size, training=arguments.strict)
    from titanlite.assembly.early_text_check import first_look

    report = _report(config, run, why, arguments.style)
    unseen = first_look(run)
    return report + (f"\n  note: {unseen}" if unseen else "")


def world_size_of(asked: int | None) -> tuple[int | None, str]:
    """Return the ranks to check for (None: the fewest that fit), and their origin."""
    if asked is not None:
        if asked < 1:
            raise bad_flag("--world-size", f"expected an integer >= 1, got {asked}")
        return asked, "--world-size"
    for name in ("WORLD_SIZE", "NGPU"):
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return int(text), f"{name} of the environment"
    return None, "the fewest that fit; --world-size N checks another number"


def _report(config: LoadedConfig, run: RunConfig, why: str, style: Style) -> str:
    rows = {
        "model": f"{run.model.title}, {_size(run)}",
        "ranks": f"{run.mesh.world_size} ({why}), {_degrees(run)}",
        "batch": _batch(run),
        "steps": _length(run),
        "learning rate": _rate(run),
        "checkpoints": _saves(run),
        "files": ", ".join(config.files) or "none: all defaults",
    }
    lines = [style.good("OK")]
    for label, text in rows.items():
        lines.append(f"  {label:<14} {text}")
    for note in run.notes:
        lines.append(style.dim(f"  note: {note}"))
    for warning in run.warnings:
        lines.append(style.warn(f"  warning: {warning}"))
    for problem in broken(config, [missing_files]):
        lines.append(style.warn(f"  not there: {problem}"))
    for problem in unnamed_tokenizer(config, run):
        lines.append(style.warn(f"  training will refuse: {problem}"))
    return "\n".join(lines)


def _size(run: RunConfig) -> str:
    args = run.model_args()
    if args.vocab_size is None:
        return "the tokenizer's vocabulary"
    return f"{run.spec.count_parameters(args):,} parameters"


def _degrees(run: RunConfig) -> str:
    mesh = run.mesh
    degrees = {
        "data_parallel_replicate": mesh.dp_replicate,
        "data_parallel_shard": mesh.dp_shard,
        "tensor_parallel": mesh.tensor,
        "pipeline_parallel": mesh.pipeline,
        "context_parallel": mesh.context,
        "expert_parallel": mesh.expert,
    }
    shown = []
    for name, degree in degrees.items():
        if degree > 1 or name == "data_parallel_shard":
            shown.append(f"{name} {degree}")
    return ", ".join(shown)


def _batch(run: RunConfig) -> str:
    batch = run.batch
    total = f"{counted(batch.global_batch_size, 'sequences')} of {batch.seq_len} tokens"
    pieces = f"{counted(batch.accumulation, 'micro-batches')} of {batch.micro_batch_size} per rank"
    return f"{total}, {pieces}"


def _length(run: RunConfig) -> str:
    if run.steps is None:
        return counted(run.training.epochs or 0, "epochs")
    return f"{run.steps:,}, {run.tokens:,} tokens"


def _rate(run: RunConfig) -> str:
    schedule = run.schedule
    warmup = f"warm-up {counted(schedule.warmup_steps, schedule.unit)}, then {schedule.decay_type}"
    return f"{run.optimizer.lr:g}, {warmup}"


def _saves(run: RunConfig) -> str:
    saves = run.checkpoint
    if not saves.enable_checkpoint:
        return "none"
    return f"every {counted(saves.interval, saves.interval_type)} in {saves.folder}"


# Explain


def _explain(arguments: argparse.Namespace) -> str:
    files = []
    names = []
    for word in arguments.words:
        if word.endswith(".toml") or os.sep in word or os.path.isfile(word):
            files.append(word)
        else:
            names.append(word.strip("[]"))
    if len(files) > 1:
        raise bad_flag("", f"one file at a time, got {', '.join(files)}")
    config = load([*(f"--job.config_file={file}" for file in files), *arguments.flags])
    return "\n\n".join(_explain_one(config, name, arguments.style) for name in names or sections())


def _explain_one(config: LoadedConfig, name: str, style: Style) -> str:
    learn(name.partition(".")[0])
    if name in sections():
        return _explain_section(config, name, style)
    if name in UNSUPPORTED:
        return _explain_unsupported(name, style)
    name = table_of(name) or name
    if key_of(name) not in keys():
        problem = unknown(name, COMMAND_LINE)
        raise unfit(name, problem.message, problem.remedy, problem.code)
    key = keys()[key_of(name)]
    head = style.bold(key.name)
    if name in ALIASES:
        head += f"  ({name} is another name of it)"
    value = f"{style.bold(_shown_value(config, key))}  from {_source(config, key)}"
    lines = [head]
    for label, text in [("value", value), *_facts(key)]:
        lines.append(f"  {label:<13} {text}")
    return "\n".join(lines)


def _explain_unsupported(name: str, style: Style) -> str:
    key = UNSUPPORTED[name]
    head = f"{style.bold(name)} is a key of others, or of earlier versions, without effect."
    accepted = " or ".join(map(quote, key.off))
    if key.switch:
        accepted = f"{accepted}; any value while {key.switch} leaves it off"
    return f"{head}\n  accepted  {accepted}\n  otherwise refused: {key.reason}"


def _facts(key: Key) -> Iterator[tuple[str, str]]:
    yield "type", key.expected
    yield "default", quote(key.default)
    yield "meaning", key.description
    if key.name == "model.name":
        yield "families", ", ".join(SPECS)
    if key.name in LATER_DEFAULTS:
        default = quote(LATER_DEFAULTS[key.name])
        files = "for a file that says so or uses later names of older keys"
        yield "dialect 2026", f"default {default}, {files}"
    for other in names_of(key.name):
        yield "also", f"{other.name} ({other.relation})"


def summary(owner: type[Section]) -> str:
    """Return the first paragraph of a section's docstring as one line."""
    return " ".join((owner.__doc__ or "").split("\n\n")[0].split())


def _explain_section(config: LoadedConfig, name: str, style: Style) -> str:
    lines = [f"{style.bold(f'[{name}]')}  {summary(sections()[name])}"]
    for key in keys().values():
        if key.section != name:
            continue
        value = f"{key.field} = {_shown_value(config, key)}"
        value = style.bold(value) if config.is_given(key.name) else value
        lines.append(f"  {value}  {style.dim(_source(config, key))}")
        about = f"{key.description} ({key.expected}; default {quote(key.default)})"
        lines.append(style.dim(f"      {about}"))
    return "\n".join(lines)


def _shown_value(config: LoadedConfig, key: Key) -> str:
    from titanlite.runs.provenance import is_secret

    value = config.value(key.name)
    if key.name == "launch.environment":
        value = dict(value)
        for name in filter(is_secret, value):
            value[name] = REMOVED
    return quote(value)


def _source(config: LoadedConfig, key: Key) -> str:
    if not key.is_table or not config.is_given(key.name):
        return _shown_source(config, key.name)
    prefix = f"{key.name}."
    entries = []
    for name, source in config.sources.items():
        if name.startswith(prefix):
            entries.append(f"{name.removeprefix(prefix)}: {source}")
    return ", ".join(entries)


def _shown_source(config: LoadedConfig, key: str) -> str:
    source = config.source(key)
    if source.written in ("", key):
        return str(source)
    return f"{source}, as {source.written}"
