"""The entries of `eval.tasks`: files of one's own, and names of lm-evaluation-harness. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from titanlite.config.errors import Problem
from titanlite.data.kinds import ending_of

KEY = "eval.tasks"
#: The harness's package, and what its own names may not hold: they become tags of figures.
HARNESS = "lm_eval"
_NO_FILE = re.compile(r"[\w-]+([.+][\w-]+)*")


def is_file(entry: str) -> bool:
    """Whether an entry names a file of one's own: it has a slash, or the end of a kind of text."""
    return "/" in entry or bool(ending_of(entry))


def name_of(entry: str) -> str:
    """Return the name of an entry's figures: of a file its name without folder and end."""
    if not is_file(entry):
        return entry
    name = Path(entry).name
    return name[: len(name) - len(ending_of(name))] or name


def harness_names(entries: Sequence[str]) -> list[str]:
    """Return the entries that the harness knows."""
    return [entry for entry in entries if not is_file(entry)]


def entry_problems(entries: Sequence[str], key: str = KEY) -> Iterator[Problem]:
    """Find entries that cannot be told apart, and words that are no name of a task."""
    for entry in harness_names(entries):
        if not _NO_FILE.fullmatch(entry):
            message = f"{entry!r} is no name of a task, and no file: it has no slash and no end"
            yield Problem("unknown-value", key, message, "write a file as ./held-out.txt")
    for name, count in Counter(map(name_of, entries)).items():
        if count > 1:
            message = f"has {count} entries named {name!r}, whose figures would get the same name"
            yield Problem("conflict", key, message, "rename a file, or leave an entry out")
