"""Values as they were written, before they are checked: one `Entry` each, from a file or the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

from titanlite.config import foreign
from titanlite.config.errors import COMMAND_LINE, Problem, Source, nearest
from titanlite.config.foreign import FOREIGN
from titanlite.config.names import ALIASES, ELSEWHERE, annotation_of
from titanlite.config.scan import TOMLDecodeError, key_lines, loads
from titanlite.config.schema import base, inner_path, keys, members, quote, quote_key, sections


@dataclass(frozen=True)
class Entry:
    """One value under the name it was written with."""

    name: str
    value: Any
    source: Source
    #: Lines of what lies inside a table or an array of tables, by path: `[1].weight`.
    inner: Mapping[str, int] = field(default_factory=dict)

    def place(self, path: str) -> str:
        """`file:line` of what lies at a path inside the value, or of the nearest thing around it."""
        line = self.inner.get(path)
        if line is None:
            line = next((n for p, n in self.inner.items() if path and p.startswith(path.rpartition(".")[0])), None)
        return self.source.place if line is None else f"{self.source.file}:{line}"


@lru_cache(maxsize=1)
def known_names() -> frozenset[str]:
    """Every name that can be written: keys, other names, keys of others."""
    return frozenset([*keys(), *ALIASES, *FOREIGN])


@lru_cache(maxsize=1)
def known_sections() -> frozenset[str]:
    """Every section and subsection that holds a known name."""
    parts = [name.split(".") for name in known_names()]
    return frozenset(".".join(p[:depth]) for p in parts for depth in range(1, len(p)))


def table_of(name: str) -> str | None:
    """The free table that a dotted name lies in: `model.overrides` for `model.overrides.n_layers`."""
    parts = name.split(".")
    table = ".".join(parts[:2])
    return table if len(parts) > 2 and table in keys() and keys()[table].is_table else None


def file_entries(text: str, file: str) -> tuple[list[Entry], list[Problem]]:
    """The values of one TOML text; `file` is what messages call it."""
    try:
        tree = loads(text)
    except TOMLDecodeError as error:
        return [], [Problem(file, "", f"broken TOML: {error}", about=("job.config_file",))]
    if other := foreign.trainer_of(tree):
        trainer, marks = other
        message = f"is a file of {trainer}, not of titanlite or torchtitan: it has {', '.join(marks)}"
        return [], [Problem(file, "", message, _REWRITE, about=("job.config_file",))]
    lines = key_lines(text)
    entries: list[Entry] = []
    problems: list[Problem] = []
    strange = 0

    def visit(path: tuple[str, ...], value: Any) -> None:
        nonlocal strange
        name = ".".join(quote_key(part) for part in path)
        source = Source("file", file, lines.get(path))
        table = len(path) == 2 and name in keys() and keys()[name].is_table
        if isinstance(value, dict) and (table or (name in known_sections() and name not in known_names())):
            for part, item in value.items():
                visit((*path, part), item)
        elif name in known_names() or table_of(name):
            inner = {
                inner_path(p[len(path) :]): n for p, n in lines.items() if len(p) > len(path) and p[: len(path)] == path
            }
            entries.append(Entry(name, value, source, inner))
        elif name in known_sections():
            problems.append(Problem(source.place, name, f"is a section, not a value; got {quote(value)}"))
        else:
            strange += len(value) if isinstance(value, dict) else 1
            problems.append(unknown(name, source, is_section=isinstance(value, dict) and len(path) == 1))

    for part, item in tree.items():
        visit((part,), item)
    if strange > max(len(entries), _SLIPS):
        message = f"is no file of titanlite or torchtitan: {strange} of its {strange + len(entries)} keys are unknown"
        problems.insert(0, Problem(f"{file}:1", "", message, _REWRITE, about=("job.config_file",)))
    return entries, problems


_SLIPS = 5
"""Unknown keys that a file of this dialect may have, however few others it has."""
_REWRITE = "rewrite it with the keys that `titanlite config explain` lists"


def unknown(name: str, source: Source, is_section: bool = False) -> Problem:
    """An unknown key or section, with the nearest one or the place where the key lives."""
    if is_section:
        top = [s for s in known_sections() if "." not in s]
        close = nearest(name, top, 1)
        hint = f"nearest section: [{close[0]}]" if close else f"sections: {', '.join(sections())}"
        return Problem(source.place, f"[{name}]", "unknown section", hint, tuple(close))
    section, _, field = name.rpartition(".")
    message = "unknown key" if section in known_sections() else "unknown key outside any section"
    if section and section not in known_sections():
        top = [s for s in known_sections() if "." not in s]
        close_section = nearest(section, top)
        message = f"unknown section [{section}]"
        if close_section and f"{close_section[0]}.{field}" in known_names():
            meant = f"{close_section[0]}.{field}"
            return Problem(source.place, name, message, f"nearest: {meant}", _canonical(meant))
    hint, meant_keys = _suggest(section, field)
    return Problem(source.place, name, message, hint, meant_keys)


def _canonical(*names: str) -> tuple[str, ...]:
    """The keys behind names."""
    return tuple(ALIASES[name].canonical if name in ALIASES else name for name in names)


def _suggest(section: str, field: str) -> tuple[str, tuple[str, ...]]:
    """What an unknown key may have meant, in words and as keys."""
    same_name = [known for known in known_names() if known.rpartition(".")[2] == field and known not in FOREIGN]
    if same_name:
        # The dialect's own spelling first, then other names.
        same_name.sort(key=lambda known: (known not in keys(), known))
        return f"{field} belongs to another section: {same_name[0]}", _canonical(same_name[0])
    if field in ELSEWHERE:
        return f"here this is {ELSEWHERE[field]}", tuple(ELSEWHERE[field].split(" and "))
    here = {known.rpartition(".")[2]: known for known in known_names() if known.rpartition(".")[0] == section}
    close = nearest(field, here)
    if close:
        return f"nearest: {here[close[0]]}", _canonical(here[close[0]])
    anywhere = nearest(f"{section}.{field}", known_names()) or [
        known for known in keys() if nearest(field, [known.partition(".")[2]])
    ]
    if anywhere:
        return f"nearest: {anywhere[0]}", _canonical(anywhere[0])
    return (
        f"keys of [{section}]: {', '.join(sorted(here))}" if here else "`titanlite config explain` lists the keys"
    ), ()


def begins_option(word: str) -> bool:
    """Whether a word of a command line begins an option. Other words, as `-1`, are values."""
    return word.startswith("--") or word == "-h"


def names_key(option: str) -> bool:
    """Whether an option is a `--section.key` flag, right or wrong, and none of the command's own."""
    name = option.removeprefix("--").partition("=")[0]
    return "." in name or name in _CONFIG_FILE


