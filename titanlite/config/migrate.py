"""`titanlite config migrate`: a file with later or older names, rewritten with the dialect's own.

Comments stay beside their keys. The rewritten text is loaded again before it is handed out: it must mean the same.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_origin

from titanlite.config import foreign
from titanlite.config.entries import known_names, known_sections, table_of, unknown
from titanlite.config.errors import ConfigError, Problem, Source
from titanlite.config.foreign import FOREIGN
from titanlite.config.job import JobConfig
from titanlite.config.layout import Block, Item, Layout, Remark, parse
from titanlite.config.load import find_config, read_text
from titanlite.config.names import ALIASES, LATER_DEFAULTS, REFUSED_VALUES, VALUE_NAMES, MicrobatchSize, Unfit, listed
from titanlite.config.scan import loads
from titanlite.config.schema import base, check_value, keys, members, quote, quote_key
from titanlite.config.unbuilt import implied_unbuilt


@dataclass(frozen=True)
class Change:
    """One thing that a migration did."""

    kind: Literal["rewritten", "no equivalent", "written out"]
    #: `file:line`.
    where: str
    text: str


@dataclass(frozen=True)
class Migration:
    """A rewritten text, and what was done to it."""

    text: str
    changes: tuple[Change, ...] = ()

    def report(self, shown: str) -> str:
        """What was done, for a person: a head line, then a line per change."""
        if not self.changes:
            return f"{shown}: nothing to change"
        kinds = ("rewritten", "no equivalent", "written out")
        counts = [(sum(c.kind == kind for c in self.changes), kind) for kind in kinds]
        labels = {"no equivalent": "without equivalent", "written out": "defaults written out"}
        head = ", ".join(f"{count} {labels.get(kind, kind)}" for count, kind in counts if count)
        return "\n".join([f"{shown}: {head}", *(f"  {c.where}: {c.text}" for c in self.changes)])


def migrate_file(path: str) -> tuple[Path, Migration]:
    """The migration of a file (a bare name is also looked up in train_configs/), and where the file is.

    Raises ConfigError when the file cannot be read or holds mistakes that are no matter of names.
    """
    found = find_config(path)
    try:
        if found is None:
            raise FileNotFoundError(2, "no such file")
        text = found.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else (error.strerror or str(error))
        raise ConfigError([Problem("command line", "", f"cannot read {quote(path)}: {reason}")]) from None
    windows = "\r\n" in text
    migration = migrate_text(text.replace("\r\n", "\n"), found)
    if windows:
        migration = Migration(migration.text.replace("\n", "\r\n"), migration.changes)
    return found, migration


def write_in_place(path: Path, text: str) -> Path:
    """Replace a file at once, and keep what it was beside it as `FILE.orig`, whose path is returned.

    Raises ConfigError when there is such a file already or the folder cannot be written to.
    """
    path = path.resolve()
    kept = path.with_name(path.name + ".orig")
    if kept.exists():
        hint = "move it away; it may be the only copy of an earlier state"
        raise ConfigError([Problem(str(kept), "", "is there already and is not overwritten", hint)])
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=path.name, delete=False) as stream:
            temporary = stream.name
            stream.write(text.encode("utf-8"))
            stream.flush()
            os.fsync(stream.fileno())
        shutil.copymode(path, temporary)
        shutil.copy2(path, kept)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise ConfigError([Problem(str(path), "", f"cannot be rewritten: {error.strerror}")]) from None
    return kept


def migrate_text(text: str, path: Path) -> Migration:
    """The migration of a text (with `\\n` line ends) that stands in `path`; files it extends are read, not changed.

    What has no equivalent becomes a comment with the reason. Raises ConfigError for mistakes that are no matter of
    names, such as a string for a number: they must be mended first.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    before, problems = read_text(text, path)
    broken = [problem for problem in problems if not problem.key]
    if broken:
        raise ConfigError(broken)
    plain = text.removeprefix(mark)
    rewriter = _Rewriter(parse(plain), loads(plain), before, before.files[-1])
    rewriter.judge()
    left = [problem for problem in problems if not rewriter.covers(problem)]
    if left:
        raise ConfigError(left)
    if not rewriter.changes:
        return Migration(text)
    rewriter.rewrite()
    new = mark + rewriter.layout.text()
    _check_meaning(new, path, before, rewriter.held_back)
    changes = sorted(rewriter.changes, key=lambda change: int(change.where.rpartition(":")[2]))
    return Migration(new, tuple(changes))


