"""Tab completion of `titanlite` in bash, zsh and fish, by the package argcomplete.

The shell calls `titanlite` with `_ARGCOMPLETE` in the environment, and `complete` answers. A normal
start imports nothing of this.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any, NoReturn

from titanlite.cli.command_table import COMMANDS, make_parser, top_parser
from titanlite.cli.parser import Commands, Parser, new_command
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.key_types import choices, members
from titanlite.config.keys import Key, keys, sections
from titanlite.config.load import config_folders
from titanlite.utils import pip_install

#: Set by the shell's function when it asks for completions.
VARIABLE = "_ARGCOMPLETE"
_SHELLS = ("bash", "zsh", "fish")
_WHERE = {
    "bash": 'eval "$(titanlite completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(titanlite completion zsh)"   # in ~/.zshrc, below compinit',
    "fish": "titanlite completion fish | source   # in ~/.config/fish/config.fish",
}


def add_command(commands: Commands) -> None:
    """Add `titanlite completion` to argparse."""
    lines = "; ".join(_WHERE.values())
    parser = new_command(
        commands,
        _run,
        "completion",
        "print the code for tab completion in a shell",
        "Print code with which a shell completes commands, options, keys of the "
        "config and their values, and config files. Add one of these lines to the "
        f"start of your shell: {lines}",
    )
    parser.add("shell", f"one of {', '.join(_SHELLS)}", "SHELL", choices=_SHELLS)


def _run(arguments: argparse.Namespace) -> str:
    try:
        from argcomplete.shell_integration import shellcode
    except ModuleNotFoundError:
        message = f"tab completion needs the package argcomplete: {pip_install('argcomplete')}"
        raise ConfigError(
            [Problem("missing-package", "completion", message, where="command line")]
        ) from None

    code: str = shellcode(["titanlite"], shell=arguments.shell)
    return code.rstrip()


def complete() -> NoReturn:
    """Answer the shell's question in COMP_LINE, and end the process."""
    import argcomplete

    line = os.environ.get("COMP_LINE", "")
    words = line[: int(os.environ.get("COMP_POINT", len(line)))].split()
    if not line.endswith(" "):  # the last word is the one to complete
        words = words[:-1]
    command = next((word for word in words[1:] if word in COMMANDS), None)
    parser = _names_only() if command is None else make_parser(command)
    for one in _all_parsers(parser):
        _prepare(one)
    argcomplete.autocomplete(parser, always_complete_options=False)
    raise SystemExit(1)  # `autocomplete` ends the process


def _names_only() -> Parser:
    """Return a parser that knows the names of the commands alone: to import all of them takes
    longer.
    """
    parser = top_parser()
    commands = parser.add_subparsers()
    for name in COMMANDS:
        commands.add_parser(name)
    return parser


def _all_parsers(parser: Parser) -> Iterator[Parser]:
    yield parser
    for below in parser.commands().values():
        yield from _all_parsers(below)


def _prepare(parser: Parser) -> None:
    """Give a parser the keys of the config, and completers for its words."""
    parser.in_order = True
    if parser.takes_keys:
        for key in keys().values():
            _add_key(parser, key)
    for action in parser._actions:
        if action.metavar in ("CONFIG", "FILE", "KEY|FILE"):
            _set_completer(action, _config_files)
        elif action.metavar == "COMMAND" and not action.choices:
            _set_completer(action, lambda prefix, **_: list(COMMANDS))
    if parser.prog.endswith("config explain"):
        _set_completer(parser._get_positional_actions()[0], _keys_and_files)


def _add_key(parser: Parser, key: Key) -> None:
    flag = f"--{key.name}"
    if flag in parser._option_string_actions:
        return
    options: dict[str, Any] = {"dest": key.name, "help": key.description.replace("%", "%%")}
    if bool in members(key.type):
        parser.add_argument(flag, nargs="?", choices=["true", "false"], **options)
        parser.add_argument(f"--no-{key.name}", action="store_true", **options)
        return
    known = [str(choice) for choice in choices(key.type)]
    action = parser.add_argument(flag, **options)
    if known:
        _set_completer(action, lambda prefix, **_: known)
    elif key.name == "job.config_file":
        _set_completer(action, _config_files)


def _set_completer(action: argparse.Action, completer: Any) -> None:
    action.completer = completer  # type: ignore[attr-defined]  # argcomplete looks for it there


def _config_files(prefix: str, **_: Any) -> list[str]:
    """Return TOML files and folders that begin with `prefix`, and the configs that come with
    titanlite.
    """
    from argcomplete.completers import FilesCompleter

    shipped = {file.name for folder in config_folders() for file in folder.glob("*.toml")}
    return [*FilesCompleter(["toml"])(prefix), *sorted(shipped)]


def _keys_and_files(prefix: str, **_: Any) -> list[str]:
    return [*sections(), *keys(), *_config_files(prefix)]
