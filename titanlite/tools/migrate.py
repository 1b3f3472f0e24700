"""`titanlite config migrate`: rewrite a file with later or older names with titanlite's own keys.

Comments stay beside their keys. The new text is loaded again before it is handed out: it must mean the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from titanlite.config.aliases import ALIASES, LATER_DEFAULTS, MicrobatchSize, Misfit, convert, key_of
from titanlite.config.entries import known_names, known_sections, unknown
from titanlite.config.errors import ConfigError, Problem, Source
from titanlite.config.keys import choices, fits, keys, table_of
from titanlite.config.load import find_config, read_text
from titanlite.config.loaded import LoadedConfig
from titanlite.config.toml import Scan, join, loads, quote, quote_key
from titanlite.config.unsupported_keys import UNSUPPORTED, is_off
from titanlite.utils import atomic_write


@dataclass(frozen=True)
class Change:
    """One thing that a migration did."""

    kind: Literal["rewritten", "no equivalent", "written out"]
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
        if not self.changes:
            return f"{shown}: nothing to change"
        labels = {
            "rewritten": "rewritten",
            "no equivalent": "without equivalent",
            "written out": "defaults written out",
        }
        counts = ((sum(c.kind == kind for c in self.changes), label) for kind, label in labels.items())
        head = ", ".join(f"{count} {label}" for count, label in counts if count)
        return "\n".join([f"{shown}: {head}", *(f"  {c.where}: {c.text}" for c in self.changes)])


def migrate_file(path: str) -> tuple[Path, Migration]:
    """Return the migration of a file (a bare name is also looked up in train_configs/), and where the file is.

    Raises ConfigError when the file cannot be read or holds mistakes other than names.
    """
    found = find_config(path)
    try:
        if found is None:
            raise FileNotFoundError(2, "no such file")
        text = found.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else (error.strerror or str(error))
        message = f"cannot read {quote(path)}: {reason}"
        raise ConfigError([Problem("command line", "", message, code="unreadable")]) from None
    migration = migrate_text(text.replace("\r\n", "\n"), found)
    if "\r\n" in text:
        migration = replace(migration, text=migration.text.replace("\n", "\r\n"))
    return found, migration


def write_in_place(path: Path, text: str) -> Path:
    """Replace a file at once, and keep the old one beside it as `FILE.orig`, whose path is returned.

    Raises ConfigError when there is such a file already or the folder cannot be written to.
    """
    path = path.resolve()
    kept = path.with_name(path.name + ".orig")
    if kept.exists():
        hint = "move it away; it may be the only copy of an earlier state"
        raise ConfigError([Problem(str(kept), "", "exists already and is not overwritten", hint, code="exists")])
    try:
        shutil.copy2(path, kept)
        atomic_write(path, text)
        shutil.copymode(kept, path)
    except OSError as error:
        kept.unlink(missing_ok=True)
        message = f"cannot be rewritten: {error.strerror}"
        raise ConfigError([Problem(str(path), "", message, code="unreadable")]) from None
    return kept


def migrate_text(text: str, path: Path) -> Migration:
    """Return the migration of a text (with `\\n` line ends) of the file `path`; files it extends are only read.

    A value without equivalent becomes a comment with the reason. Raises ConfigError for mistakes other than names, such
    as a string for a number: they must be mended first.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    before, problems = read_text(text, path)
    if broken := [problem for problem in problems if not problem.key]:
        raise ConfigError(broken)
    rewriter = _Rewriter(text.removeprefix(mark), before)
    if left := [problem for problem in problems if not rewriter.covers(problem)]:
        raise ConfigError(left)
    if not rewriter.changes:
        return Migration(text)
    new = mark + rewriter.rewrite()
    after, problems = read_text(new, path)
    differ = [key for key in keys() if key != "job.dialect" and after.value(key) != before.value(key)]
    if problems or differ:  # such a text must never reach a file
        detail = "; ".join([*map(str, problems), *differ])
        raise RuntimeError(f"titanlite cannot rewrite {path} without changing its meaning: {detail}\n{new}")
    return Migration(new, tuple(sorted(rewriter.changes, key=lambda change: int(change.where.rpartition(":")[2]))))


