"""The `titanlite` command. Nothing here imports torch before it is needed."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from titanlite import __version__, entry, exit_codes, torchrun
from titanlite.checkpoint import command as checkpoint_command
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.checkpoint.place import StoreError
from titanlite.config.checks import missing_files
from titanlite.config.entries import begins_option, names_key
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.explain import Style, explain_all, explain_key
from titanlite.config.job import JobConfig
from titanlite.config.load import load
from titanlite.config.plans import MeshPlan, ModelPlan, Plans
from titanlite.config.resolve import smallest_world
from titanlite.config.unbuilt import unbuilt_notes
from titanlite.models.shapes import count_parameters
from titanlite.observe.console import wants_color
from titanlite.prepare import checked_plans, model_args, resolve_plans
from titanlite.runs import command as runs_command
from titanlite.runs.attempts import RunError
from titanlite.utils import counted, escape


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see `titanlite.exit_codes`)."""
    ours, flags = split_flags(sys.argv[1:] if argv is None else argv)
    arguments = _parser(ours[0] if ours else "").parse_args(ours)
    style = Style(wants_color(sys.stdout))
    try:
        result = arguments.run(arguments, flags, style)
    except ConfigError as error:
        print(escape(str(error)), file=sys.stderr)
        return exit_codes.CONFIG
    except RunError as error:
        print(escape(f"error: {error}"), file=sys.stderr)
        return exit_codes.CONFIG
    except (CheckpointError, StoreError) as error:
        print(escape(f"error: {error}"), file=sys.stderr)
        return exit_codes.CHECKPOINT
    text, code = result if isinstance(result, tuple) else (result, exit_codes.DONE)
    try:
        if text:
            # In a pipe it may be a file to be kept as it is.
            print(escape(text, colors=True) if sys.stdout.isatty() else text, flush=True)
    except BrokenPipeError:
        # A pager or `head` has seen enough; without this Python complains again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into argparse's part and the `--section.key value` flags with their words.

    argparse would take a flag's value for the name of the config file, and the value of `--aws-fsdp` for flags.
    """
    ours: list[str] = []
    flags: list[str] = []
    part = ours
    words = iter(argv)
    for word in words:
        if word == "--aws-fsdp":
            # Its value is made of what looks like flags.
            word = f"{word}={next(words, '')}"
        if begins_option(word):
            part = flags if names_key(word) else ours
        part.append(word)
    return ours, flags


def _parser(command: str = "") -> argparse.ArgumentParser:
    """The parser of all commands. The module of a tool is not loaded where `command` is another one."""
    parser = argparse.ArgumentParser(
        prog="titanlite", description="Train Llama-family models from one TOML file.", allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the versions of titanlite, torch and Python")
    parser.set_defaults(run=lambda arguments, *_: _versions() if arguments.version else parser.format_help().rstrip())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_train(commands)
    _add_config(commands)
    runs_command.add_commands(commands)
    checkpoint_command.add_commands(commands)
    if command not in commands.choices:
        for name in ("benchmark", "drill"):
            importlib.import_module(f"titanlite.tools.{name}").add_command(commands)
    return parser


_FLAGS = (
    "Any further --section.key VALUE is laid over the file, as for train.py: --training.steps 100, "
    "--no-training.compile, --model.overrides.n_layers 4."
)


def _versions() -> str:
    """Read from the records of the installation: importing torch takes seconds."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "is not installed"
    return f"titanlite {__version__}, torch {torch}, python {platform.python_version()}"


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a model on this machine",
        description="Train a config, as train.py does: one rank in this process, or N ranks with --nproc-per-node. A "
        "process that torchrun starts is one of its ranks: torchrun --nproc_per_node 8 -m titanlite train CONFIG",
        epilog=f"{_FLAGS} Exit status: docs/reliability.md lists it.",
        allow_abbrev=False,
    )
    train.add_argument("file", nargs="?", metavar="CONFIG", help="TOML file; also looked up in train_configs/")
    train.add_argument("--nproc-per-node", type=int, metavar="N", help="start N ranks on this machine with torchrun")
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace, flags: list[str], _: Style) -> NoReturn:
    argv = _with_file(arguments.file, flags)
    ranks = arguments.nproc_per_node
    if ranks is None:
        entry.main(argv)
    if ranks < 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        why = f"expected an integer >= 1, got {ranks}" if ranks < 1 else "torchrun has started this process already"
        raise ConfigError([Problem("command line", "--nproc-per-node", why)])
    checked_plans(argv, ranks, training=True)
    # torchrun would die of SIGUSR1, by which schedulers announce a time limit. Its workers listen to it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.execv(sys.executable, torchrun.command(ranks, argv))


def _with_file(file: str | None, flags: list[str]) -> list[str]:
    """The command line of `train.py` for a config file and flags."""
    return [*([f"--job.config_file={file}"] if file else []), *flags]


