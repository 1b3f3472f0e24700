"""A loaded config: the typed sections, and where each value came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titanlite.config.dialect import Dialect
from titanlite.config.errors import DEFAULT, Problem, Source
from titanlite.config.schema import keys, quote, quote_key
from titanlite.config.unbuilt import implied_unbuilt

EXCLUSIVE = (
    ("training.steps", "training.tokens", "training.epochs"),
    ("training.warmup_steps", "lr_scheduler.warmup_ratio"),
    ("lr_scheduler.decay_ratio", "lr_scheduler.decay_steps", "lr_scheduler.plateau_ratio"),
)
"""Ways to say one thing: one of them in a layer, and a later layer's choice replaces an earlier one's."""


@dataclass(frozen=True)
class JobConfig:
    """What was asked for, checked key by key; `titanlite.config.derive` says what will be done."""

    dialect: Dialect
    #: Source of every value that is not the plain default, by key (or `model.overrides.<field>`).
    sources: Mapping[str, Source] = field(default_factory=dict)
    #: Files read, in the order in which they were laid over each other.
    files: tuple[str, ...] = ()
    #: What loading decided by itself: later defaults taken, a choice replaced by a later layer.
    notes: tuple[str, ...] = ()

    def value(self, key: str) -> Any:
        """The value of `section.field`."""
        section, _, name = key.partition(".")
        return getattr(getattr(self.dialect, section), name)

    def source(self, key: str) -> Source:
        """Where the value of `section.field` was written."""
        return self.sources.get(key, DEFAULT)

    def is_given(self, key: str) -> bool:
        """Whether a file or the command line says something about a key (its default counts too)."""
        given = self.sources.get(key)
        if given is not None:
            return given.kind in ("file", "command line")
        return key in keys() and keys()[key].is_table and any(name.startswith(f"{key}.") for name in self.sources)

    def place(self, key: str) -> str:
        """`file:line` or `command line` of a given key, empty for a default: for messages."""
        if self.is_given(key) and key not in self.sources:
            return next(s.place for name, s in self.sources.items() if name.startswith(f"{key}."))
        source = self.source(key)
        return "" if source.kind == "default" else source.place

    def to_toml(self) -> str:
        """The whole config as a TOML file that gives the same plans on its own, with sources as comments.

        It loads to the same values, but for later defaults that nobody wrote and that wait for a feature not built yet:
        those are comments, because training refuses what is written and only warns of what is implied.
        """
        lines: list[str] = []
        held_back = implied_unbuilt(self)
        for section in type(self.dialect).model_fields:
            body = []
            for key in (k for k in keys().values() if k.section == section):
                value = self.value(key.name)
                if key.name in _NOT_WRITTEN or value is None or value == {} or self.superseded(key.name):
                    continue
                source = self.source(key.name)
                if key.is_table:
                    body += [f"{key.field}.{quote_key(name)} = {quote(item)}" for name, item in value.items()]
                elif key.name in held_back:
                    body.append(f"# {key.field} = {quote(value)}  # default of the later dialect, not built yet")
                else:
                    note = "" if source.kind == "default" else f"  # {source}"
                    body.append(f"{key.field} = {quote(value)}{note}")
            if body:
                lines += [f"[{section}]", *body, ""]
        return "\n".join(lines)

    def superseded(self, key: str) -> bool:
        """Whether a key that nobody wrote gave way to another way of saying the same."""
        return not self.is_given(key) and any(
            key in group and any(self.is_given(other) and self.value(other) is not None for other in group)
            for group in EXCLUSIVE
        )


_NOT_WRITTEN = ("job.config_file", "job.extends", "job.dialect")


def independent(found: Iterable[Problem], earlier: Iterable[Problem], config: JobConfig) -> list[Problem]:
    """Those of `found` that are no mere consequence of an earlier problem.

    A wrong key is left at what lies below it, usually its default, so that later checks can run at all: what they say
    about such a key, or about keys that a file which cannot be read may set, is not worth a user's time.
    """
    doubts = {key for problem in earlier for key in problem.keys}
    a_file_is_lost = bool(doubts & {"job.config_file", "job.extends"})

    def doubtful(key: str) -> bool:
        if any(doubt == key or doubt.startswith(f"{key}.") for doubt in doubts):
            return True
        return not config.is_given(key) and (a_file_is_lost or key.partition(".")[0] in doubts)

    return [problem for problem in found if not any(map(doubtful, problem.keys))]
