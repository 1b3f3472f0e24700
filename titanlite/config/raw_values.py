"""Values as they were written, before they are checked: one `Entry` each, from a file or the
command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin

from titanlite.config.aliases import (
    VALUES,
    is_known,
    is_subsection,
    key_of,
    known_sections,
    learn,
    refusal,
    type_of_name,
)
from titanlite.config.errors import COMMAND_LINE, Problem, Source
from titanlite.config.key_types import base, choices, members
from titanlite.config.keys import fits, keys, tables
from titanlite.config.toml import TOMLDecodeError, join, loads, quote, quote_key, scan
from titanlite.utils import parse_json


@dataclass(frozen=True)
class Entry:
    """One value under the name it was written with."""

    name: str
    value: Any
    source: Source
    #: Lines of all names in the file.
    lines: Mapping[str, int] = field(default_factory=dict)
    #: The value before its environment variables were replaced; None: it has none.
    raw: Any = None

    def place(self, path: str) -> str:
        """Return `file:line` of a path inside the value (`[1].weight`), or of the nearest around
        it.
        """
        while path and self.name + path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["))]
        if not path:
            return self.source.place
        return replace(self.source, line=self.lines[self.name + path]).place


#: The table of `titanlite sweep`, which is no section of a run.
SWEEP = "sweep"


def file_entries(text: str, file: str) -> tuple[list[Entry], list[Problem]]:
    """Return the values of a TOML text, and its mistakes. file: its name in messages."""
    try:
        tree = loads(text)
    except TOMLDecodeError as error:
        hint = ""
        if file.endswith(".py"):
            hint = (
                "a config is a TOML file; docs/from-torchtitan.md has the fields of torchtitan's "
                "Python configs"
            )
        return [], [Problem("broken-toml", "", f"broken TOML: {error}", hint, file)]
    lines = scan(text)
    model = tree.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if reason := refusal("model.name", name):
        # All else in the file is for that model.
        place = Source("file", file, lines.get("model.name")).place
        message = f"{quote(name)} is not supported: {reason}"
        return [], [Problem("unsupported", "model.name", message, where=place)]
    found = _FileEntries(file, lines)
    for name, value in tree.items():
        learn(name)
        found.add(quote_key(name), value, is_top=True)
    return found.entries, found.problems


class _FileEntries:
    def __init__(self, file: str, lines: Mapping[str, int]) -> None:
        self.file = file
        self.lines = lines
        self.entries: list[Entry] = []
        self.problems: list[Problem] = []

    def add(self, name: str, value: Any, is_top: bool = False) -> None:
        """is_top: the value is in no section."""
        source = Source("file", self.file, self.lines.get(name), name)
        is_table = isinstance(value, dict)
        if is_table and is_subsection(name):
            for part, item in value.items():
                self.add(join(name, part), item)
        elif is_known(name) or (is_table and is_top and name == SWEEP):
            self.entries.append(Entry(name, value, source, self.lines))
        elif name in known_sections() or (is_top and name == SWEEP):
            message = f"is a section, not a value; got {quote(value)}"
            meant = [key for key in keys() if key.endswith(f".{name}")]
            hint = f"the key is {' or '.join(meant)}" if meant else ""
            self.problems.append(Problem("wrong-type", name, message, hint, source.place))
        else:
            from titanlite.config.unknown_keys import unknown, unknown_section

            problem = unknown_section if is_table and is_top else unknown
            self.problems.append(problem(name, source))


def begins_option(word: str) -> bool:
    """Return whether a word begins an option; words as `-1` are values."""
    return word.startswith("--") or word == "-h"


CONFIG_FILE = ("config_file", "config-file")
#: Lists whose items may hold commas: each word is one item.
_WITH_COMMAS = ("job.config_file",)


class _BadWords(ValueError):
    """The words after a flag do not make one value."""


def command_line_entries(argv: Sequence[str]) -> tuple[list[Entry], list[Problem]]:
    """Return the values of `--section.key value`, `--section.key=value`, `--no-section.key` and
    `--section.no_key`.

    If a flag is given twice, the last one wins.
    """
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for flag, words in _flags(argv):
        name, negated = flag_name(flag)
        if name is None and flag:
            from titanlite.config.unknown_keys import unknown

            problems.append(unknown(flag.replace("-", "_"), COMMAND_LINE))
            continue
        try:
            found = _values(name, words, negated)
        except _BadWords as error:
            hint = "" if flag else "flags are --section.key value; lists are a,b"
            key = f"--{flag}" if flag else ""
            problems.append(Problem("bad-flag", key, str(error), hint, "command line"))
            continue
        for one, value in found.items():
            # The place of the last one counts.
            entries.pop(one, None)
            entries[one] = Entry(one, value, Source("command line", written=one))
    return list(entries.values()), problems


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag and its words; "" with a word that belongs to none."""
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not begins_option(word) or word == "--":
            yield "", [word]
            continue
        flag, equals, attached = word[2:].partition("=")
        words = [attached] if equals else []
        while not equals and position < len(argv) and not begins_option(argv[position]):
            words.append(argv[position])
            position += 1
        yield flag, words


