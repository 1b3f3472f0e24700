"""Values as they were written, before they are checked: one `Entry` each, from a file or the
command line.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, get_args, get_origin

from titanlite.config.aliases import ALIASES
from titanlite.config.errors import COMMAND_LINE, Problem, Source, nearest, nearest_key
from titanlite.config.keys import base, choices, fits, keys, members, sections, table_of, type_of
from titanlite.config.toml import TOMLDecodeError, join, loads, quote, quote_key, scan
from titanlite.config.unsupported_keys import OTHER_TRAINERS, UNSUPPORTED, unsupported_type
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
        """Return `file:line` of a path inside the value (`[1].weight`), or of the nearest thing
        around it.
        """
        while path and self.name + path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["))]
        return (
            replace(self.source, line=self.lines[self.name + path]).place
            if path
            else self.source.place
        )


@cache
def known_names() -> frozenset[str]:
    """Return every name that can be written: keys, other names, unsupported keys."""
    return frozenset([*keys(), *ALIASES, *UNSUPPORTED])


@cache
def known_sections() -> frozenset[str]:
    """Return every section and subsection that holds a known name."""
    parts = [name.split(".") for name in known_names()]
    return frozenset(".".join(p[:depth]) for p in parts for depth in range(1, len(p)))


def is_subsection(name: str) -> bool:
    """Return whether the entries of a table under this name are values of their own."""
    return (name in keys() and keys()[name].is_table) or (
        name in known_sections() and name not in known_names()
    )


#: A file with more unknown keys than this, and with more of them than of others, is taken for
#: another trainer's.
_SLIPS = 5


def file_entries(text: str, file: str) -> tuple[list[Entry], list[Problem]]:
    """Return the values of one TOML text, and its mistakes; `file` is its name in messages."""
    try:
        tree = loads(text)
    except TOMLDecodeError as error:
        return [], [Problem(file, "", f"broken TOML: {error}", code="broken-toml")]
    _, lines = scan(text)
    entries: list[Entry] = []
    problems: list[Problem] = []
    strange = 0

    def visit(name: str, value: Any) -> None:
        nonlocal strange
        source = Source("file", file, lines.get(name), name)
        if isinstance(value, dict) and is_subsection(name):
            for part, item in value.items():
                visit(join(name, part), item)
        elif name in known_names() or table_of(name):
            entries.append(Entry(name, value, source, lines))
        elif name in known_sections():
            message = f"is a section, not a value; got {quote(value)}"
            problems.append(Problem(source.place, name, message, code="wrong-type"))
        else:
            strange += len(value) if isinstance(value, dict) else 1
            is_section = isinstance(value, dict) and name in map(quote_key, tree)
            problems.append(unknown(name, source, is_section))

    for part, item in tree.items():
        visit(quote_key(part), item)
    if strange > max(len(entries), _SLIPS):
        message = (
            f"is no file of titanlite or torchtitan: {strange} of its {strange + len(entries)} "
            "keys are unknown"
        )
        hint = "rewrite it with the keys that `titanlite config explain` lists"
        problems.insert(0, Problem(f"{file}:1", "", message, hint, code="other-trainer"))
    return entries, problems


def unknown(name: str, source: Source, is_section: bool = False) -> Problem:
    """Return the problem of an unknown key or section, with the nearest one or the place where the
    key lives.
    """
    section, _, last = name.rpartition(".")
    here = {
        known.rpartition(".")[2]: known
        for known in known_names()
        if known.rpartition(".")[0] == section
    }
    same_name = sorted(
        known for known in known_names() - UNSUPPORTED.keys() if known.rpartition(".")[2] == last
    )
    if is_section:
        alike = nearest(name, [known for known in known_sections() if "." not in known])
        hint = f"nearest section: [{alike[0]}]" if alike else f"sections: {', '.join(sections())}"
        return Problem(source.place, f"[{name}]", "unknown section", hint, code="unknown-section")
    if name in OTHER_TRAINERS:
        hint = f"here this is {OTHER_TRAINERS[name]}"
    elif same_name:
        hint = (
            f"{last} belongs to another section: "
            f"{next(filter(keys().__contains__, same_name), same_name[0])}"
        )
    elif last in OTHER_TRAINERS:
        hint = f"here this is {OTHER_TRAINERS[last]}"
    elif close := nearest_key(name, known_names()) or _in_like_section(name):
        hint = f"nearest: {close}"
    else:
        hint = (
            f"keys of [{section}]: {', '.join(sorted(here))}"
            if here
            else "`titanlite config explain` lists the keys"
        )
    if section and section not in known_sections():
        return Problem(
            source.place, name, f"unknown section [{section}]", hint, code="unknown-section"
        )
    message = "unknown key" if section else "unknown key outside any section"
    return Problem(source.place, name, message, hint, code="unknown-key")


def _in_like_section(name: str) -> str:
    """Return the key of a section that looks like an unknown one, or that section; "": none
    does.
    """
    section = name.rpartition(".")[0]
    if section not in known_sections():
        return "".join(nearest(name, known_names()))
    return "".join(
        nearest(name, [one for one in known_sections() if one.startswith(f"{section}.")])
    )


def begins_option(word: str) -> bool:
    """Return whether a word of a command line begins an option. Other words, as `-1`, are
    values.
    """
    return word.startswith("--") or word == "-h"


def names_key(option: str) -> bool:
    """Return whether an option is a `--section.key` flag, right or wrong, and none of the command's
    own.
    """
    name = option.removeprefix("--").partition("=")[0]
    return "." in name or name in _CONFIG_FILE


def value_words(flag: str, words: Sequence[str]) -> int:
    """Return how many of the words behind a `--section.key` flag are its value.

    words: those up to the next option. A switch takes a truth value, and a list all words up to the
    name of a TOML file. Any other key, also an unknown one, takes one word. A negated flag and one
    with `=` take none.
    """
    option, equals, _ = flag.removeprefix("--").partition("=")
    name, negated = _flag_name(option)
    if equals or negated or not words:
        return 0
    if name == "job.config_file":
        return len(words)
    type_ = Any if name is None else type_of_name(name)
    kinds = [base(member) for member in members(type_)]
    if any(get_origin(kind) is list for kind in kinds):
        files = (place for place, word in enumerate(words) if word.endswith(".toml"))
        return next(files, len(words))
    if bool in kinds:
        is_value = words[0].lower() in _TRUTH_VALUES or words[0] in choices(type_)
        return 1 if is_value else 0
    return 1


#: Words behind a switch that are meant as its value, right or wrong.
_TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0", "none")
_CONFIG_FILE = ("config_file", "config-file")
#: Lists whose items may hold commas: each word is one item.
_WITH_COMMAS = ("job.config_file", "sample.prompts")
_FORM = "flags are --section.key value; lists are a,b"


class _BadWords(ValueError):
    """The words after a flag do not make one value."""


def command_line_entries(argv: Sequence[str]) -> tuple[list[Entry], list[Problem]]:
    """Return the values of `--section.key value`, `--section.key=value`, `--no-section.key` and
    `--section.no_key`.

    A flag given twice: the last one wins.
    """
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not begins_option(word) or word == "--":
            problems.append(
                Problem(
                    "command line", "", f"unexpected word {quote(word)}", _FORM, code="bad-flag"
                )
            )
            continue
        flag, equals, attached = word[2:].partition("=")
        words = [attached] if equals else []
        while not equals and position < len(argv) and not begins_option(argv[position]):
            words.append(argv[position])
            position += 1
        name, negated = _flag_name(flag)
        if name is None:
            problems.append(unknown(flag.replace("-", "_"), COMMAND_LINE))
            continue
        if (table := table_of(name)) and not _is_one_name(name[len(table) + 1 :]):
            message = f"names no entry of {table}"
            hint = (
                f"the form is --{table}.NAME VALUE; a table in it is one value, as '{{factor = 8}}'"
            )
            problems.append(Problem("command line", f"--{flag}", message, hint, code="bad-flag"))
            continue
        try:
            value = (
                _negative(name, words)
                if negated
                else _read(type_of_name(name), words, name not in _WITH_COMMAS)
            )
        except _BadWords as error:
            problems.append(Problem("command line", f"--{flag}", str(error), code="bad-flag"))
            continue
        given = {name: value}
        if name in keys() and keys()[name].is_table:
            if isinstance(value, str):
                value = _table_of_pairs(name, value)
            if isinstance(value, dict):  # as good as a flag for each of its entries
                given = {f"{name}.{quote_key(k)}": v for k, v in value.items()}
        for written, item in given.items():
            entries.pop(written, None)
            entries[written] = Entry(written, item, Source("command line", written=written))
    return list(entries.values()), problems


def _is_one_name(text: str) -> bool:
    """Return whether a text is the name of one entry, as TOML writes it.

    `a.b` would be an entry of a table in it.
    """
    try:
        return [*loads(f"{text} = 0").values()] == [0]
    except TOMLDecodeError:
        return False


def _flag_name(flag: str) -> tuple[str | None, bool]:
    """Return the name in a flag, and whether it is negated; None for an unknown one."""
    if flag in _CONFIG_FILE:
        return "job.config_file", False
    plain = flag.replace("-", "_")
    section, _, last = plain.rpartition(".")
    tries = [(flag, False), (plain, False), (plain.removeprefix("no_"), True)]
    tries.append((f"{section}.{last.removeprefix('no_')}", True))
    return next(
        ((name, no) for name, no in tries if name in known_names() or table_of(name)), (None, False)
    )


def type_of_name(name: str) -> Any:
    """Return the type of a value under any known name."""
    if name in UNSUPPORTED:
        return unsupported_type(name)
    return ALIASES[name].type if name in ALIASES else type_of(name)


def _negative(name: str, words: list[str]) -> bool:
    if bool not in members(type_of_name(name)):
        raise _BadWords(f"{name} is not a switch and cannot be negated")
    if words:
        raise _BadWords(f"takes no value, got {quote(' '.join(words))}")
    return False


def _read(type_: Any, words: list[str], has_commas: bool) -> Any:
    """Return the value that the words after a flag make.

    has_commas: lists are split at commas, too.
    """
    lists = [part for part in map(base, members(type_)) if get_origin(part) is list]
    if lists and not (len(words) == 1 and words[0] in choices(type_)):
        if len(words) == 1 and words[0].lstrip().startswith("["):
            return _read_one(lists[0], words[0])
        (item,) = get_args(lists[0])
        parts = [
            part.strip() for word in words for part in (word.split(",") if has_commas else [word])
        ]
        return [_read_one(item, part) for part in parts if part]
    if not words and bool in members(type_):
        return True
    if len(words) != 1:
        raise _BadWords(f"takes one value, got {quote(words)}" if words else "needs a value")
    return _read_one(type_, words[0])


def _read_one(type_: Any, text: str) -> Any:
    """Return the first reading of a word that fits the type.

    A word without one is left to the check to refuse.
    """
    unset = text.lower() == "none" and "none" not in choices(type_)
    if type(None) in members(type_) and (
        unset or not (text or fits(type_, text))
    ):  # "": null as a hyperparameter
        return None
    readings: list[Any] = [text.lower() == "true"] if text.lower() in ("true", "false") else []
    for read in (_literal, _json, _python, int, float):
        try:
            readings.append(read(text))
        except ValueError:
            continue
    if type_ is not Any:  # quotes of a text are part of it
        readings = [value for value in readings if not isinstance(value, str)]
    return next(
        (value for value in [*readings, text] if fits(type_, value)),
        readings[0] if readings else text,
    )


#: The name before a value of `_table_of_pairs`.
_PAIR_NAME = re.compile(r"\s*([A-Za-z_][\w-]*)=")
_DEPTHS = {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}


def _table_of_pairs(table: str, text: str) -> Any:
    """Return the table that SageMaker's toolkit writes as `dim=64,n_heads=4`; the text itself if it
    has another form.

    A comma divides two entries if a name and `=` follow it outside of brackets. An empty table is
    an empty text.
    """
    depth, starts = 0, [0]
    for position, character in enumerate(text):
        depth += _DEPTHS.get(character, 0)
        if character == "," and depth == 0 and _PAIR_NAME.match(text, position + 1):
            starts.append(position + 1)
    entries: dict[str, Any] = {}
    for start, stop in zip(starts, [*(start - 1 for start in starts[1:]), len(text)], strict=True):
        name = _PAIR_NAME.match(text, start, stop)
        if name is None:
            return text if text.strip() else {}
        entries[name[1]] = _read_one(type_of(f"{table}.{name[1]}"), text[name.end() : stop])
    return entries


def _python(text: str) -> Any:
    """Return a list or a dict as Python prints it, and so SageMaker's toolkit. Raises
    ValueError.
    """
    if not text.lstrip().startswith(("[", "{")):
        raise ValueError
    try:
        return json.loads(json.dumps(ast.literal_eval(text.strip())))  # without tuples and sets
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError from error


def _json(text: str) -> Any:
    """Return a list or an object as JSON writes it. Raises ValueError: `null` may be a text."""
    if not text.lstrip().startswith(("[", "{")):
        raise ValueError
    return parse_json(text)


def _literal(text: str) -> Any:
    """Return the text as one TOML value. Raises ValueError."""
    tree = loads(f"value = {text}")
    if set(tree) != {"value"}:
        raise ValueError
    return tree["value"]
