"""What tells the files of a text from others that take their place: size, and tag or time.

The fingerprint of a text that was read as a whole, and of a prepared folder, is of its content.
That of a stream is of names alone, and that of other token files of samples. So checkpoints keep
these, and a file of another size or tag ends the resume.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from titanlite.config.urls import is_url, public_name
from titanlite.data.listing import some_of
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.data.rows import Rows

#: Entry of the train state.
TEXT_FILES = "text_files"
#: Stands for what is not known.
_UNKNOWN = "-"


@dataclass(frozen=True)
class FileStamps:
    """Names (paths and URLs) of the files of one text, and their stamps."""

    names: tuple[str, ...]
    stamps: tuple[str, ...]

    def entries(self) -> list[str]:
        """Return stamps and names without folders, as checkpoints keep them."""
        pairs = zip(self.stamps, self.names, strict=True)
        return [f"{stamp} {_base(name)}" for stamp, name in pairs]


def stamp_of(size: object, tag: object = None, time: object = None) -> str:
    """Return size, tag of the content and time of the last change on one line."""
    if isinstance(time, datetime):
        time = time.isoformat()
    known = (size, str(tag or "").removeprefix("W/"), time)
    parts = ["" if one is None else "_".join(str(one).split()) for one in known]
    return " ".join(part or _UNKNOWN for part in parts)


def local_stamps(names: Sequence[str]) -> tuple[str, ...]:
    """Return stamps of local files; those of URLs and unreadable files are empty."""
    found = []
    for name in names:
        stamp = stamp_of(None)
        if not is_url(name):
            try:
                stat = os.stat(name)
                stamp = stamp_of(stat.st_size, time=stat.st_mtime_ns)
            except OSError:
                # The error comes when it is read.
                pass
        found.append(stamp)
    return tuple(found)


def record(rows: Rows) -> dict[str, Any]:
    """Return the train state's entry for a run's text; {} if nothing is known."""
    return {source: {"files": stamps.entries()} for source, stamps in _texts(rows)}


def difference(saved: Any, rows: Rows) -> str:
    """Return in words which files were replaced since a checkpoint; "" if none.

    `saved` is what `record` returned then, or anything else. Files that may have been copied get a
    warning.
    """
    known = saved if isinstance(saved, Mapping) else {}
    replaced: list[str] = []
    touched: list[str] = []
    for source, files in _texts(rows):
        before = known.get(source)
        entries = before.get("files") if isinstance(before, Mapping) else None
        if not isinstance(entries, list):
            continue
        for entry, name, stamp in zip(entries, files.names, files.stamps, strict=False):
            then = str(entry).split(" ", 3)
            if len(then) < 4 or then[3] != _base(name):
                continue
            now = stamp.split(" ")
            changes = [
                f"{what} ({old}, now {new})"
                for what, old, new in zip(("size", "tag"), then, now, strict=False)
                if _UNKNOWN not in (old, new) and old != new
            ]
            if changes:
                replaced.append(f"{public_name(name)} has another {changes[0]}")
            elif now[1] == _UNKNOWN and then[2] != now[2]:
                touched.append(public_name(name))
    if touched:
        logger.warning(
            f"{some_of(touched)} were written again since the checkpoint, and have the same size. "
            "If their text is another one, the resume is not exact"
        )
    return some_of(replaced)


def _texts(rows: Rows) -> Iterator[tuple[str, FileStamps]]:
    for source, text in rows.texts().items():
        if text.stamps is not None:
            yield source, text.stamps


def _base(name: str) -> str:
    return os.path.basename(public_name(name))
