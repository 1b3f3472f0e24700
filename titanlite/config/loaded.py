"""A loaded config: the typed sections, and where each value came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replace_fields

from titanlite.config.errors import COMMAND_LINE, DEFAULT, Source
from titanlite.config.keys import keys, sections, table_of, tables
from titanlite.config.notes import Note
from titanlite.config.sections import Config
from titanlite.config.toml import quote, quote_key
from titanlite.config.trust import Claim, Origin
from titanlite.utils import escape_name

if TYPE_CHECKING:
    from titanlite.config.raw_values import Entry

EXCLUSIVE = (
    ("training.steps", "training.tokens", "training.epochs"),
    ("training.warmup_steps", "lr_scheduler.warmup_ratio"),
    ("lr_scheduler.decay_ratio", "lr_scheduler.decay_steps", "lr_scheduler.plateau_ratio"),
)
"""Keys for one thing: a layer has one of them, and a later layer's choice replaces an earlier
one's.
"""

#: Keys that only say where and how a config was written.
ABOUT_FILES = ("job.config_file", "job.extends", "job.dialect")


@dataclass(frozen=True)
class LoadedConfig:
    """A config, each key checked by itself, and where each value was written."""

    sections: Config
    #: Source of every value that is not the plain default, by key (or `model.overrides.<field>`).
    sources: Mapping[str, Source] = field(default_factory=dict)
    #: Files read, in the order of their layers.
    files: tuple[str, ...] = ()
    #: Decisions of the loader: later defaults taken, a choice replaced by a later layer.
    notes: tuple[Note, ...] = ()
    #: Values with environment variables as they were written, by key, for machines that replace
    #: them themselves.
    deferred: Mapping[str, Any] = field(default_factory=dict)
    #: Values out of a foreign file that run code when they are used; `titanlite.resolve.load`
    #: asks for leave.
    claims: tuple[Claim, ...] = ()
    #: Who wrote the file of the claims.
    origin: Origin = Origin.OWN
    #: The table [sweep] as it was written; `titanlite sweep` reads it.
    sweep: Entry | None = None

    def value(self, key: str) -> Any:
        section, _, name = key.partition(".")
        found = self.sections.others.get(section) or getattr(self.sections, section, None)
        # Another config may have made a section of another package known since.
        return getattr(found or sections()[section](), name)

    def changed(self, changes: Mapping[str, Any]) -> LoadedConfig:
        """Return the config as if flags gave these keys their values."""
        sections = self.sections
        for key, value in changes.items():
            section, _, name = key.partition(".")
            new = replace_fields(getattr(sections, section), **{name: value})
            sections = replace_fields(sections, **{section: new})
        sources = {**self.sources, **dict.fromkeys(changes, COMMAND_LINE)}
        claims = tuple(claim for claim in self.claims if claim.key not in changes)
        return replace(self, sections=sections, sources=sources, claims=claims)

    def without(self, names: Sequence[str]) -> LoadedConfig:
        """Return the config as if nothing were written in these sections."""

        def is_kept(key: str) -> bool:
            return key.partition(".")[0] not in names

        plain = {name: sections()[name]() for name in names}
        return replace(
            self,
            sections=replace_fields(self.sections, **plain),
            sources={key: source for key, source in self.sources.items() if is_kept(key)},
            claims=tuple(claim for claim in self.claims if is_kept(claim.key)),
        )

    def source(self, key: str) -> Source:
        return self.sources.get(key, DEFAULT)

    def is_given(self, key: str) -> bool:
        """Return whether a file or the command line sets a key (to its default, too)."""
        if key in self.sources:
            return self.sources[key].kind in ("file", "command line")
        return bool(self._entries_of(key))

    def _entries_of(self, key: str) -> list[str]:
        if key not in tables():
            return []
        return [name for name in self.sources if name.startswith(f"{key}.")]

    def place(self, key: str) -> str:
        """Return `file:line` or `command line` of a given key, empty for a default: for
        messages.
        """
        if key not in self.sources:
            entries = self._entries_of(key)
            return self.sources[entries[0]].place if entries else ""
        source = self.sources[key]
        return "" if source.kind == "default" else source.place

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Yield the values in effect by key, tables entry by entry, but no None and no replaced
        default.
        """
        for key in keys().values():
            value = self.value(key.name)
            if key.is_table:
                for name, item in value.items():
                    yield f"{key.name}.{quote_key(name)}", item
            elif value is None or key.name in ABOUT_FILES or self.superseded(key.name):
                continue
            else:
                yield key.name, value

    def to_toml(self, defaults: bool = True) -> str:
        """Return the config as a TOML file that loads to the same values.

        defaults: the whole config, with sources as comments; else only values that are not plain
        defaults.
        """
        lines: list[str] = []
        section = ""
        for key, value in self.entries():
            first, _, name = key.partition(".")
            source = self.source(key)
            is_entry = table_of(key) is not None
            is_default = source.kind == "default" and not is_entry
            if is_default and not defaults:
                continue
            if first != section:
                section = first
                lines += ["", f"[{section}]"]
            written = quote(value).replace("${", "$${")  # a literal one when it is loaded
            if key in self.deferred:
                written = quote(self.deferred[key])
            line = f"{name} = {written}"
            if defaults and not is_default and not is_entry:
                # The name of a file may have a line end.
                line += f"  # {escape_name(str(source))}"
            lines.append(line)
        return "\n".join([*lines[1:], ""])

    def superseded(self, key: str) -> bool:
        """Return whether a default gave way to another key for the same thing."""
        if self.is_given(key):
            return False
        return any(
            self.is_given(other) and self.value(other) is not None
            for group in EXCLUSIVE
            if key in group
            for other in group
        )
