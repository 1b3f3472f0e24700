"""Warnings of files that add nothing to a text: without rows, or with white space alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from titanlite.config.urls import public_name
from titanlite.data.records import Record
from titanlite.utils import counted, logger

#: Files that this process has warned of: a stream reads them once per epoch.
_known: set[str] = set()


def watched(
    records: Iterator[Record], name: Path | str, is_shared: bool = False
) -> Iterator[Record]:
    """Iterate over the records of a file, and warn if none holds text.

    With `is_shared` all ranks read it, and rank 0 warns alone.
    """
    blank = 0
    for record in records:
        yield record
        if record.text.strip() or record.prompt is None or record.prompt.strip():
            yield from records
            return
        blank += 1
    level = logging.WARNING
    if is_shared and os.environ.get("RANK", "0") != "0":
        level = logging.INFO
    shown = public_name(str(name))
    if shown in _known:
        return
    _known.add(shown)
    what = "no rows, or empty lines alone"
    if blank:
        what = f"white space alone in {counted(blank, 'records')}"
    logger.log(level, f"{shown} adds nothing to the text: it holds {what}")
