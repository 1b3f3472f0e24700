"""Values as they were written, before they are checked: one `Entry` each, from a file or the
command line.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin

from titanlite.config.aliases import ALIASES, is_subsection, known_names, known_sections
from titanlite.config.errors import COMMAND_LINE, Problem, Source
from titanlite.config.key_types import base, choices, members
from titanlite.config.keys import fits, keys, table_of, type_of
from titanlite.config.toml import TOMLDecodeError, join, loads, quote, quote_key, scan
from titanlite.config.unsupported_keys import OTHER_MODELS, UNSUPPORTED, unsupported_type
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
        if not path:
            return self.source.place
        return replace(self.source, line=self.lines[self.name + path]).place


#: The table of `titanlite sweep`, which is no section of a run.
SWEEP = "sweep"
#: A file with more unknown keys than this, and with more of them than of others, is taken for
#: another trainer's.
_SLIPS = 5


def file_entries(text: str, file: str) -> tuple[list[Entry], list[Problem]]:
    """Return the values of one TOML text, and its mistakes; `file` is its name in messages."""
    try:
        tree = loads(text)
    except TOMLDecodeError as error:
        from titanlite.config.other_files import broken

        return [], [broken(text, file, error)]
    lines = scan(text)
    model = tree.get("model")
    if isinstance(model, dict) and str(model.get("name")) in OTHER_MODELS:
        from titanlite.config.other_files import other_model

        return [], [other_model(str(model["name"]), file, lines.get("model.name"))]
    found = _FileEntries(file, lines)
    for name, value in tree.items():
        found.add(quote_key(name), value, is_top=True)
    if found.strange > max(len(found.entries), _SLIPS):
        count = found.strange + len(found.entries)
        message = (
            f"is no file of titanlite or torchtitan: {found.strange} of its {count} keys are "
            "unknown"
        )
        hint = "rewrite it with the keys that `titanlite config explain` lists"
        found.problems.insert(0, Problem("other-trainer", "", message, hint, f"{file}:1"))
    return found.entries, found.problems


class _FileEntries:
    """Collects the values of one file and its unknown keys."""

    def __init__(self, file: str, lines: Mapping[str, int]) -> None:
        self.file = file
        self.lines = lines
        self.entries: list[Entry] = []
        self.problems: list[Problem] = []
        #: Unknown keys, those within an unknown section one by one.
        self.strange = 0

    def add(self, name: str, value: Any, is_top: bool = False) -> None:
        """Add a value, or all values of a section. is_top: it is in no section."""
        source = Source("file", self.file, self.lines.get(name), name)
        is_table = isinstance(value, dict)
        if is_top and is_table and name == SWEEP:
            self.entries.append(Entry(name, value, source, self.lines))
        elif is_table and is_subsection(name):
            for part, item in value.items():
                self.add(join(name, part), item)
        elif name in known_names() or table_of(name):
            self.entries.append(Entry(name, value, source, self.lines))
        elif name in known_sections() or (is_top and name == SWEEP):
            message = f"is a section, not a value; got {quote(value)}"
            meant = [key for key in keys() if key.endswith(f".{name}")]
            hint = f"the key is {' or '.join(meant)}" if meant else ""
            self.problems.append(Problem("wrong-type", name, message, hint, source.place))
        else:
            from titanlite.config.unknown_keys import unknown, unknown_section

            self.strange += len(value) if is_table else 1
            if is_table and is_top:
                self.problems.append(unknown_section(name, source))
            else:
                self.problems.append(unknown(name, source))


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
    if name is None:
        return 1
    type_ = type_of_name(name)
    kinds = [base(member) for member in members(type_)]
    if any(get_origin(kind) is list for kind in kinds):
        files = [place for place, word in enumerate(words) if word.endswith(".toml")]
        return files[0] if files else len(words)
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
    for flag, words in _flags(argv):
        if flag is None:
            message = f"unexpected word {quote(words[0])}"
            problems.append(Problem("bad-flag", "", message, _FORM, "command line"))
            continue
        found = _flag_values(flag, words)
        if isinstance(found, Problem):
            problems.append(found)
            continue
        for name, value in found.items():
            # The place of the last one counts.
            entries.pop(name, None)
            entries[name] = Entry(name, value, Source("command line", written=name))
    return list(entries.values()), problems


def _flags(argv: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Yield each flag, without its dashes, and its words; None with a word that belongs to none."""
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not begins_option(word) or word == "--":
            yield None, [word]
            continue
        flag, equals, attached = word[2:].partition("=")
        words = [attached] if equals else []
        while not equals and position < len(argv) and not begins_option(argv[position]):
            words.append(argv[position])
            position += 1
        yield flag, words