def _add_config(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    config = commands.add_parser("config", help="check, explain, compare and migrate config files", allow_abbrev=False)
    config.set_defaults(run=lambda *_: config.format_help().rstrip())
    actions = config.add_subparsers(title="commands", metavar="COMMAND")

    check = actions.add_parser(
        "check",
        help="is a config right, and what follows from it",
        description="Check a config and show what a run of it would do; all that is wrong is reported at once.",
        epilog=f"{_FLAGS} Exit status: 0 when it is right, 2 when not.",
        allow_abbrev=False,
    )
    check.add_argument("file", nargs="?", metavar="FILE", help="TOML file; also looked up in train_configs/")
    check.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks (default: WORLD_SIZE or NGPU of the environment, else the fewest that fit)",
    )
    check.add_argument(
        "--strict",
        action="store_true",
        help="also fail for what would stop training here: features not built yet, files that are not there",
    )
    check.set_defaults(run=_check)

    explain = actions.add_parser(
        "explain",
        help="every key, or one: value, source, type, default, meaning",
        description="Show each value and where it comes from. Nothing given: the defaults of all keys.",
        epilog=_FLAGS,
        allow_abbrev=False,
    )
    explain.add_argument(
        "words", nargs="*", metavar="KEY|FILE", help="a key or section to explain in depth, and the TOML file"
    )
    explain.set_defaults(run=_explain)
    _add_config_tools(actions)


_DIFFERENT = 1
"""Exit status of `config diff` and `config migrate --check`, as that of `diff`."""


def _add_config_tools(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = actions.add_parser(
        "diff",
        help="what differs in effect between two configs",
        description="Show the keys whose values differ, whatever their spelling, with the source of each. A config is "
        "a TOML file, the folder of a run, or a folder of checkpoints.",
        epilog=f"Exit status: 0 when they are equal, {_DIFFERENT} when not, 2 when one is wrong.",
        allow_abbrev=False,
    )
    diff.add_argument("left", metavar="FILE|FOLDER")
    diff.add_argument("right", metavar="FILE|FOLDER")
    diff.add_argument("--plans", action="store_true", help="also compare what follows from them")
    diff.add_argument(
        "--world-size", type=int, metavar="N", help="ranks for --plans (default: as for `config check`, on each side)"
    )
    diff.set_defaults(run=_diff)

    migrate = actions.add_parser(
        "migrate",
        help="rewrite later names and other trainers' files",
        description="Rewrite a TOML file with titanlite's own names in their sections. Comments stay beside their "
        "keys, later defaults are written out, and what has no equivalent becomes a comment with the reason. The new "
        "text goes to standard output, what was done to standard error.",
        epilog=f"Exit status: 0; with --check {_DIFFERENT} when the file would change; 2 when it holds other mistakes.",
        allow_abbrev=False,
    )
    migrate.add_argument("file", nargs="?", metavar="FILE", help="TOML file; also looked up in train_configs/")
    migrate.add_argument("--in-place", action="store_true", help="replace the file, and keep the old one as FILE.orig")
    migrate.add_argument("--check", action="store_true", help="change nothing, only tell what would change")
    migrate.add_argument(
        "--aws-fsdp", metavar="ARGUMENTS", help='a command line of the AWS FSDP samples instead: "--max_steps=100 ..."'
    )
    migrate.set_defaults(run=_migrate)

    schema = actions.add_parser(
        "schema",
        help="a JSON Schema of all keys, for editors",
        description="Print the JSON Schema (draft 2020-12) with which editors complete and check TOML files.",
        allow_abbrev=False,
    )
    schema.set_defaults(run=_schema)

    template = actions.add_parser(
        "template",
        help="a commented TOML file with every key",
        description="Print a TOML file with every key, its meaning and its default, to uncomment from.",
        allow_abbrev=False,
    )
    template.add_argument("--markdown", action="store_true", help="print the table of the documentation instead")
    template.set_defaults(run=_template)


def _no_flags(flags: list[str]) -> None:
    if flags:
        raise ConfigError([Problem("command line", flags[0], "this command takes no --section.key flags")])


def _diff(arguments: argparse.Namespace, flags: list[str], style: Style) -> tuple[str, int]:
    from titanlite.config.diff import differences, plan_differences, report, side

    _no_flags(flags)
    left, right = side(arguments.left), side(arguments.right)
    found = differences(left, right)
    if arguments.plans:
        size, _ = _world_size(arguments.world_size)
        plans = [resolve_plans(one.config, size or smallest_world(one.config)) for one in (left, right)]
        found += plan_differences(*plans)
    if not found:
        return "no difference in effect", exit_codes.DONE
    head = f"{style.dim('---')} {left.name}\n{style.dim('+++')} {right.name}"
    return f"{head}\n{report(found, style)}", _DIFFERENT


def _migrate(arguments: argparse.Namespace, flags: list[str], _: Style) -> tuple[str, int]:
    from titanlite.config.migrate import migrate_file, write_in_place

    if arguments.aws_fsdp is not None:
        from titanlite.config.aws_fsdp import migrate_arguments

        if arguments.file or arguments.in_place or arguments.check:
            raise ConfigError([Problem("command line", "--aws-fsdp", "takes no file, and no --in-place or --check")])
        _no_flags(flags)
        migration = migrate_arguments(arguments.aws_fsdp)
        print(escape(migration.report("--aws-fsdp")), file=sys.stderr)
        return migration.text.removesuffix("\n"), exit_codes.DONE
    _no_flags(flags)
    if not arguments.file or (arguments.in_place and arguments.check):
        message = "--in-place and --check exclude each other" if arguments.file else "name a TOML file, or --aws-fsdp"
        raise ConfigError([Problem("command line", "", message)])
    path, migration = migrate_file(arguments.file)
    report = migration.report(arguments.file)
    if arguments.check:
        return report, _DIFFERENT if migration.changes else exit_codes.DONE
    if arguments.in_place:
        kept = f"\nthe old file is {write_in_place(path, migration.text)}" if migration.changes else ""
        return report + kept, exit_codes.DONE
    print(escape(report), file=sys.stderr)
    return migration.text.removesuffix("\n"), exit_codes.DONE


def _schema(arguments: argparse.Namespace, flags: list[str], _: Style) -> str:
    from titanlite.config.schema_json import to_text

    _no_flags(flags)
    return to_text().removesuffix("\n")


def _template(arguments: argparse.Namespace, flags: list[str], _: Style) -> str:
    from titanlite.config.template import markdown, template

    _no_flags(flags)
    return markdown() if arguments.markdown else template()


def _explain(arguments: argparse.Namespace, flags: list[str], style: Style) -> str:
    is_file = [word.endswith(".toml") or os.sep in word or os.path.isfile(word) for word in arguments.words]
    files = [word for word, file in zip(arguments.words, is_file, strict=True) if file]
    names = [word for word, file in zip(arguments.words, is_file, strict=True) if not file]
    if len(files) > 1:
        raise ConfigError([Problem("command line", "", f"one file at a time, got {', '.join(files)}")])
    config = load([*(f"--job.config_file={file}" for file in files), *flags])
    if not names:
        return explain_all(config, style)
    return "\n\n".join(explain_key(config, name.strip("[]"), style) for name in names)


def _check(arguments: argparse.Namespace, flags: list[str], style: Style) -> str:
    world_size, why = _world_size(arguments.world_size)
    config, plans = checked_plans(_with_file(arguments.file, flags), world_size, training=arguments.strict)
    return _report(config, plans, why, style)


def _world_size(asked: int | None) -> tuple[int | None, str]:
    """Ranks to check for (None: the fewest that fit), and where the number comes from."""
    if asked is not None:
        if asked < 1:
            raise ConfigError([Problem("command line", "--world-size", f"expected an integer >= 1, got {asked}")])
        return asked, "--world-size"
    for name in ("WORLD_SIZE", "NGPU"):
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text), f"{name} of the environment"
    return None, "the fewest that fit; --world-size N checks another number"


