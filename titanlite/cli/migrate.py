"""`titanlite config migrate`: rewrite a file with later or older names with titanlite's own keys.

Comments stay beside their keys. The new text is loaded again before it is handed out: it must mean
the same.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from titanlite.config.aliases import (
    ALIASES,
    COMMA_LISTS,
    VALUE_NAMES,
    is_subsection,
    key_of,
    normalized,
)
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.keys import keys
from titanlite.config.load import find_config, read_text
from titanlite.config.loaded import LoadedConfig
from titanlite.config.toml import Statement, TOMLDecodeError, join, loads, quote, scan
from titanlite.config.trust import Origin
from titanlite.config.unsupported_keys import UNSUPPORTED, is_off
from titanlite.config.variables import escaped
from titanlite.utils import atomic_write

Kind = Literal["rewritten", "without equivalent", "defaults written out"]
#: Problems of a key that go away when it becomes a comment.
_NAMES = ("unknown-key", "unknown-section", "unsupported", "unknown-value")


@dataclass(frozen=True)
class Change:
    """One thing that a migration did."""

    kind: Kind
    #: `file:line`.
    where: str
    text: str


@dataclass(frozen=True)
class Migration:
    """A rewritten text, and the changes."""

    text: str
    changes: tuple[Change, ...] = ()

    def report(self, shown: str) -> str:
        """Return the changes in words: a head line, then a line per change."""
        kinds = [change.kind for change in self.changes]
        head = (
            ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
            or "nothing to change"
        )
        return "\n".join([f"{shown}: {head}", *(f"  {c.where}: {c.text}" for c in self.changes)])


def migrate_file(path: str) -> tuple[Path, Migration]:
    """Return the migration of a file (a bare name is also looked up in train_configs/), and where
    the file is.

    Raises ConfigError when the file cannot be read or holds mistakes other than names.
    """
    found = find_config(path) or Path(path)
    try:
        text = found.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            reason = "is not UTF-8 text"
        else:
            reason = error.strerror or str(error)
        message = f"cannot read {quote(path)}: {reason}"
        raise ConfigError([Problem("unreadable", "", message, where="command line")]) from None
    migration = migrate_text(text.replace("\r\n", "\n"), found)
    if "\r\n" in text:
        migration = replace(migration, text=migration.text.replace("\n", "\r\n"))
    return found, migration


def write_in_place(path: Path, text: str) -> Path:
    """Replace a file at once, and keep the old one beside it as `FILE.orig`, whose path is
    returned.

    Raises ConfigError when there is such a file already or the folder cannot be written to.
    """
    path = path.resolve()
    kept = path.with_name(path.name + ".orig")
    if os.path.lexists(kept):
        hint = "move it away; it may be the only copy of an earlier state"
        raise ConfigError(
            [Problem("exists", "", "exists already and is not overwritten", hint, str(kept))]
        )
    try:
        shutil.copy2(path, kept)
        atomic_write(path, text)
        shutil.copymode(kept, path)
    except OSError as error:
        kept.unlink(missing_ok=True)
        message = f"cannot be rewritten: {error.strerror}"
        raise ConfigError([Problem("unreadable", "", message, where=str(path))]) from None
    return kept


def migrate_text(text: str, path: Path) -> Migration:
    """Return the migration of a text (with `\\n` line ends) of the file `path`; files it extends
    are only read.

    A value without equivalent becomes a comment with the reason. Raises ConfigError for mistakes
    other than names, such as a string for a number: they must be mended first.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    before, problems = read_text(text, path, origin=Origin.OWN)
    if broken := [problem for problem in problems if not problem.key]:
        raise ConfigError(broken)
    rewriter = _Rewriter(before, problems)
    for statement in scan(text.removeprefix(mark))[0]:
        rewriter.add(statement)
    rewriter.add_defaults()
    if left := [problem for problem in problems if problem not in rewriter.solved]:
        raise ConfigError(left)
    if not rewriter.changes:
        return Migration(text)
    new = mark + rewriter.text()
    after, problems = read_text(new, path, origin=Origin.OWN)
    differ = [
        key for key in keys() if key != "job.dialect" and after.value(key) != before.value(key)
    ]
    if problems or differ:  # such a text must never reach a file
        detail = "; ".join([*map(str, problems), *differ])
        raise RuntimeError(
            f"titanlite cannot rewrite {path} without changing its meaning: {detail}\n{new}"
        )
    return Migration(
        new,
        tuple(sorted(rewriter.changes, key=lambda change: int(change.where.rpartition(":")[2]))),
    )