@dataclass
class _Chunk:
    """Lines above a `key = value`, and its own lines; or lines without a key. And what becomes of it."""

    above: list[str]
    lines: list[str] = field(default_factory=list)
    #: Dotted, with its section; "" for lines without a key.
    name: str = ""
    line: int = 0
    indent: str = ""
    value: str = ""
    #: What follows the value on its last line: blanks and a comment.
    tail: str = ""
    fate: Literal["keep", "move", "gone", "drop"] = "keep"
    #: For "move": the new key, and the value if it must be written anew. "drop": the key in its place.
    key: str = ""
    new: str = ""
    #: For "gone": why it has no equivalent.
    reason: str = ""


@dataclass
class _Block:
    """A header with all up to the next one; the first block of a text has none."""

    above: list[str] = field(default_factory=list)
    header: str = ""
    names: tuple[str, ...] = ()
    is_array: bool = False
    #: Comment behind the header.
    comment: str = ""
    #: Line of the header; 0 for a block that was not in the text.
    line: int = 0
    body: list[_Chunk] = field(default_factory=list)

    def lines(self) -> list[str]:
        own = [*self.above, *([self.header] if self.header else [])]
        return own + [line for chunk in self.body for line in (*chunk.above, *chunk.lines)]

    def has_keys(self) -> bool:
        return any(chunk.lines for chunk in self.body)

    def append(self, chunk: _Chunk) -> None:
        """Put a chunk behind the last key."""
        last = max((i for i, c in enumerate(self.body) if c.lines), default=len(self.body) - 1)
        self.body.insert(last + 1, chunk)


def parse_blocks(text: str) -> list[_Block]:
    """Return the blocks of a text with `\n` line ends; `join_blocks` gives the text back, with a last line end."""
    blocks = [_Block()]
    text = text if text.endswith("\n") or not text else f"{text}\n"
    position = 0
    for s in Scan(text).statements:
        start, end = text.rfind("\n", 0, s.start) + 1, text.find("\n", s.end)
        gap, line = text[position:start].split("\n")[:-1], text.count("\n", 0, start) + 1
        lines, tail = text[start:end].split("\n"), text[s.end : end]
        position = end + 1
        if s.kind == "=":
            indent, value = text[start : s.start], text[s.value : s.end]
            blocks[-1].body.append(_Chunk(gap, lines, _dotted(s.names), line, indent, value, tail))
            continue
        cut = _own_comment(gap)
        while cut and not gap[cut - 1].strip():
            cut -= 1
        blocks[-1].body.append(_Chunk(gap[:cut]))
        blocks.append(_Block(gap[cut:], lines[0], s.names, s.kind == "[[", tail.strip(), line))
    blocks[-1].body.append(_Chunk(text[position:].split("\n")[:-1]))
    return blocks


def join_blocks(blocks: Sequence[_Block]) -> str:
    return "".join(f"{line}\n" for block in blocks for line in block.lines())


def _own_comment(gap: Sequence[str]) -> int:
    """Return where the comment begins that stands directly above a statement."""
    start = len(gap)
    while start and gap[start - 1].strip():
        start -= 1
    return start