def _flag_values(flag: str, words: list[str]) -> dict[str, Any] | Problem:
    """Return the value of a flag by its name, or its problem.

    A table gives the values of its entries.
    """
    name, negated = _flag_name(flag)
    if name is None:
        from titanlite.config.unknown_keys import unknown

        return unknown(flag.replace("-", "_"), COMMAND_LINE)
    table = table_of(name)
    if table and not _is_one_name(name[len(table) + 1 :]):
        message = f"names no entry of {table}"
        hint = f"the form is --{table}.NAME VALUE; a table in it is one value, as '{{factor = 8}}'"
        return Problem("bad-flag", f"--{flag}", message, hint, "command line")
    try:
        if negated:
            value: Any = _negative(name, words)
        else:
            value = _read(type_of_name(name), words, name not in _WITH_COMMAS)
    except _BadWords as error:
        return Problem("bad-flag", f"--{flag}", str(error), where="command line")
    if name in keys() and keys()[name].is_table and isinstance(value, dict):
        return {f"{name}.{quote_key(entry)}": item for entry, item in value.items()}
    return {name: value}


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
    tries = [
        (flag, False),
        (plain, False),
        (plain.removeprefix("no_"), True),
        (f"{section}.{last.removeprefix('no_')}", True),
    ]
    for name, negated in tries:
        if name in known_names() or table_of(name):
            return name, negated
    return None, False


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
    lists = [kind for kind in map(base, members(type_)) if get_origin(kind) is list]
    is_choice = len(words) == 1 and words[0] in choices(type_)
    if lists and not is_choice:
        return _read_list(lists[0], words, has_commas)
    if not words and bool in members(type_):
        return True
    if not words:
        raise _BadWords("needs a value")
    if len(words) > 1:
        raise _BadWords(f"takes one value, got {quote(words)}")
    return _read_one(type_, words[0])


def _read_list(type_: Any, words: list[str], has_commas: bool) -> Any:
    if len(words) == 1 and words[0].lstrip().startswith("["):
        return _read_one(type_, words[0])
    (item,) = get_args(type_)
    items = []
    for word in words:
        parts = [word]
        if has_commas:
            parts = word.split(",")
        for part in parts:
            part = part.strip()
            if part:
                items.append(_read_one(item, part))
    return items


def _read_one(type_: Any, text: str) -> Any:
    """Return the first reading of a word that fits the type.

    A word without one is left to the check to refuse.
    """
    if type(None) in members(type_) and _means_none(type_, text):
        return None
    readings = _readings(text)
    # A text keeps its quotes, unless any value will do.
    if type_ is not Any:
        readings = [value for value in readings if not isinstance(value, str)]
    for value in [*readings, text]:
        if fits(type_, value):
            return value
    return readings[0] if readings else text


def _means_none(type_: Any, text: str) -> bool:
    """Return whether a word stands for no value. SageMaker hands on null as an empty word."""
    if text.lower() == "none":
        return "none" not in choices(type_)
    return not text and not fits(type_, text)


def _readings(text: str) -> list[Any]:
    """Return a word as each kind of value that it can be, the likeliest first."""
    readings: list[Any] = []
    if text.lower() in ("true", "false"):
        readings.append(text.lower() == "true")
    for read in (_literal, _json, _python, int, float):
        try:
            readings.append(read(text))
        except ValueError:
            continue
    return readings


def _python(text: str) -> Any:
    """Return a list or a dict as Python prints it, and so SageMaker's toolkit. Raises
    ValueError.
    """
    if not text.lstrip().startswith(("[", "{")):
        raise ValueError
    try:
        # JSON turns tuples into lists, and refuses sets.
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
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
