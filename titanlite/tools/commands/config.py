"""`titanlite config`: check, explain, compare, migrate; and the pages that are generated from the
keys.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from titanlite import exit_codes
from titanlite.config import trust
from titanlite.config.aliases import ALIASES, LATER_DEFAULTS, LATER_FLAVORS, key_of, names_of
from titanlite.config.checks import contradictions, missing_files
from titanlite.config.entries import unknown
from titanlite.config.errors import COMMAND_LINE, ConfigError, Problem, bad_flag
from titanlite.config.keys import Key, keys, sections, table_of
from titanlite.config.load import load, load_file, read_text
from titanlite.config.loaded import LoadedConfig
from titanlite.config.not_implemented import NOT_IMPLEMENTED, refused
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import UNSUPPORTED
from titanlite.start.derive import RunConfig, smallest_world
from titanlite.start.fit import check_config, fitted
from titanlite.tools.cli import FILES, FLAGS, Commands, files_of, no_flags
from titanlite.utils import REMOVED, Style, counted, escape, parse_json

DIFFERENT = 1
"""Exit status of `config diff` and `config migrate --check`, as that of `diff`."""

RUN_CONFIG = "config.toml"
_MANIFEST = "manifest.json"
_FILE = "TOML file; also looked up in train_configs/"


def add_commands(commands: Commands) -> None:
    """Add `titanlite config` to argparse."""
    config = commands.add_parser(
        "config", help="check, explain, compare and migrate config files", allow_abbrev=False
    )
    config.set_defaults(run=lambda *_: config.format_help().rstrip())
    actions = config.add_subparsers(title="commands", metavar="COMMAND")

    def add(
        run: Any, help: str, more: str = "", epilog: str = ""
    ) -> Callable[..., argparse.Action]:
        name, about = run.__name__.strip("_"), f"{help[0].upper()}{help[1:]}. {more}"
        parser = actions.add_parser(
            name, help=help, description=about, epilog=epilog, allow_abbrev=False
        )
        parser.set_defaults(run=run)
        return parser.add_argument

    stages = (
        "All problems of a stage are reported at once: first each key by itself, then "
        "contradictions between keys, then numbers that do not fit the ranks or the model."
    )
    exits = f"{FLAGS} Exit status: 0 when it is right, 2 when not."
    check = add(_check, "check a config and show what a run of it would do", stages, exits)
    check("files", nargs="*", metavar="FILE", help=FILES)
    ranks = "ranks (default: WORLD_SIZE or NGPU of the environment, else the fewest that fit)"
    check("--world-size", type=int, metavar="N", help=ranks)
    strict = (
        "also refuse features that are not built yet and files that are not there, as training does"
    )
    check("--strict", action="store_true", help=strict)

    defaults = "Nothing given: the defaults of all keys."
    explain = add(
        _explain, "show every key, or one: value, source, type, default, meaning", defaults, FLAGS
    )
    explain(
        "words",
        nargs="*",
        metavar="KEY|FILE",
        help="a key or section to explain in depth, and the TOML file",
    )

    sides = "A config is a TOML file, the folder of a run, or a folder of checkpoints."
    exits = f"Exit status: 0 when they are equal, {DIFFERENT} when not, 2 when one is wrong."
    diff = add(
        _diff, "compare the effective values of two configs, with their sources", sides, exits
    )
    diff("left", metavar="FILE|FOLDER")
    diff("right", metavar="FILE|FOLDER")
    diff("--plans", action="store_true", help="also compare the values derived from them")
    diff(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks for --plans (default: as for `config check`)",
    )
    trust.add_argument(diff)

    rewriting = (
        "Comments stay beside their keys, later defaults are written out, and a key without "
        "equivalent becomes a comment with the reason. The new text goes to standard output, the "
        "list of changes to standard error."
    )
    exits = (
        f"Exit status: 0; with --check {DIFFERENT} when the file would change; 2 when it holds "
        "other mistakes."
    )
    migrate = add(
        _migrate, "rewrite a TOML file with titanlite's own names of the keys", rewriting, exits
    )
    migrate("file", nargs="?", metavar="FILE", help=_FILE)
    migrate(
        "--in-place",
        action="store_true",
        help="replace the file, and keep the old one as FILE.orig",
    )
    migrate("--check", action="store_true", help="only list the changes")
    arguments = 'a command line of the AWS FSDP samples instead: "--max_steps=100 ..."'
    migrate("--aws-fsdp", metavar="ARGUMENTS", help=arguments)

    add(_schema, "print a JSON Schema of all keys, with which editors complete and check files")
    template = add(
        _template, "print a TOML file with every key, its meaning and its default, as comments"
    )
    template("--markdown", action="store_true", help="print the table of the documentation instead")


def _migrate(arguments: argparse.Namespace, flags: list[str], _: Style) -> tuple[str, int]:
    from titanlite.tools.commands.migrate import migrate_file, write_in_place

    no_flags(flags)
    shown = arguments.file
    if arguments.aws_fsdp is not None:
        from titanlite.tools.commands.aws_fsdp import migrate_arguments

        if arguments.file or arguments.in_place or arguments.check:
            raise bad_flag("--aws-fsdp", "takes no file, and no --in-place or --check")
        shown, migration = "--aws-fsdp", migrate_arguments(arguments.aws_fsdp)
    elif not arguments.file or (arguments.in_place and arguments.check):
        raise bad_flag(
            "",
            "--in-place and --check exclude each other"
            if shown
            else "name a TOML file, or --aws-fsdp",
        )
    else:
        path, migration = migrate_file(arguments.file)
    report = migration.report(shown)
    if arguments.check:
        return report, DIFFERENT if migration.changes else exit_codes.DONE
    if arguments.in_place:
        kept = (
            f"\nthe old file is {write_in_place(path, migration.text)}" if migration.changes else ""
        )
        return report + kept, exit_codes.DONE
    print(escape(report), file=sys.stderr)
    return migration.text.removesuffix("\n"), exit_codes.DONE


def _schema(arguments: argparse.Namespace, flags: list[str], _: Style) -> str:
    from titanlite.tools.commands.config_pages import schema_text

    no_flags(flags)
    return schema_text().removesuffix("\n")


def _template(arguments: argparse.Namespace, flags: list[str], _: Style) -> str:
    from titanlite.tools.commands.config_pages import markdown, template

    no_flags(flags)
    return markdown() if arguments.markdown else template()


# Check


def _check(arguments: argparse.Namespace, flags: list[str], style: Style) -> str:
    argv = [*files_of(arguments), *flags]
    world_size, why = world_size_of(arguments.world_size)
    config, run = check_config(argv, world_size, training=arguments.strict)
    return _report(config, run, why, style)


def world_size_of(asked: int | None) -> tuple[int | None, str]:
    """Return the ranks to check for (None: the fewest that fit), and where the number comes
    from.
    """
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
    """Return what a run of the config does, line by line."""
    mesh, batch, schedule, steps = run.mesh, run.batch, run.schedule, run.steps
    args = run.model_args()
    count = run.spec.count_parameters
    size = (
        "the tokenizer's vocabulary" if args.vocab_size is None else f"{count(args):,} parameters"
    )
    degrees = {"data_parallel_replicate": mesh.dp_replicate, "data_parallel_shard": mesh.dp_shard}
    degrees |= {
        f"{name}_parallel": getattr(mesh, name)
        for name in ("tensor", "pipeline", "context", "expert")
    }
    shown = [
        f"{name} {degree}"
        for name, degree in degrees.items()
        if degree > 1 or name == "data_parallel_shard"
    ]
    length = counted(run.training.epochs or 0, "epochs") if steps is None else f"{steps:,}"
    tokens = "" if steps is None else f", {steps * batch.tokens_per_step:,} tokens"
    pieces = f"{counted(batch.accumulation, 'micro-batches')} of {batch.micro_batch_size} per rank"
    warmup = f"warm-up {counted(schedule.warmup_steps, 'steps')}, then {schedule.decay_type}"
    saves = run.checkpoint
    rows = {
        "model": f"{run.model.title}, {size}",
        "ranks": f"{mesh.world_size} ({why}), {', '.join(shown)}",
        "batch": f"{counted(batch.global_batch_size, 'sequences')} of {batch.seq_len} tokens, "
        f"{pieces}",
        "steps": f"{length}{tokens}",
        "learning rate": f"{run.optimizer.lr:g}, {warmup}",
        "checkpoints": f"every {counted(saves.interval, saves.interval_type)} in {saves.folder}"
        if saves.enable_checkpoint
        else "none",
        "files": ", ".join(config.files) or "none: all defaults",
    }
    lines = [style.good("OK"), *(f"  {label:<14} {text}" for label, text in rows.items())]
    lines += [style.dim(f"  note: {note}") for note in run.notes]
    lines += [style.warn(f"  warning: {warning}") for warning in run.warnings]
    lines += [style.warn(f"  not there: {problem}") for problem in missing_files(config)]
    lines += [
        style.warn(f"  training will refuse: {p.where}: {p.key} = {p.message}")
        for p in refused(config)
    ]
    return "\n".join(lines)


# Explain


def _explain(arguments: argparse.Namespace, flags: list[str], style: Style) -> str:
    files = [w for w in arguments.words if w.endswith(".toml") or os.sep in w or os.path.isfile(w)]
    names = [word.strip("[]") for word in arguments.words if word not in files]
    if len(files) > 1:
        raise bad_flag("", f"one file at a time, got {', '.join(files)}")
    config = load([*(f"--job.config_file={file}" for file in files), *flags])
    return "\n\n".join(_explain_one(config, name, style) for name in names or sections())


def _explain_one(config: LoadedConfig, name: str, style: Style) -> str:
    """Explain a section, or a key (by any of its names). Raises ConfigError for an unknown one."""
    if name in sections():
        return _explain_section(config, name, style)
    if name in UNSUPPORTED:
        off, reason = UNSUPPORTED[name]
        head = f"{style.bold(name)} is a key of other trainers without effect here."
        return f"{head}\n  accepted  {' or '.join(map(quote, off))}\n  otherwise refused: {reason}"
    name = table_of(name) or name
    if key_of(name) not in keys():
        problem = unknown(name, COMMAND_LINE)
        raise ConfigError([Problem("", name, problem.message, problem.hint, code=problem.code)])
    key = keys()[key_of(name)]
    rows = [
        ("value", f"{style.bold(_shown_value(config, key))}  from {_source(config, key)}"),
        ("type", key.expected),
        ("default", quote(key.default)),
        ("meaning", key.description),
    ]
    if key.name in LATER_DEFAULTS:
        text = (
            f"default {quote(LATER_DEFAULTS[key.name])}, for a file that says so or uses later "
            "names of older keys"
        )
        rows.append(("dialect 2026", text))
    if key.name == "model.flavor":
        text = ", ".join(
            f"{quote(there)} is {quote(here)}" for there, (here, _) in LATER_FLAVORS.items()
        )
        rows.append(("dialect 2026", f"of llama3 {text}, in such a file"))
    rows += [("also", f"{other.name} ({other.relation})") for other in names_of(key.name)]
    if entry := NOT_IMPLEMENTED.get(key.name):
        possible = " or ".join(map(quote, (key.default, *entry.implemented)))
        advice = f"; {entry.advice}" if entry.advice else ""
        rows.append(
            (
                "not built yet",
                f"{entry.feature}: values other than {possible} stop training{advice}",
            )
        )
    head = f"{style.bold(key.name)}" + (
        f"  ({name} is another name of it)" if name in ALIASES else ""
    )
    return "\n".join([head, *(f"  {label:<13} {text}" for label, text in rows)])


def _explain_section(config: LoadedConfig, name: str, style: Style) -> str:
    from titanlite.tools.commands.config_pages import summary

    lines = [f"{style.bold(f'[{name}]')}  {summary(sections()[name])}"]
    for key in (k for k in keys().values() if k.section == name):
        value = f"{key.field} = {_shown_value(config, key)}"
        value = style.bold(value) if config.is_given(key.name) else value
        lines.append(f"  {value}  {style.dim(_source(config, key))}")
        lines.append(
            style.dim(f"      {key.description} ({key.expected}; default {quote(key.default)})")
        )
    return "\n".join(lines)


def _shown_value(config: LoadedConfig, key: Key) -> str:

    value = config.value(key.name)
    from titanlite.runs.provenance import is_secret

    if key.name == "launch.environment":
        value = {name: REMOVED if is_secret(name) else text for name, text in value.items()}
    return quote(value)


def _source(config: LoadedConfig, key: Key) -> str:
    if key.is_table and config.is_given(key.name):
        prefix = f"{key.name}."
        return ", ".join(
            f"{n[len(prefix) :]}: {s}" for n, s in config.sources.items() if n.startswith(prefix)
        )
    return _shown_source(config, key.name)


def _shown_source(config: LoadedConfig, key: str) -> str:
    source = config.source(key)
    return f"{source}, as {source.written}" if source.written not in ("", key) else str(source)


# Diff

#: A value in words, and where it was written.
Shown = tuple[str, str]
#: A key, and its value on both sides.
Difference = tuple[str, Shown, Shown]


def _diff(arguments: argparse.Namespace, flags: list[str], style: Style) -> tuple[str, int]:
    no_flags(flags)
    trust_code = arguments.trust_code
    left = side(arguments.left, trust_code=trust_code)
    right = side(arguments.right, trust_code=trust_code)
    found = differences(left, right)
    if arguments.plans:
        size, _ = world_size_of(arguments.world_size)
        runs = [fitted(one.config, size or smallest_world(one.config)) for one in (left, right)]
        found += derived_differences(*runs)
    if not found:
        return "no difference in effect", exit_codes.DONE
    lines = [f"{style.dim('---')} {left.name}", f"{style.dim('+++')} {right.name}"]
    for key, *sides in found:
        lines.append(style.bold(key))
        for mark, (value, source) in zip("-+", sides, strict=True):
            lines.append(f"  {mark} {value}" + (style.dim(f"  {source}") if source else ""))
    return "\n".join(lines), DIFFERENT


class Side(NamedTuple):
    """One of the two configs, and its name as the user gave it."""

    name: str
    config: LoadedConfig


def side(name: str, over: Sequence[str] = (), trust_code: bool = False) -> Side:
    """Return the config of a TOML file, of a run's folder or of a checkpoint's folder.

    Raises ConfigError.

    over: flags to lay over it. trust_code: let a folder's config name code and variables
    (`titanlite.config.trust`).
    """
    path = Path(name)
    if not path.is_dir():
        return Side(name, load_file(name, over))
    file, text = path / RUN_CONFIG, None
    if file.is_file():
        text = file.read_text(encoding="utf-8")
    # the manifests of a checkpoint's own folder, a folder of checkpoints, or a run; the newest
    # first
    else:
        found = [
            f
            for pattern in ("", "step-*/", "*/step-*/")
            for f in path.glob(f"{pattern}{_MANIFEST}")
        ]
        steps = {
            f: int(match[1])
            for f in found
            if (match := re.fullmatch(r"step-(\d+)", f.resolve().parent.name))
        }
        for file in sorted(steps, key=lambda f: steps[f], reverse=True):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                text = parse_json(file.read_bytes())["config"]["toml"]
            if isinstance(text, str):
                break
    if not isinstance(text, str):
        hint = (
            f"give a TOML file, or a folder with {RUN_CONFIG} or a checkpoint (step-N/{_MANIFEST})"
        )
        raise ConfigError(
            [Problem("command line", "", f"no config in {quote(name)}", hint, code="no-file")]
        )
    config, problems = read_text(text, file, over, trust.foreign(trust_code))
    if problems := problems or contradictions(config):
        raise ConfigError(problems)
    return Side(name, config)


def differences(left: Side, right: Side) -> list[Difference]:
    """Return the keys whose values differ in effect, in order."""
    ours, theirs, order = dict(left.config.entries()), dict(right.config.entries()), list(keys())
    names = sorted({**ours, **theirs}, key=lambda key: order.index(".".join(key.split(".")[:2])))

    def shown(one: Side, values: dict[str, Any], key: str) -> Shown:
        if key not in values:
            return "(not set)", ""
        return REMOVED if _is_secret_variable(key) else quote(values[key]), _shown_source(
            one.config, key
        )

    differ = [
        key for key in names if key not in ours or key not in theirs or ours[key] != theirs[key]
    ]
    return [(key, shown(left, ours, key), shown(right, theirs, key)) for key in differ]


def _is_secret_variable(key: str) -> bool:
    """Return whether a key is one of `launch.environment` whose name suggests a secret."""
    if not key.startswith("launch.environment."):
        return False
    from titanlite.runs.provenance import is_secret  # `runs` is imported where it is needed

    return is_secret(key.removeprefix("launch.environment."))


def derived_differences(left: RunConfig, right: RunConfig) -> list[Difference]:
    """Return the derived values that differ."""

    def derived(run: RunConfig) -> dict[str, Any]:
        parts: dict[str, Any] = {
            "mesh": run.mesh,
            "batch": run.batch,
            "pipeline": run.pipeline,
            "schedule": run.schedule,
        }
        return {"steps": run.steps} | {
            f"{p}.{k}": v for p, part in parts.items() for k, v in asdict(part).items()
        }

    pairs = [(name, ours, derived(right)[name]) for name, ours in derived(left).items()]
    return [(f"derived.{name}", (quote(a), ""), (quote(b), "")) for name, a, b in pairs if a != b]