def command_line_entries(argv: Sequence[str]) -> tuple[list[Entry], list[Problem]]:
    """The values of `--section.key value`, `--section.key=value`, `--no-section.key` and `--section.no_key`.

    A flag given twice: the last one wins.
    """
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not begins_option(word) or word == "--":
            problems.append(Problem("command line", "", f"unexpected word {quote(word)}", _FORM))
            continue
        flag, equals, attached = word[2:].partition("=")
        words = [attached] if equals else []
        if not equals:
            while position < len(argv) and not begins_option(argv[position]):
                words.append(argv[position])
                position += 1
        name, negated = _flag_name(flag)
        if name is None:
            problems.append(unknown(flag.replace("-", "_"), COMMAND_LINE))
            continue
        try:
            value = _negative(name, words) if negated else _read(_annotation(name), words)
        except _BadWords as error:
            problems.append(Problem("command line", f"--{flag}", str(error), about=_canonical(name)))
            continue
        # A table given as one word is as good as a flag for each of its entries.
        given = {name: value}
        if isinstance(value, dict) and name in keys() and keys()[name].is_table:
            given = {f"{name}.{quote_key(k)}": v for k, v in value.items()}
        for written, item in given.items():
            entries.pop(written, None)
            entries[written] = Entry(written, item, COMMAND_LINE)
    return list(entries.values()), problems


_CONFIG_FILE = ("config_file", "config-file")
_FORM = "flags are --section.key value; lists are a,b"


class _BadWords(ValueError):
    """The words after a flag do not make one value."""


def _flag_name(flag: str) -> tuple[str | None, bool]:
    """The key that a flag names, and whether it is negated; None for an unknown one."""
    if flag in _CONFIG_FILE:
        return "job.config_file", False
    if table_of(flag):
        return flag, False
    plain = flag.replace("-", "_")
    if plain in known_names() or table_of(plain):
        return plain, False
    candidates = [flag[3:]] if flag[:3] in ("no-", "no_") else []
    section, _, field = plain.rpartition(".")
    if field.startswith("no_"):
        candidates.append(f"{section}.{field[3:]}")
    for candidate in candidates:
        if candidate.replace("-", "_") in known_names():
            return candidate.replace("-", "_"), True
    return None, False


def _annotation(name: str) -> Any:
    if name in keys():
        return keys()[name].annotation
    if name in ALIASES:
        return annotation_of(ALIASES[name])
    if name in FOREIGN:
        return foreign.annotation(name)
    table = table_of(name)
    return get_args(keys()[table].annotation)[1] if table else Any


def _negative(name: str, words: list[str]) -> bool:
    if bool not in {base(part) for part in members(_annotation(name))}:
        raise _BadWords(f"{name} is not a switch and cannot be negated")
    if words:
        raise _BadWords(f"takes no value, got {quote(' '.join(words))}")
    return False


def _read(annotation: Any, words: list[str]) -> Any:
    """The value that words make for a type. A word that does not fit stays a string, for the check to refuse."""
    parts = [base(part) for part in members(annotation)]
    lists = [part for part in parts if get_origin(part) is list]
    if lists and not (len(words) == 1 and words[0] in _choices(parts)):
        return _read_list(lists[0], words)
    if not words:
        if bool in parts:
            return True
        raise _BadWords("needs a value")
    if len(words) > 1:
        raise _BadWords(f"takes one value, got {quote(words)}")
    text = words[0]
    if type(None) in parts and text.lower() == "none" and "none" not in _choices(parts):
        return None
    if text.startswith("{") or Any in parts:
        return _literal(text, text)
    if bool in parts and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in _choices(parts):
        return text
    for kind in (int, float):
        if kind in parts or any(isinstance(choice, kind) for choice in _choices(parts)):
            value = _literal(text, None)
            if type(value) in (int, float):
                return value
            try:
                return kind(text)
            except ValueError:
                pass
    return text


def _choices(parts: list[Any]) -> list[Any]:
    return [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]


def _read_list(annotation: Any, words: list[str]) -> Any:
    if len(words) == 1 and words[0].lstrip().startswith("["):
        return _literal(words[0], words[0])
    (item,) = get_args(annotation)
    texts = [text.strip() for word in words for text in word.split(",") if text.strip()]
    return [_read(item, [text]) for text in texts]


def _literal(text: str, otherwise: Any) -> Any:
    """The text as one TOML value, or `otherwise`."""
    try:
        tree = loads(f"value = {text}")
    except TOMLDecodeError:
        return otherwise
    return tree["value"] if set(tree) == {"value"} else otherwise