def _check_meaning(text: str, path: Path, before: JobConfig, held_back: list[str]) -> None:
    """A text that would not load to the same values must never reach a file."""
    after, problems = read_text(text, path)
    skipped = {"job.dialect", *held_back}
    differ = [key for key in keys() if key not in skipped and after.value(key) != before.value(key)]
    if problems or differ:
        detail = "; ".join([*map(str, problems), *differ])
        raise RuntimeError(f"titanlite cannot rewrite {path} without changing its meaning: {detail}\n{text}")


@dataclass(frozen=True)
class _Fate:
    """What becomes of one written value."""

    kind: Literal["keep", "move", "gone", "drop"]
    #: The key it becomes, for "move".
    canonical: str = ""
    #: Its value there.
    value: Any = None
    #: Whether the value must be written anew.
    converted: bool = False
    #: Why it goes, for "gone".
    reason: str = ""


_KEEP = _Fate("keep")


@dataclass
class _Leaf:
    """One written value: an item, or a part of an item that is an inline table."""

    item: Item
    name: str
    value: Any
    fate: _Fate
    #: Whether the item is this value and nothing else.
    whole: bool


@dataclass
class _Rewriter:
    """One rewriting: `judge` decides, `rewrite` changes the layout."""

    layout: Layout
    tree: dict[str, Any]
    before: JobConfig
    file: str
    changes: list[Change] = field(default_factory=list)
    #: Later defaults of features not built yet: written as comments, since training refuses what is written.
    held_back: list[str] = field(default_factory=list)
    leaves: dict[int, list[_Leaf]] = field(default_factory=dict)
    gone_blocks: dict[int, str] = field(default_factory=dict)
    gone: list[tuple[int, str]] = field(default_factory=list)

    # What is to be done

    def judge(self) -> None:
        taken: set[str] = set()
        found: list[_Leaf] = []
        for block in self.layout.blocks:
            name = ".".join(map(quote_key, block.names))
            if _inside_a_key(block.names):
                continue
            if block.names and (block.is_array or name not in known_sections()):
                self._judge_foreign_block(block, name)
                continue
            for item in block.items():
                leaves = list(self._leaves(block, item))
                self.leaves[id(item)] = leaves
                found += leaves
        taken |= {leaf.name for leaf in found if leaf.fate.kind == "keep"}
        for leaf in found:
            if leaf.fate.kind == "move":
                if leaf.fate.canonical in taken:
                    leaf.fate = _Fate("drop", leaf.fate.canonical)
                taken.add(leaf.fate.canonical)
            self._note(leaf)
        for key in (*LATER_DEFAULTS, "model.flavor"):
            source = self.before.source(key)
            if source.kind == "dialect" and source.file == self.file:
                self._note_default(key, source)

    def _judge_foreign_block(self, block: Block, name: str) -> None:
        source = Source("file", self.file, block.line)
        reason = _unknown(name, source, is_section=len(block.names) == 1)
        self.gone_blocks[id(block)] = reason
        self.gone.append((block.line, name))
        self._change("no equivalent", block.line, f"[{name}]: no equivalent: {reason}")

    def _leaves(self, block: Block, item: Item) -> Iterator[_Leaf]:
        value: Any = self.tree
        for part in (*block.path, *item.names):
            value = value[part]

        def visit(names: tuple[str, ...], value: Any, whole: bool) -> Iterator[_Leaf]:
            name = ".".join(map(quote_key, names))
            if isinstance(value, dict) and name in known_sections() and name not in known_names():
                for part, inner in value.items():
                    yield from visit((*names, part), inner, False)
            else:
                yield _Leaf(item, name, value, self._fate(name, value, item.line), whole)

        yield from visit((*block.names, *item.names), value, True)

    def _fate(self, name: str, value: Any, line: int) -> _Fate:
        if name == "job.dialect":
            return _Fate("drop") if value == "2026" else _KEEP
        if name in FOREIGN:
            off = " (it was off)" if foreign.check(name, value) is None else ""
            return _Fate("gone", reason=FOREIGN[name].reason + off)
        if table_of(name) or _inside_a_key(tuple(name.split("."))[:-1]):
            return _KEEP
        if name not in known_names():
            if name in known_sections():
                return _KEEP  # A value for a section: a mistake, reported as such.
            if name.startswith("model."):
                return _KEEP  # What decides the model is never left out: a mistake, reported as such.
            return _Fate("gone", reason=_unknown(name, Source("file", self.file, line)))
        alias = ALIASES.get(name)
        canonical = alias.canonical if alias else name
        new = listed(name, value)
        try:
            if alias and alias.convert:
                new = alias.convert(new)
        except Unfit as error:
            return _Fate("gone", reason=str(error))
        if isinstance(new, MicrobatchSize):
            return _Fate("move", canonical, self.before.value(canonical), True)
        if name == "model.flavor":
            new = self.before.value(name)
        if isinstance(new, str):
            new = VALUE_NAMES.get((canonical, new), new)
            if (canonical, new) in REFUSED_VALUES:
                return _Fate("gone", reason=REFUSED_VALUES[canonical, new])
            if _has_choices(canonical) and check_value(keys()[canonical], new):
                return _Fate("gone", reason=f"{canonical} is {keys()[canonical].expected}")
        if alias or new != value:
            return _Fate("move", canonical, new, new != value or type(new) is not type(value))
        return _KEEP

    def _change(self, kind: Literal["rewritten", "no equivalent", "written out"], line: int, text: str) -> None:
        self.changes.append(Change(kind, f"{self.file}:{line}", text))

    def _note(self, leaf: _Leaf) -> None:
        fate, line, written = leaf.fate, leaf.item.line, f"{leaf.name} = {quote(leaf.value)}"
        if fate.kind == "gone":
            self.gone.append((line, leaf.name))
            self._change("no equivalent", line, f"{written}: no equivalent: {fate.reason}")
        elif fate.kind == "move":
            self._change("rewritten", line, f"{written} -> {fate.canonical} = {quote(fate.value)}")
        elif fate.kind == "drop":
            why = f"says {fate.canonical} once more" if fate.canonical else "its defaults are written out"
            self._change("rewritten", line, f"{written} is left out: {why}")

    def _note_default(self, key: str, source: Source) -> None:
        value = f"{key} = {quote(self.before.value(key))}"
        if key in implied_unbuilt(self.before):
            self.held_back.append(key)
            value += ", as a comment: it is not built yet"
        self._change("written out", source.line or 0, value)

    def covers(self, problem: Problem) -> bool:
        """Whether a problem of the old text goes away because the key becomes a comment."""
        name = problem.key.partition(" ")[0].strip("[]")
        places = [line for line, gone in self.gone if gone == name or gone.startswith(f"{name}.")]
        return any(problem.where == f"{self.file}:{line}" for line in places)

    # Doing it

    def rewrite(self) -> None:
        had_items = {id(block) for block in self.layout.blocks if any(block.items())}
        moves: list[tuple[Block, str, Item | Remark]] = []
        for block in self.layout.blocks:
            if id(block) in self.gone_blocks:
                _comment_out(block, self.gone_blocks[id(block)])
                continue
            parts: list[Item | Remark] = []
            for part in block.parts:
                if not isinstance(part, Item) or id(part) not in self.leaves:
                    parts.append(part)
                    continue
                for section, piece in self._pieces(block, part):
                    if section is None or (section,) == block.names:
                        parts.append(piece)
                    else:
                        moves.append((block, section, piece))
            block.parts = parts
        for origin, section, piece in moves:
            _append(self._section(section, origin), piece)
        self._write_defaults()
        self._drop_empty(had_items)

    def _pieces(self, block: Block, item: Item) -> Iterator[tuple[str | None, Item | Remark]]:
        """What an item becomes, each piece with the section it belongs to (None: it stays where it is)."""
        leaves = self.leaves[id(item)]
        if block.names and all(leaf.fate.kind == "keep" for leaf in leaves):
            yield None, item
            return
        apart, own = item.split_above()
        if any(line.strip() for line in apart):
            yield None, Remark(apart)
            apart = []
        tail = item.tail
        if not leaves:
            yield None, _remark([*own, tail.strip()])
        for leaf in leaves:
            yield self._piece(block, leaf, apart, own, tail)
            apart, own, tail = [], [], ""

    def _piece(
        self, block: Block, leaf: _Leaf, apart: list[str], own: list[str], tail: str
    ) -> tuple[str | None, Item | Remark]:
        """One value in its new form; apart, own: the lines above it, tail: the comment behind it."""
        fate, text = leaf.fate, leaf.item.value if leaf.whole else quote(leaf.value)
        if fate.kind == "gone":
            lines = [f"# no equivalent: {fate.reason}", *_commented(f"{leaf.name} = {text}{tail}")]
            return None, Remark([*apart, *own, *lines])
        if fate.kind == "drop":
            return None, _remark([*own, tail.strip()])
        section, _, name = (fate.canonical or leaf.name).partition(".")
        above, indent = own, ""
        if block.names == (section,):
            above, indent = [*apart, *own], leaf.item.indent
        if fate.converted:
            if "\n" in text and "#" in text:
                above = [*above, *_commented(f"{leaf.name} = {text}")]
            text = quote(fate.value)
        return section, Item(above, indent, name, tuple(name.split(".")), text, tail=tail)

    def _section(self, section: str, origin: Block) -> Block:
        """The block of a section, made where there is none: before its own subsections, or after `origin`."""
        blocks = self.layout.blocks
        for block in blocks:
            if block.names == (section,) and not block.is_array and id(block) not in self.gone_blocks:
                return block
        new = Block([""], f"[{section}]", (section,))
        place = next((i for i, b in enumerate(blocks) if b.names[:1] == (section,)), None)
        if place is None:
            place = next(i for i, b in enumerate(blocks) if b is origin) + 1
            while place < len(blocks) and blocks[place].line == 0 and blocks[place].names:
                place += 1
        blocks.insert(place, new)
        return new

    def _write_defaults(self) -> None:
        why = "default of the later dialect"
        for change in self.changes:
            if change.kind != "written out":
                continue
            key = change.text.partition(" ")[0]
            section, _, name = key.partition(".")
            value = quote(self.before.value(key))
            new: Item | Remark = Item([], "", name, (name,), value, tail=f"  # {why}")
            if key in self.held_back:
                new = Remark([f"# {name} = {value}  # {why}, not built yet"])
            _append(self._section(section, self.layout.blocks[-1]), new)

    def _drop_empty(self, had_items: set[int]) -> None:
        """Headers under which nothing is left go, their comments stay."""
        kept = []
        for block in self.layout.blocks:
            if block.header and id(block) in had_items and not any(block.items()):
                block.header = block.comment
                if not any(line.strip() for line in block.lines()):
                    continue
            kept.append(block)
        self.layout.blocks = kept
        first = next((block for block in kept if block.lines()), None)
        while first is not None and first.header and first.above and not first.above[0].strip():
            first.above.pop(0)


