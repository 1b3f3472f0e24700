"""The commands of `titanlite`, and the parser of one or of all.

A command's module is imported only when that command runs, or for the list of all.
"""

from __future__ import annotations

import importlib

from titanlite.tools.parser import Parser

#: Command → the function that adds it to argparse.
COMMANDS = {
    "train": "titanlite.tools.commands.train:add_command",
    "launch": "titanlite.tools.launch.launch:add_command",
    "doctor": "titanlite.tools.commands.doctor:add_command",
    "sample": "titanlite.tools.commands.sample:add_command",
    "eval": "titanlite.tools.commands.eval:add_command",
    "config": "titanlite.tools.commands.config:add_commands",
    "runs": "titanlite.tools.commands.runs:add_command",
    "data": "titanlite.tools.commands.data:add_commands",
    "plan": "titanlite.tools.plan.plan:add_command",
    "sweep": "titanlite.contrib.lab.sweep:add_command",
    "ladder": "titanlite.tools.ladder.command:add_command",
    "mup": "titanlite.tools.mup.command:add_commands",
    "checkpoint": "titanlite.tools.commands.checkpoint:add_commands",
    "export": "titanlite.tools.commands.exchange:add_commands",
    "import": "titanlite.tools.commands.exchange:add_commands",
    "push": "titanlite.tools.push.command:add_command",
    "benchmark": "titanlite.tools.commands.benchmark:add_command",
    "tokenizer": "titanlite.tools.hub.tokenizer:add_commands",
    "completion": "titanlite.tools.completion:add_command",
}

#: Commands of earlier versions → what does their work now.
GONE = {
    "run": "`titanlite train CONFIG` trains on all GPUs of this machine",
    "compare": "`titanlite runs --compare RUN RUN` puts runs side by side",
    "drill": "its faults are played by the tests (tests/failures) and benchmarks/crash_soak.py",
    "evaluate": "`titanlite eval CHECKPOINT [CONFIG]` measures held-out text",
    "help": "`titanlite COMMAND --help` shows the help of a command",
    "lr": "`titanlite config check` names the schedule; metrics.jsonl has the rate of each step",
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