class _Rewriter:
    """One rewriting: it decides when it is made, and changes the blocks in `rewrite`."""

    def __init__(self, text: str, before: LoadedConfig) -> None:
        self.before, self.file = before, before.files[-1]
        self.blocks = parse_blocks(text)
        self.changes: list[Change] = []
        #: Lines and names that become comments.
        self.gone: list[tuple[int, str]] = []
        for block in self.blocks:
            name = _dotted(block.names)
            if _inside_a_key(block.names):
                continue
            if block.names and (block.is_array or name not in known_sections()):
                reason = _why_unknown(name, Source("file", self.file, block.line), len(block.names) == 1)
                self._leave(block.line, name, f"[{name}]", reason)
                lines = [line if _is_comment(line) else f"# {line}" for line in block.lines()[len(block.above) :]]
                block.header, block.body = "", [_Chunk([f"# no equivalent: {reason}", *lines])]
            else:
                block.body = [piece for chunk in block.body for piece in self._judge(chunk, bool(block.names))]
        chunks = [chunk for block in self.blocks for chunk in block.body]
        taken = {chunk.name for chunk in chunks if chunk.fate == "keep"}
        for chunk in chunks:
            if chunk.fate == "move":
                chunk.fate = "drop" if chunk.key in taken else "move"
                taken.add(chunk.key)
            written = f"{chunk.name} = {' '.join(chunk.value.split())}"
            if chunk.fate == "gone":
                self._leave(chunk.line, chunk.name, written, chunk.reason)
            elif chunk.fate == "move":
                self._change("rewritten", chunk.line, f"{written} -> {chunk.key} = {chunk.new or chunk.value}")
            elif chunk.fate == "drop" and chunk.name:
                why = f"says {chunk.key} once more" if chunk.key else "its defaults are written out"
                self._change("rewritten", chunk.line, f"{written} is left out: {why}")
        #: Later defaults to write out.
        sources = {key: before.source(key) for key in (*LATER_DEFAULTS, "model.flavor")}
        self.defaults = [key for key, source in sources.items() if (source.kind, source.file) == ("dialect", self.file)]
        for key in self.defaults:
            self._change("written out", sources[key].line or 0, f"{key} = {quote(before.value(key))}")

    def covers(self, problem: Problem) -> bool:
        """Return whether a problem of the old text goes away because its key becomes a comment."""
        name = problem.key.partition(" ")[0].strip("[]")
        places = [line for line, gone in self.gone if gone == name or gone.startswith(f"{name}.")]
        return any(problem.where == f"{self.file}:{line}" for line in places)

    def _change(self, kind: Literal["rewritten", "no equivalent", "written out"], line: int, text: str) -> None:
        self.changes.append(Change(kind, f"{self.file}:{line}", text))

    def _leave(self, line: int, name: str, written: str, reason: str) -> None:
        self.gone.append((line, name))
        self._change("no equivalent", line, f"{written}: no equivalent: {reason}")

    def _judge(self, chunk: _Chunk, in_section: bool) -> list[_Chunk]:
        """Return a chunk with its fate; for a section that is an inline table a chunk for each of its keys."""
        if not chunk.name:
            return [chunk]
        leaves = list(_leaves(chunk.name, loads(f"value = {chunk.value}")["value"]))
        if [name for name, _ in leaves] == [chunk.name]:
            self._decide(chunk, leaves[0][1])
            return [chunk]
        pieces = [replace(chunk, above=[], name=name, value=quote(value), tail="") for name, value in leaves]
        for piece, (_, value) in zip(pieces, leaves, strict=True):
            self._decide(piece, value)
        if in_section and all(piece.fate == "keep" for piece in pieces):
            return [chunk]
        remark = _Chunk([line for line in (*chunk.above, chunk.tail.strip()) if line])
        return [remark, *pieces]

    def _decide(self, chunk: _Chunk, value: Any) -> None:
        """Decide what becomes of a value."""
        name = chunk.name
        if name == "job.dialect":
            chunk.fate = "drop" if value == "2026" else "keep"
        elif name in UNSUPPORTED:
            off = " (it was off)" if is_off(name, value) else ""
            chunk.fate, chunk.reason = "gone", UNSUPPORTED[name].reason + off
        elif name not in known_names():
            # A key of [model] decides what is trained, and a value for a section is a mistake: both are reported.
            known = table_of(name) or _inside_a_key(tuple(name.split("."))[:-1]) or name in known_sections()
            if not known and not name.startswith("model."):
                chunk.fate, chunk.reason = "gone", _why_unknown(name, Source("file", self.file, chunk.line))
        else:
            chunk.key = key = key_of(name)
            try:
                new = convert(name, value)
            except Misfit as error:
                chunk.fate, chunk.reason = "gone", str(error)
                return
            if isinstance(new, MicrobatchSize) or key == "model.flavor":
                new = self.before.value(key)
            elif isinstance(new, str) and choices(keys()[key].type) and not fits(keys()[key].type, new):
                chunk.fate, chunk.reason = "gone", f"{key} is {keys()[key].expected}"
                return
            chunk.new = quote(new) if new != value or type(new) is not type(value) else ""
            chunk.fate = "move" if name in ALIASES or new != value else "keep"

    def rewrite(self) -> str:
        """Return the new text."""
        had_keys = [block for block in self.blocks if block.has_keys()]
        moves: list[tuple[_Block, str, _Chunk]] = []
        for block in self.blocks:
            body: list[_Chunk] = []
            for chunk in block.body:
                for section, piece in _pieces(block, chunk):
                    if section is None or (section,) == block.names:
                        body.append(piece)
                    else:
                        moves.append((block, section, piece))
            block.body = body
        for origin, section, piece in moves:
            self._section(section, origin).append(piece)
        for key in self.defaults:
            section, _, name = key.partition(".")
            line = f"{name} = {quote(self.before.value(key))}  # default of the later dialect"
            self._section(section, self.blocks[-1]).append(_Chunk([], [line]))
        for block in had_keys:
            if block.header and not block.has_keys():
                block.header = block.comment  # a header without keys goes, comments stay
                self.blocks = [b for b in self.blocks if b is not block or any(map(str.strip, block.lines()))]
        first = next((block for block in self.blocks if block.lines()), None)
        while first is not None and first.header and first.above and not first.above[0].strip():
            first.above.pop(0)
        return join_blocks(self.blocks)

    def _section(self, section: str, origin: _Block) -> _Block:
        """Return the block of a section, made where there is none: before its own subsections, or after `origin`."""
        for block in self.blocks:
            if block.names == (section,) and not block.is_array and block.header:
                return block
        new = _Block([""], f"[{section}]", (section,))
        place = next((i for i, b in enumerate(self.blocks) if b.names[:1] == (section,)), None)
        if place is None:
            place = next(i for i, b in enumerate(self.blocks) if b is origin) + 1
            while place < len(self.blocks) and self.blocks[place].line == 0:
                place += 1
        self.blocks.insert(place, new)
        return new