def _inside_a_key(names: tuple[str, ...]) -> bool:
    """Whether a path is that of a key's own table (`[model.overrides]`) or lies in one."""
    return any(".".join(names[:depth]) in keys() for depth in range(1, len(names) + 1))


def _unknown(name: str, source: Source, is_section: bool = False) -> str:
    """Why an unknown name stays behind; a list of all sections or the like is no help in a comment."""
    problem = unknown(name, source, is_section)
    helps = problem.about or problem.hint.startswith("nearest")
    return f"{problem.message}; {problem.hint}" if helps else problem.message


def _has_choices(key: str) -> bool:
    return any(get_origin(base(part)) is Literal for part in members(keys()[key].annotation))


def _remark(lines: list[str]) -> Remark:
    return Remark([line for line in lines if line])


def _commented(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.split("\n")]


def _comment_out(block: Block, reason: str) -> None:
    lines = [block.header, *(line for part in block.parts for line in part.lines())]
    block.parts = [
        Remark([f"# no equivalent: {reason}", *(line if _is_comment(line) else f"# {line}" for line in lines)])
    ]
    block.header = ""


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _append(block: Block, part: Item | Remark) -> None:
    """Put a part behind the last key of a block."""
    last = max((i for i, p in enumerate(block.parts) if isinstance(p, Item)), default=len(block.parts) - 1)
    block.parts.insert(last + 1, part)
