"""The commands of `titanlite`, and the parser of one or of all.

A command's module is imported only when that command runs, or for the list of all.
"""

from __future__ import annotations

import re

from titanlite import doors
from titanlite.cli.argument_parser import Parser

#: Command of the core → the function that adds it to argparse. `titanlite.doors` has the others.
COMMANDS = {
    "train": "titanlite.cli.train:add_command",
    "launch": "titanlite.cli.launch:add_command",
    "doctor": "titanlite.cli.doctor:add_command",
    "sample": "titanlite.cli.sample:add_command",
    "eval": "titanlite.cli.eval:add_command",
    "config": "titanlite.cli.config:add_commands",
    "runs": "titanlite.cli.runs:add_command",
    "data": "titanlite.cli.data:add_commands",
    "plan": "titanlite.cli.plan.plan:add_command",
    "checkpoint": "titanlite.cli.checkpoint:add_commands",
    "export": "titanlite.cli.export:add_command",
}


def place_of(command: str) -> str | None:
    """Return the function that adds a command; None: there is no such command."""
    return COMMANDS.get(command) or doors.place_of("commands", command)


def make_parser(command: str | None = None) -> Parser:
    """Return the parser of one command; None: of all, those of the core first.

    Commands of other packages are listed by name alone, without running their code.
    """
    parser = top_parser()
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    if command is not None:
        doors.load(place_of(command) or "")(commands)
        return parser
    for place in (*COMMANDS.values(), *doors.OURS["commands"].values()):
        if not doors.lack(place):
            doors.load(place)(commands)
    for name, place in doors.of_packages("commands").items():
        if name not in COMMANDS:
            help = f"of the package {re.split('[.:]', place)[0]}"
            commands._choices_actions.append(commands._ChoicesPseudoAction(name, (), help))
    return parser


def top_parser() -> Parser:
    """Return the parser without commands."""
    parser = Parser(
        prog="titanlite",
        description="Train Llama-family models from one TOML file.",
        allow_abbrev=False,
    )
    parser.add("--version", "print the versions of titanlite, torch and Python")
    parser.set_defaults(
        run=lambda arguments: _versions() if arguments.version else parser.format_help().rstrip(),
        takes_keys=True,
    )
    return parser


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
