"""Where a value came from, and what is wrong with a config: all of it at once."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from titanlite import exit_codes

#: Letters of a key that are printed, and compared with known ones (in a time by their square).
_LONGEST = 100


@dataclass(frozen=True)
class Source:
    """Where a value was written."""

    kind: Literal["default", "dialect", "file", "command line"]
    #: The file as the user would name it, and the line, counted from 1.
    file: str | None = None
    line: int | None = None
    #: The name it was written under.
    written: str = ""
    #: Environment variables in the value as it was written.
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "dialect":
            return f'default of dialect "2026" ({self.place})'
        if not self.variables:
            return self.place
        variables = ", ".join(f"${{{name}}}" for name in self.variables)
        return f"{self.place} with {variables}"

    @property
    def place(self) -> str:
        """`file:line`, or the kind where there is no file."""
        if self.file is None:
            return self.kind
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}"


DEFAULT = Source("default")
COMMAND_LINE = Source("command line")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    #: A short name of the kind of problem that stays the same when the words change; docs/config.md
    #: lists them.
    code: str
    #: The key as it was written.
    key: str
    message: str
    #: The remedy.
    remedy: str = ""
    #: `file:line`, `command line`, or empty where no single place is to blame.
    where: str = ""

    def __str__(self) -> str:
        key = self.key if len(self.key) <= _LONGEST else f"{self.key[:_LONGEST]}…"
        text = ": ".join(part for part in (self.where, key) if part)
        if text:
            text += ": "
        text += self.message
        if self.remedy:
            text += f"\n    {self.remedy}"
        return text


class ConfigError(ValueError):
    """Everything that is wrong with a config. `str()` of it is the report for the user."""

    exit_code = exit_codes.CONFIG

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: Sequence[Problem] = tuple(sorted(dict.fromkeys(problems), key=_by_place))
        count = len(self.problems)
        place = "on the command line"
        for problem in self.problems:
            names_key = "." in problem.key
            if names_key or problem.where != "command line":
                place = "in the config"
        lines = [f"{count} problems {place}:"]
        if count == 1:
            lines = [f"1 problem {place}:"]
        for problem in self.problems:
            lines.append("  " + str(problem).replace("\n", "\n  "))
        super().__init__("\n".join(lines))


def refuse(problems: Collection[Problem]) -> None:
    """Raise ConfigError for problems, if there are any."""
    if problems:
        raise ConfigError(problems)


def unfit(key: str, message: str, remedy: str = "", code: str = "does-not-fit") -> ConfigError:
    """Return the error of one value for which no single place is to blame."""
    return ConfigError([Problem(code, key, message, remedy)])


def bad_flag(key: str, message: str, remedy: str = "") -> ConfigError:
    """Return the error of a wrong word of a command line."""
    return ConfigError([Problem("bad-flag", key, message, remedy, "command line")])


def _by_place(problem: Problem) -> tuple[bool, str, int]:
    """Sort by file and line, then the command line, then what has no place."""
    file, _, line = problem.where.rpartition(":")
    if line.isdigit():
        return not file, file, int(line)
    if problem.where:
        return True, "", 0
    return True, "~", 0


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return up to `count` known words like `word`, the most similar first, in any case."""
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(word.lower()[:_LONGEST], list(by_lower), n=count, cutoff=0.6)
    return [by_lower[one] for one in close]
