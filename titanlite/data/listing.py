"""The files found for a text, and the error for a folder that holds several candidates.

`titanlite.data.choose_files` has the rules. The check of a config asks, too: no numpy here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from titanlite.data import DataError
from titanlite.data.file_kinds import Format, Kind, kind_of_name
from titanlite.utils import counted, human_bytes

#: Names that a report shows of each group.
_SHOWN = 3


class UnclearTextError(DataError):
    """Several files could be meant, or none is of the wanted split."""

    def __init__(self, key: str, reason: str, lines: Sequence[str] = ()) -> None:
        self.key, self.reason, self.lines = key, reason, tuple(lines)
        super().__init__("\n".join([f"{key}: {reason}", *(f"  {line}" for line in lines)]))


class FoundFile(NamedTuple):
    """A file of a folder, at `relative` below it, with slashes.

    `size` is in bytes. `stamp` is what a store tells of it. `stated_kind` says a kind that is no
    text.
    """

    name: str
    relative: str
    size: int | None = None
    stamp: str = ""
    stated_kind: str | None = None

    @property
    def base(self) -> str:
        return PurePosixPath(self.relative).name

    @property
    def kind(self) -> Kind | None:
        return kind_of_name(self.base)

    @property
    def kind_name(self) -> str:
        if self.stated_kind is not None:
            return self.stated_kind
        kind = self.kind
        return "another kind" if kind is None else kind.name

    @property
    def is_source(self) -> bool:
        return self.kind is not None and self.kind.reader == "source"

    @property
    def is_markup(self) -> bool:
        return self.kind is not None and self.kind.describes_records

    @property
    def is_direct(self) -> bool:
        return "/" not in self.relative


@dataclass(frozen=True)
class Listing:
    """The files of a text in the order of reading, and those beside them."""

    files: tuple[str, ...]
    #: Name of a kind → number of files.
    kinds: Mapping[str, int]
    #: Bytes of the files; None: not known.
    size: int | None
    split: str | None
    #: Reason → names, below the folder, of the files that are not read.
    passed_over: Mapping[str, tuple[str, ...]]
    #: Split → number of files, where a pattern finds those of several.
    mixed_splits: Mapping[str, int]
    #: The store's tag of each file; "": none.
    stamps: tuple[str, ...] = ()

    def describe(self) -> str:
        kinds = [f"{counted(count, 'files')} of {name}" for name, count in self.kinds.items()]
        text = ", ".join(kinds)
        if self.size is not None:
            text += f" ({human_bytes(self.size)})"
        if self.split:
            text += f", split {self.split}"
        if self.passed_over:
            passed = [f"{some_of(names)} ({why})" for why, names in self.passed_over.items()]
            text += f"; passed over: {', '.join(passed)}"
        return text

    def warning(self) -> str | None:
        if not self.mixed_splits:
            return None
        splits = self.mixed_splits.items()
        found = ", ".join(f"{split} ({counted(count, 'files')})" for split, count in splits)
        return f"the pattern finds files of several splits, which are read together: {found}"


@dataclass(frozen=True)
class Place:
    """A folder, file or pattern as the config names it, with the wanted split and reader.

    `key` is that of the config, or SOURCE of a command.
    """

    path: str
    key: str = "training.dataset_path"
    split: str | None = None
    reader: Format = "auto"

    def key_of(self, field: Literal["split", "format"]) -> str:
        table = self.key.rpartition(".")[0]
        if not table:
            return f"--{field}"
        return f"{'data' if table == 'training' else table}.{field}"


def some_of(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown
