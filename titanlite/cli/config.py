"""`titanlite config`: check, explain, show."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace

from titanlite.cli import at_least
from titanlite.cli.argument_parser import (
    FILES,
    FLAGS,
    Commands,
    add_group,
    add_to_group,
    files_of,
)
from titanlite.config.aliases import ALIASES, key_of, known_names, learn, names_of
from titanlite.config.checks import broken, missing_files, placed
from titanlite.config.errors import COMMAND_LINE, ConfigError, bad_flag, refuse
from titanlite.config.keys import Key, keys, sections, table_of
from titanlite.config.load import load, read
from titanlite.config.loaded import LoadedConfig
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import UNSUPPORTED
from titanlite.config.value_types import Section
from titanlite.models.families import SPECS
from titanlite.resolve.load import resolve, unnamed_tokenizer
from titanlite.run.config import RunConfig
from titanlite.runs.text_tables import Style, unbroken
from titanlite.utils import REMOVED, counted


def add_commands(commands: Commands) -> None:
    """Add `titanlite config` to argparse."""
    about = "check, explain and show config files"
    actions = add_group(commands, "config", about)
    add = add_to_group(
        actions,
        _check,
        "check a config and show what a run of it would do",
        "All problems of a stage are reported at once: first each key by itself, then "
        "contradictions between keys, then numbers that do not fit the ranks or the model.",
        f"{FLAGS} Exit status: 0 when it is right, 2 when not.",
    ).add
    add("files", FILES, "FILE", nargs="*")
    ranks = "ranks to check for (default: the fewest that fit)"
    add("--world-size", ranks, "N", type=at_least(1))
    add("--strict", "refuse files that are missing here, as training does (default: list them)")
    add("--all", "show every note (default: warnings and the five gravest)")
    add = add_to_group(
        actions,
        _explain,
        "explain keys: value, source, type, default, meaning",
        "With a FILE it shows the keys that the file and the flags set, without one the defaults.",
        FLAGS,
    ).add
    add("words", "a key or section to explain in depth, and the TOML file", "KEY|FILE", nargs="*")
    add("--all", "show every key (default: those that the file and the flags set)")
    add = add_to_group(
        actions,
        _show,
        "print a config as one TOML file with all its values",
        "It loads to the same values, under titanlite's own names, with sources as comments.",
        FLAGS,
    ).add
    add("files", FILES, "FILE", nargs="*")
    add("--changed", "print only values that differ from their defaults, without comments")


def _show(arguments: argparse.Namespace) -> str:
    from titanlite.runs.provenance import config_text

    config = load([*files_of(arguments), *arguments.flags])
    return config_text(config.to_toml(defaults=not arguments.changed)).rstrip()


# Check

#: Notes that are shown without --all; warnings always are.
_NOTES_SHOWN = 5


def _check(arguments: argparse.Namespace) -> str:
    config, problems = read([*files_of(arguments), *arguments.flags])
    ranks = arguments.world_size
    why = "--world-size"
    launch = config.sections.launch
    if not (ranks or problems):
        why = "the fewest that fit; --world-size N checks another number"
        if launch.instance_type or launch.gpus_per_node:
            from titanlite.launch.job import machine_of

            ranks = launch.nodes * machine_of(config)[1]
            why = "of section [launch]; --world-size N checks another number"
    config, run = resolve(config, ranks, problems, machine=arguments.strict, texts=True)
    from titanlite.assembly.early_text_check import first_look, name_problems

    refuse(placed(config, name_problems(run)))
    lines = [*_rows(config, run, why, arguments.style)]
    missing = [f"not there: {problem}" for problem in broken(config, [missing_files])]
    for problem in unnamed_tokenizer(config, run):
        missing.append(f"training will refuse: {problem}")
    missing += filter(None, [first_look(run)])
    style = arguments.style
    lines += [style.warn(style.wrap(f"  {problem}")) for problem in missing]
    gravest = run.notes if arguments.all else run.notes[:_NOTES_SHOWN]
    shown = [note for note in run.notes if note in gravest or note.warns]
    for note in shown:
        line = style.wrap(f"  {'warning' if note.warns else 'note'}: {note.text}")
        lines.append(style.warn(line) if note.warns else style.dim(line))
    if more := len(run.notes) - len(shown):
        lines.append(style.dim(f"  {counted(more, 'more notes')}: --all shows every note"))
    return "\n".join(lines)


def _rows(config: LoadedConfig, run: RunConfig, why: str, style: Style) -> Iterator[str]:
    args = run.model_args()
    size = "the tokenizer's vocabulary"
    if args.vocab_size is not None:
        size = f"{run.spec.count_parameters(args):,} parameters"
    mesh = run.mesh
    degrees = {
        "data_parallel_replicate": mesh.dp_replicate,
        "data_parallel_shard": mesh.dp_shard,
        "tensor_parallel": mesh.tensor,
        "pipeline_parallel": mesh.pipeline,
        "context_parallel": mesh.context,
        "expert_parallel": mesh.expert,
    }
    shown = ", ".join(
        f"{name} {degree}"
        for name, degree in degrees.items()
        if degree > 1 or name == "data_parallel_shard"
    )
    batch = run.batch
    sequences = (
        f"{counted(batch.global_batch_size, 'sequences')} of {batch.seq_len} tokens = "
        f"{batch.tokens_per_step:,} tokens per step"
    )
    micro = f"{counted(batch.accumulation, 'micro-batches')} of {batch.micro_batch_size} per rank"
    steps = counted(run.training.epochs or 0, "epochs")
    if run.steps is not None:
        steps = f"{run.steps:,}, {run.tokens:,} tokens"
    schedule = run.schedule
    warmup = f"warm-up {counted(schedule.warmup_steps, schedule.unit)}"
    float8 = run.float8
    precision: list[str] = [run.training.mixed_precision_param]
    if float8.enable_float8_linear:
        gathered = " gathered in float8" if float8.enable_fsdp_float8_all_gather else ""
        precision.append(f"float8 {float8.recipe_name}{gathered}")
    if run.training.compile:
        precision.append("compiled")
    recompute = run.activation_checkpoint
    if recompute.mode != "none":
        option = f" {recompute.selective_ac_option}" if recompute.mode == "selective" else ""
        precision.append(f"activation checkpointing {recompute.mode}{option}")
    saves = run.checkpoint
    checkpoints = "none"
    if saves.enable_checkpoint:
        checkpoints = f"every {counted(saves.interval, saves.interval_type)} in {saves.folder}"
    rows = {
        "model": f"{run.model.title}, {size}",
        "ranks": f"{mesh.world_size} ({why}), {shown}",
        "batch": f"{sequences}, {micro}",
        "steps": steps,
        "learning rate": f"{run.optimizer.lr:g}, {warmup}, then {schedule.decay_type}",
        "precision": ", ".join(precision),
        "checkpoints": checkpoints,
        "files": ", ".join(map(unbroken, config.files)) or "none: all defaults",
    }
    yield style.good("OK")
    for label, text in rows.items():
        yield style.wrap(f"  {label:<14} {text}", hanging=15)


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
    explained = [_explain_one(config, name, arguments.style) for name in names]
    if not names:
        given = bool(files or arguments.flags) and not arguments.all
        explained = [_explain_section(config, name, arguments.style, given) for name in sections()]
    return "\n\n".join(filter(None, explained))


def _explain_one(config: LoadedConfig, name: str, style: Style) -> str:
    learn(name.partition(".")[0])
    if name in sections():
        return _explain_section(config, name, style)
    if name in UNSUPPORTED:
        off = UNSUPPORTED[name]
        head = f"{style.bold(name)} is a key of others, or of earlier versions, without effect."
        accepted = " or ".join(map(quote, off.off))
        if off.switch:
            accepted = f"{accepted}; any value while {off.switch} leaves it off"
        return style.wrap(f"{head}\n  accepted  {accepted}\n  otherwise refused: {off.reason}")
    name = table_of(name) or name
    if key_of(name) not in keys():
        others = sorted(known for known in known_names() if known.startswith(f"{name}."))
        if others:
            return "\n\n".join(_explain_one(config, other, style) for other in others)
        from titanlite.config.unknown_keys import unknown

        raise ConfigError([replace(unknown(name, COMMAND_LINE), where="")])
    from titanlite.config.dialect import LATER_DEFAULTS

    key = keys()[key_of(name)]
    head = style.bold(key.name)
    if name in ALIASES:
        head += f"  ({name} is another name of it)"
    rows = [
        ("value", f"{unbroken(_shown_value(config, key))}  from {_source(config, key)}"),
        ("type", key.expected),
        ("default", quote(key.default)),
        ("meaning", key.description),
    ]
    if key.name == "model.name":
        rows.append(("families", ", ".join(SPECS)))
    if key.name in LATER_DEFAULTS:
        default = quote(LATER_DEFAULTS[key.name])
        files = "for a file that says so or uses later names of older keys"
        rows.append(("dialect 2026", f"default {default}, {files}"))
    rows += [("also", f"{other.name} ({other.relation})") for other in names_of(key.name)]
    lines = [style.wrap(f"  {label:<13} {text}", hanging=14) for label, text in rows]
    return "\n".join([head, *lines])


def summary(owner: type[Section]) -> str:
    """Return the first paragraph of a section's docstring as one line."""
    return " ".join((owner.__doc__ or "").split("\n\n")[0].split())


def _explain_section(
    config: LoadedConfig, name: str, style: Style, given_alone: bool = False
) -> str:
    """Return a section with its keys; "" where `given_alone` leaves none."""
    head = f"[{name}]"
    about = style.wrap(f"{head}  {summary(sections()[name])}")
    lines = [about.replace(head, style.bold(head), 1)]
    for key in keys().values():
        if key.section != name or (given_alone and not config.is_given(key.name)):
            continue
        value = f"{key.field} = {_shown_value(config, key)}"
        line = style.wrap(f"  {unbroken(value)}  {_source(config, key)}")
        if config.is_given(key.name):
            line = line.replace(value, style.bold(value), 1)
        lines.append(line)
        about = f"{key.description} ({key.expected}; default {quote(key.default)})"
        lines.append(style.dim(style.wrap(f"      {about}", hanging=0)))
    return "\n".join(lines if len(lines) > 1 or not given_alone else [])


def _shown_value(config: LoadedConfig, key: Key) -> str:
    from titanlite.runs.provenance import is_secret

    value = config.value(key.name)
    if key.name == "launch.environment":
        value = dict(value)
        for name in filter(is_secret, value):
            value[name] = REMOVED
    return quote(value)


def _source(config: LoadedConfig, key: Key) -> str:
    prefix = f"{key.name}."
    entries = [
        f"{name.removeprefix(prefix)}: {source}"
        for name, source in config.sources.items()
        if key.is_table and name.startswith(prefix)
    ]
    if entries:
        return ", ".join(entries)
    source = config.source(key.name)
    shown = unbroken(str(source))
    return shown if source.written in ("", key.name) else f"{shown}, as {source.written}"
