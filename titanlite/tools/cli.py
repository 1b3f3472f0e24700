"""The `titanlite` command.

A command's module is imported only when that command runs, or for the list of all.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from titanlite import exit_codes
from titanlite.config.entries import begins_option, names_key, value_words
from titanlite.config.errors import ConfigError, bad_flag
from titanlite.start.supported import system_problem
from titanlite.tools.parser import FLAGS as FLAGS
from titanlite.tools.parser import Parser
from titanlite.utils import (
    Style,
    escape,
    hide_secrets_in_tracebacks,
    missing_package,
    public,
    require,
)

Commands = Any  # argparse._SubParsersAction[argparse.ArgumentParser]

#: Command → the function that adds it to argparse.
COMMANDS = {
    "train": "titanlite.tools.cli:add_train",
    "run": "titanlite.tools.commands.run:add_command",
    "launch": "titanlite.tools.launch.launch:add_command",
    "doctor": "titanlite.tools.commands.doctor:add_command",
    "evaluate": "titanlite.tools.commands.evaluate:add_command",
    "sample": "titanlite.tools.commands.sample:add_command",
    "eval": "titanlite.tools.commands.harness:add_command",
    "config": "titanlite.tools.commands.config:add_commands",
    "runs": "titanlite.tools.commands.runs:add_command",
    "compare": "titanlite.tools.commands.compare:add_command",
    "data": "titanlite.tools.commands.data:add_commands",
    "plan": "titanlite.tools.plan.plan:add_command",
    "lr": "titanlite.tools.commands.learning_rate:add_command",
    "checkpoint": "titanlite.tools.commands.checkpoint:add_commands",
    "export": "titanlite.tools.commands.checkpoint:add_exchange",
    "import": "titanlite.tools.commands.checkpoint:add_exchange",
    "benchmark": "titanlite.tools.commands.benchmark:add_command",
    "ladder": "titanlite.tools.commands.benchmark:add_command",
    "drill": "titanlite.tools.drill.drill:add_command",
    "tokenizer": "titanlite.tools.hub.tokenizer:add_commands",
    "completion": "titanlite.tools.completion:add_command",
    "help": "titanlite.tools.cli:add_help",
}

EMA = "take the average of the weights (optimizer.ema_decay), of a checkpoint"
FILES = "TOML file, or several, later ones over earlier ones; also looked up in train_configs/"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code (see `titanlite.exit_codes`)."""
    problem = system_problem()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return exit_codes.CONFIG
    # A shell asks what a word may become.
    if "_ARGCOMPLETE" in os.environ:
        from titanlite.tools.completion import complete

        complete()
    ours, flags = split_flags(sys.argv[1:] if argv is None else argv)
    command = next((word for word in ours if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        _top_parser().unknown_command(command, list(COMMANDS))
    arguments = make_parser(command).parse_args(ours)

    from titanlite.metrics.console import wants_color

    hide_secrets_in_tracebacks()
    try:
        result = arguments.run(arguments, flags, Style(wants_color(sys.stdout)))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"error: {missing_package('torch')}", file=sys.stderr)
        return exit_codes.CONFIG
    except Exception as error:
        code = exit_codes.own_code(error)
        if code is None:
            raise
        report = str(error) if isinstance(error, ConfigError) else f"error: {error}"
        print(escape(report), file=sys.stderr)
        return code
    text, code = result if isinstance(result, tuple) else (result, exit_codes.DONE)
    if text:
        # In a pipe it may be a file to be kept as it is.
        _show(text if getattr(arguments, "verbatim", False) else public(text))
    return code


def _show(text: str) -> None:
    """Print a result."""
    if sys.stdout.isatty():
        text = escape(text, colors=True, verbatim=True)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # A pager or `head` has seen enough. Python would complain again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into argparse's part and the `--section.key value` flags with their
    words.

    argparse would take a flag's value for the name of the config file, and the value of
    `--aws-fsdp` for flags.
    """
    ours: list[str] = []
    flags: list[str] = []
    place = 0
    while place < len(argv):
        word = argv[place]
        place += 1
        # Its value looks like flags.
        if word == "--aws-fsdp":
            value = argv[place] if place < len(argv) else ""
            ours.append(f"{word}={value}")
            place += 1
        elif begins_option(word) and names_key(word):
            end = place + value_words(word, _plain_words(argv[place:]))
            flags += [word, *argv[place:end]]
            place = end
        else:
            ours.append(word)
    return ours, flags


def _plain_words(words: Sequence[str]) -> list[str]:
    """Return the words up to the next option."""
    return list(itertools.takewhile(lambda word: not begins_option(word), words))


def add_files(parser: argparse.ArgumentParser) -> None:
    """Let a command take config files; `files_of` has them."""
    parser.add_argument("files", nargs="*", metavar="CONFIG", help=FILES)


def files_of(arguments: argparse.Namespace) -> list[str]:
    """Return the flag that names the config files of a command."""
    return ["--job.config_file", *arguments.files] if arguments.files else []


def no_flags(flags: Sequence[str]) -> None:
    """Refuse `--section.key` flags for a command that takes none."""
    if flags:
        raise bad_flag(flags[0], "this command takes no --section.key flags")


def make_parser(command: str | None = None) -> Parser:
    """Return the parser of one command; None: of all."""
    parser = _top_parser()
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for adder in dict.fromkeys(COMMANDS.values()):
        if command is None or COMMANDS[command] == adder:
            module, _, name = adder.partition(":")
            getattr(importlib.import_module(module), name)(commands)
    return parser


def _top_parser() -> Parser:
    """Return the parser without commands."""
    parser = Parser(
        prog="titanlite",
        description="Train Llama-family models from one TOML file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="store_true", help="print the versions of titanlite, torch and Python"
    )
    parser.set_defaults(
        run=lambda arguments, *_: (
            _versions() if arguments.version else parser.format_help().rstrip()
        )
    )
    return parser


def add_help(commands: Commands) -> None:
    """Add `titanlite help` to argparse."""
    parser = commands.add_parser(
        "help",
        help="show the help of a command",
        description=(
            "Show the help of a command, as --help behind the command does; of all commands "
            "without one."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="a command, as `config check`")
    parser.set_defaults(run=_help)


def _help(arguments: argparse.Namespace, flags: list[str], _: Style) -> tuple[str, int]:
    no_flags(flags)
    return "", main([*arguments.words, "--help"])


def _versions() -> str:
    """Return the versions in the records of the installation: importing torch takes seconds."""
    import importlib.metadata
    import platform

    from titanlite import __version__

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "is not installed"
    return f"titanlite {__version__}, torch {torch}, python {platform.python_version()}"


def add_train(commands: Commands) -> None:
    """Add `titanlite train` to argparse."""
    train = commands.add_parser(
        "train",
        help="train a model on this machine",
        description="Train a config, as train.py does: one rank in this process, or N ranks with "
        "--nproc-per-node. A process that torchrun starts is one of its ranks: "
        "torchrun --nproc_per_node 8 -m titanlite train CONFIG",
        epilog=f"{FLAGS} Exit status: docs/reliability.md lists it.",
        allow_abbrev=False,
    )
    add_files(train)
    train.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="start N ranks on this machine with torchrun",
    )
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace, flags: list[str], _: Style) -> NoReturn:
    from titanlite import main
    from titanlite.start.fit import check_config
    from titanlite.start.signals import SIGNALS, exit_on_signals

    argv = [*files_of(arguments), *flags]
    ranks = arguments.nproc_per_node
    if ranks is None:
        main.main(argv)
    check_ranks(ranks)
    exit_on_signals(*SIGNALS)
    check_config(argv, ranks)
    start_ranks(ranks, ["train", *argv])


def check_ranks(ranks: int) -> None:
    """Check the value of --nproc-per-node. Raises ConfigError."""
    if ranks < 1:
        raise bad_flag("--nproc-per-node", f"expected an integer >= 1, got {ranks}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise bad_flag("--nproc-per-node", "torchrun has started this process already")


def start_ranks(ranks: int, words: Sequence[str], options: Sequence[str] = ()) -> NoReturn:
    """Become the torchrun of `torchrun.command`."""
    import signal

    from titanlite import torchrun
    from titanlite.start.signals import hold_signals

    require("torch")

    # torchrun would die of SIGUSR1, by which schedulers announce a time limit. Its workers listen
    # to it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Until torchrun can end by exit code 5.
    hold_signals(signal.SIGTERM, signal.SIGINT)
    os.execv(sys.executable, torchrun.command(ranks, words, options))


if __name__ == "__main__":
    sys.exit(main())
