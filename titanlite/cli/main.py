"""The `titanlite` command: it reads the words, runs one command and prints its result."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from titanlite import doors, exit_codes
from titanlite.assembly.tested_machines import system_problem
from titanlite.cli.argument_parser import no_flags
from titanlite.cli.command_table import COMMANDS, make_parser, place_of, top_parser
from titanlite.cli.flags import split_flags
from titanlite.config.errors import ConfigError
from titanlite.runs.text_tables import Style
from titanlite.utils import (
    escape,
    missing_package,
    public,
    say,
    wants_color,
)


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print it without control characters and secrets of URLs."""
    say("".join(traceback.format_exception(kind, error, trace)).removesuffix("\n"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code (see `titanlite.exit_codes`)."""
    problem = system_problem()
    if problem:
        say(f"error: {problem}")
        return exit_codes.CONFIG
    ours, flags = split_flags(sys.argv[1:] if argv is None else argv)
    command = next((word for word in ours if not word.startswith("-")), None)
    if command is not None:
        place = place_of(command)
        if place is None:
            top_parser().unknown_command(command, [*COMMANDS, *doors.installed("commands")])
        if lack := doors.lack(place):
            say(f"error: `titanlite {command}` {lack}")
            return exit_codes.CONFIG
    arguments = make_parser(command).parse_args(ours)

    sys.excepthook = _print_traceback
    arguments.flags = flags
    arguments.style = Style(wants_color(sys.stdout), _columns(sys.stdout))
    try:
        if not arguments.takes_keys:
            no_flags(flags)
        result = arguments.run(arguments)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        say(f"error: {missing_package('torch')}")
        return exit_codes.CONFIG
    except Exception as error:
        code = exit_codes.own_code(error)
        if code is None:
            raise
        is_of_config = isinstance(error, ConfigError)
        report = Style(False, _columns(sys.stderr)).wrap(str(error))
        say(report if is_of_config else f"error: {error}")
        return code
    text, code = result if isinstance(result, tuple) else (result, exit_codes.DONE)
    if text:
        # In a pipe it may be a file to be kept as it is.
        _show(text if getattr(arguments, "verbatim", False) else public(text))
    return code


def _columns(stream: TextIO) -> int:
    """Return the width of a terminal; 0: it is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else 0


def _show(text: str) -> None:
    if sys.stdout.isatty():
        text = escape(text, colors=True, verbatim=True)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # A pager or `head` has seen enough. Python would complain again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