def flag_name(flag: str) -> tuple[str | None, bool]:
    """Return the name in a flag, and whether it is negated; None: unknown."""
    if flag in CONFIG_FILE:
        return "job.config_file", False
    plain = flag.replace("-", "_")
    section, _, last = plain.rpartition(".")
    learn(section)
    tries = [
        (flag, False),
        (plain, False),
        (plain.removeprefix("no_"), True),
        (f"{section}.{last.removeprefix('no_')}", True),
    ]
    return next(((name, negated) for name, negated in tries if is_known(name)), (None, False))


def _values(name: str | None, words: list[str], negated: bool) -> dict[str, Any]:
    """Return a flag's value by its name, or a table's by entries. Raises _BadWords."""
    if name is None:
        raise _BadWords(f"unexpected word {quote(words[0])}")
    type_ = type_of_name(name)
    lists = [kind for kind in map(base, members(type_)) if get_origin(kind) is list]
    is_switch = bool in members(type_)
    value: Any = not negated
    if negated and not is_switch:
        raise _BadWords(f"{name} is not a switch and cannot be negated")
    if negated and words:
        raise _BadWords(f"takes no value, got {quote(' '.join(words))}")
    choice = len(words) == 1 and words[0] in (*choices(type_), *VALUES.get(key_of(name), {}))
    if lists and not negated and not choice:
        value = _list(lists[0], words, name not in _WITH_COMMAS)
    elif len(words) == 1:
        value = _one(type_, words[0])
    elif words:
        raise _BadWords(f"takes one value, got {quote(words)}")
    elif not is_switch:
        raise _BadWords("needs a value")
    if name in tables() and isinstance(value, dict):
        return {f"{name}.{quote_key(entry)}": item for entry, item in value.items()}
    return {name: value}


def _list(type_: Any, words: list[str], has_commas: bool) -> Any:
    """has_commas: words are split at commas, too."""
    if len(words) == 1 and words[0].lstrip().startswith("["):
        return _one(type_, words[0])
    (item,) = get_args(type_)
    parts = [part.strip() for word in words for part in (word.split(",") if has_commas else [word])]
    return [_one(item, part) for part in parts if part]


def _one(type_: Any, text: str) -> Any:
    """Return the first reading that fits; a word without one is checked later."""
    # SageMaker hands on null as an empty word.
    is_none = text.lower() == "none" or (not text and not fits(type_, text))
    if is_none and type(None) in members(type_) and "none" not in choices(type_):
        return None
    readings: list[Any] = [text.lower() == "true"] if text.lower() in ("true", "false") else []
    for read in (_literal, _json, float):
        try:
            readings.append(read(text))
        except ValueError:
            continue
    # A text keeps its quotes, unless any value will do.
    if type_ is not Any:
        readings = [value for value in readings if not isinstance(value, str)]
    fitting = [value for value in [*readings, text] if fits(type_, value)]
    return [*fitting, *readings, text][0]


def _json(text: str) -> Any:
    """Raises ValueError for others than lists and objects: `null` may be a text."""
    if not text.lstrip().startswith(("[", "{")):
        raise ValueError
    return parse_json(text)


def _literal(text: str) -> Any:
    tree = loads(f"value = {text}")
    if set(tree) != {"value"}:
        raise ValueError
    return tree["value"]