def _size(plan: ModelPlan) -> str:
    """The model's size in words."""
    args = model_args(plan)
    return "the tokenizer's vocabulary" if args.vocab_size is None else f"{count_parameters(args):,} parameters"


def _degrees(plan: MeshPlan) -> str:
    replicate = f"data_parallel_replicate {plan.dp_replicate}, " if plan.dp_replicate > 1 else ""
    others = {"tensor": plan.tensor, "pipeline": plan.pipeline, "context": plan.context}
    shared = [f", {name}_parallel {degree}" for name, degree in others.items() if degree > 1]
    return f"{replicate}data_parallel_shard {plan.dp_shard}{''.join(shared)}"


def _report(config: JobConfig, plans: Plans, why: str, style: Style) -> str:
    batch, schedule, steps = plans.batch, plans.schedule, plans.train.steps
    length = counted(plans.data.epochs or 0, "epochs") if steps is None else f"{steps:,}"
    tokens = "" if steps is None else f", {steps * batch.tokens_per_step:,} tokens"
    rate = f"{plans.optimizer.lr:g}, warm-up {counted(schedule.warmup_steps, 'steps')}, then {schedule.decay_type}"
    rows = [
        ("model", f"{plans.model.name} {plans.model.flavor}, {_size(plans.model)}"),
        ("ranks", f"{plans.mesh.world_size} ({why}), {_degrees(plans.mesh)}"),
        (
            "batch",
            f"{counted(batch.global_batch_size, 'sequences')} of {batch.seq_len} tokens, "
            f"{counted(batch.accumulation, 'micro-batches')} of {batch.micro_batch_size} per rank",
        ),
        ("steps", f"{length}{tokens}"),
        ("learning rate", rate),
        (
            "checkpoints",
            f"every {counted(plans.checkpoint.interval, plans.checkpoint.interval_type)} in {plans.checkpoint.folder}"
            if plans.checkpoint.enable
            else "none",
        ),
        ("files", ", ".join(config.files) or "none: all defaults"),
    ]
    lines = [style.good("OK"), *(f"  {label:<14} {text}" for label, text in rows)]
    lines += [style.dim(f"  note: {note}") for note in plans.notes]
    lines += [style.warn(f"  warning: {warning}") for warning in plans.warnings]
    lines += [style.warn(f"  not there: {problem}") for problem in missing_files(config)]
    lines += [style.warn(f"  training will refuse: {note}") for note in unbuilt_notes(config)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
