"""The commands of `titanlite`, and the parser of one or of all.

A command's module is imported only when that command runs, or for the list of all.
"""

from __future__ import annotations

import importlib

from titanlite.cli.parser import Parser

#: Command → the function that adds it to argparse.
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
    "sweep": "titanlite.contrib.lab.sweep:add_command",
    "ladder": "titanlite.contrib.lab.ladder.command:add_command",
    "mup": "titanlite.contrib.lab.mup.command:add_commands",
    "checkpoint": "titanlite.cli.checkpoint:add_commands",
    "export": "titanlite.cli.export:add_command",
    "push": "titanlite.contrib.hub.command:add_command",
    "benchmark": "titanlite.contrib.lab.benchmark:add_command",
}


def make_parser(command: str | None = None) -> Parser:
    """Return the parser of one command; None: of all."""
    parser = top_parser()
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for adder in dict.fromkeys(COMMANDS.values()):
        if command is None or COMMANDS[command] == adder:
            module, _, name = adder.partition(":")
            getattr(importlib.import_module(module), name)(commands)
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