@dataclass
class _Block:
    """Lines from a header to the next one. Without keys the header goes, and comments stay."""

    header: str = ""
    above: list[str] = field(default_factory=list)
    #: Behind the header.
    comment: str = ""
    body: list[str] = field(default_factory=list)
    has_keys: bool = False
    #: What becomes of its statements. gone: comments.
    fate: Literal["rewritten", "kept", "gone"] = "rewritten"

    def lines(self) -> list[str]:
        header = self.comment.strip()
        if self.has_keys:
            header = self.header + self.comment
        if not header:
            return [*self.above, *self.body]
        return [*self.above, header, *self.body]


class _Rewriter:
    """Takes the statements of a file one by one, and puts each key into the block of its
    section.
    """

    def __init__(self, before: LoadedConfig, problems: list[Problem]) -> None:
        self.before = before
        self.file = before.files[-1]
        #: Name → its problem, for those that become comments.
        self.problems = {_name(p): p for p in problems if self._may_go(p)}
        self.solved: list[Problem] = []
        self.changes: list[Change] = []
        self.here = _Block()
        self.blocks = {"": self.here}
        #: Keys that the new text has; comments and blank lines before the next statement.
        self.written: set[str] = set()
        self.gap: list[str] = []

    def _may_go(self, problem: Problem) -> bool:
        name = _name(problem)
        decides_what_is_trained = name.startswith("model.") and name not in ALIASES
        is_in_file = problem.where.rpartition(":")[0] == self.file
        return problem.code in _NAMES and is_in_file and not decides_what_is_trained

    def _reason(self, name: str) -> str:
        """Return why a name, or a section around it, has no equivalent; "" if it has one."""
        for gone, problem in self.problems.items():
            if name == gone or name.startswith(f"{gone}."):
                self.solved.append(problem)
                is_short = (
                    problem.remedy.startswith(("here", "nearest")) or "belongs" in problem.remedy
                )
                return f"{problem.message}; {problem.remedy}" if is_short else problem.message
        return ""

    def _change(self, kind: Kind, line: int, text: str) -> None:
        self.changes.append(Change(kind, f"{self.file}:{line}", text))

    def section(self, key: str) -> _Block:
        """Return the block for a key; that of a new section stands behind those that are there."""
        name = key.partition(".")[0]
        return self.blocks.setdefault(name, _Block(f"[{name}]", [""]))

    def add(self, statement: Statement) -> None:
        """Take the next statement."""
        if not statement.tree:
            self.gap.append(statement.text)
            return
        above = self.gap
        self.gap = []
        if statement.is_header:
            self._open(statement, above)
        elif self.here.fate == "rewritten":
            self._rewrite(statement, above)
        else:
            self.here.body += [
                *above,
                statement.text if self.here.fate == "kept" else _commented(statement.text),
            ]

    def _open(self, statement: Statement, above: list[str]) -> None:
        """Begin a block."""
        name = re.sub(r"\[\d+\]", "", statement.table)
        text, comment = _cut(statement)
        reason = self._reason(name)
        if reason:
            self._change("without equivalent", statement.line, f"[{name}]: no equivalent: {reason}")
            note = [f"# no equivalent: {reason}", _commented(statement.text)]
            self.here = _Block(above=[*above, *note], fate="gone")
        elif any(name == key or name.startswith(f"{key}.") for key in keys()):  # a key's own table
            self.here = _Block(text, above, comment, has_keys=True, fate="kept")
        else:
            self.here = self.blocks.setdefault(name, _Block(text))
            self.here.above = [*filter(None, self.here.above), *above]
            self.here.comment = comment
            return
        self.blocks[f"line {statement.line}"] = self.here

    def _rewrite(self, statement: Statement, above: list[str]) -> None:
        """Put the keys of a statement where they belong: those of an inline table one by one."""
        text, comment = _cut(statement)
        changes = len(self.changes)
        results = [
            self._decide(name, value, text.partition("=")[2].strip(), statement.line)
            for name, value in _leaves(statement.table, statement.tree)
        ]
        if len(self.changes) == changes and all(
            self.section(key) is self.here for key, _ in results
        ):
            self.here.body += [*above, statement.text]
            self.here.has_keys = True
            return
        for key, lines in results:
            block = self.section(key) if key else self.here
            above = above if block is self.here else [*filter(str.strip, above)]
            *notes, last = lines
            block.body += [*above, *notes, *filter(None, [(last + comment).lstrip()])]
            block.has_keys |= bool(key)
            above = []
            comment = ""

    def _decide(self, name: str, value: Any, raw: str, line: int) -> tuple[str, list[str]]:
        """Return the key for a value ("" for none) and its lines; without a key these are
        comments.
        """
        # The text may be that of an inline table.
        if not _is(raw, value):
            raw = quote(value)
        old = f"{name} = {' '.join(raw.split())}"
        reason = self._reason(name)
        if name in UNSUPPORTED and not reason:
            state = "it was off" if is_off(name, value) else "it had no effect"
            reason = f"{UNSUPPORTED[name].reason} ({state})"
        if reason:
            self._change("without equivalent", line, f"{old}: no equivalent: {reason}")
            return "", [f"# no equivalent: {reason}", _commented(f"{name} = {raw}")]
        key = key_of(name)
        if key in self.written:
            self._change("rewritten", line, f"{old} is left out: says {key} once more")
            return "", [""]
        if (name, value) == ("job.dialect", "2026"):
            why = "its defaults are written out"
            self._change("rewritten", line, f"{old} is left out: {why}")
            return "", [""]
        if name.startswith("quantize.linear.") and self.before.source(key).written != name:
            reason = "model.converters does not have it"
            self._change("without equivalent", line, f"{old}: no equivalent: {reason}")
            return "", [f"# no equivalent: {reason}", _commented(f"{name} = {raw}")]
        self.written.add(key)
        new = self._new_text(name, value, raw)
        notes = []
        # A comment within the lines of an old value would be lost.
        if new != raw and "#" in raw and "\n" in raw:
            notes.append(_commented(f"{name} = {raw}"))
        if (key, new) != (name, raw):
            self._change("rewritten", line, f"{old} -> {key} = {new}")
        return key, [*notes, f"{key.partition('.')[2]} = {new}"]

    def _new_text(self, name: str, value: Any, raw: str) -> str:
        """Return a value as titanlite writes it. raw: its text in the file."""
        key = key_of(name)
        is_model = key in ("model.name", "model.flavor")
        is_other_model = is_model and self.before.source(key).written != name
        if is_other_model or (name in ALIASES and ALIASES[name].convert):
            return escaped(quote(self.before.value(key)))
        if isinstance(value, str) and (name in COMMA_LISTS or (key, value) in VALUE_NAMES):
            # Its environment variables stay.
            return quote(normalized(name, value))
        return raw

    def add_defaults(self) -> None:
        """Write out the later defaults that the file relied on, and take what stands behind its
        last statement.
        """
        self.here.body += self.gap
        values = dict(self.before.entries())
        for key, source in self.before.sources.items():
            if (source.kind, source.file) != ("dialect", self.file) or key not in values:
                continue
            text = quote(values[key])
            self._change("defaults written out", source.line or 0, f"{key} = {text}")
            self.section(key).body.append(
                f"{key.partition('.')[2]} = {text}  # default of the later dialect"
            )
            self.section(key).has_keys = True

    def text(self) -> str:
        """Return the new text."""
        return (
            "\n".join(line for block in self.blocks.values() for line in block.lines()).strip("\n")
            + "\n"
        )


def _name(problem: Problem) -> str:
    """Return the name that was written, of a key or section."""
    return problem.key.partition(" (")[0].strip("[]")


def _cut(statement: Statement) -> tuple[str, str]:
    """Return a statement without the comment behind it, and that comment with the blanks
    before it.
    """
    text = statement.text
    for start in (match.start() for match in re.finditer(r"[ \t]*#", text)):
        try:
            if loads(text[:start]) == statement.tree:
                return text[:start], text[start:]
        except TOMLDecodeError:
            continue
    return text.rstrip(), ""


def _is(raw: str, value: Any) -> bool:
    try:
        return bool(loads(f"x = {raw}") == {"x": value})
    except TOMLDecodeError:
        return False


def _leaves(path: str, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values in a table with their full names; those of sections in it one by one."""
    for part, value in tree.items():
        name = join(path, part)
        if isinstance(value, dict) and is_subsection(name):
            yield from _leaves(name, value)
        else:
            yield name, value


def _commented(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.split("\n"))