def _pieces(block: _Block, chunk: _Chunk) -> Iterator[tuple[str | None, _Chunk]]:
    """Yield the new form of a chunk, each piece with its section (None: it stays where it is)."""
    if not chunk.name or _inside_a_key(block.names) or (block.names and chunk.fate == "keep"):
        yield None, chunk
        return
    cut = _own_comment(chunk.above)
    apart, own = chunk.above[:cut], chunk.above[cut:]
    if any(map(str.strip, apart)):
        yield None, _Chunk(apart)
        apart = []
    text, tail = chunk.value, chunk.tail
    if chunk.fate == "gone":
        old = _commented(f"{chunk.name} = {text}{tail}")
        yield None, _Chunk([*apart, *own, f"# no equivalent: {chunk.reason}", *old])
    elif chunk.fate == "drop":
        yield None, _Chunk([line for line in (*own, tail.strip()) if line])
    else:
        section, _, name = (chunk.key or chunk.name).partition(".")
        stays = block.names == (section,)
        above = [*apart, *own] if stays else own
        if chunk.new and "\n" in text and "#" in text:
            above = [*above, *_commented(f"{chunk.name} = {text}")]
        lines = f"{chunk.indent if stays else ''}{name} = {chunk.new or text}{tail}".split("\n")
        yield section, _Chunk(above, lines)


def _dotted(names: Sequence[str]) -> str:
    return ".".join(map(quote_key, names))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values under a name: those of a section that is written as an inline table one by one."""
    if isinstance(value, dict) and name in known_sections() and name not in known_names():
        for part, inner in value.items():
            yield from _leaves(join(name, part), inner)
    else:
        yield name, value


def _inside_a_key(names: tuple[str, ...]) -> bool:
    """Return whether a path is that of a key's own table (`[model.overrides]`) or lies in one."""
    return any(".".join(names[:depth]) in keys() for depth in range(1, len(names) + 1))


def _why_unknown(name: str, source: Source, is_section: bool = False) -> str:
    """Return why an unknown name stays behind, without lists of all names."""
    problem = unknown(name, source, is_section)
    lists_all = problem.hint.startswith(("sections:", "keys of", "`"))
    return problem.message if lists_all else f"{problem.message}; {problem.hint}"


def _commented(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.split("\n")]


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")
