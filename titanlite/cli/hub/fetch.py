"""`titanlite data fetch`: copy files of a data set of the hub, or files behind a URL, into a
folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from titanlite.config.text_names import hub_text
from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.remote import open_file
from titanlite.data.shards import hub_files, url_files
from titanlite.utils import counted, human_bytes, human_time, not_a_link, sync

_PIECE = 8 << 20
#: Seconds for a source to come back.
PATIENCE = 300.0


def fetch(
    source: str, out: Path, numbers: str | None, subset: str | None = None, split: str | None = None
) -> str:
    """Copy the files of `source`, a name or id of the hub or a URL, into the folder `out`; return a
    summary.

    numbers: which of them, as "0-3,7"; None: all. Files that are there in whole are left alone; a
    part is continued. Raises DataError for a source without files, and one that has not come back
    in `PATIENCE` seconds.
    """
    names = _files_of(source, subset, split)
    if numbers is not None:
        names = [names[number] for number in _numbers(numbers, len(names))]
    targets = [out / os.path.basename(public_name(name)) for name in names]
    if len(set(targets)) < len(targets):
        raise DataError(
            f"SOURCE: several files of {source} have the same name; fetch its subfolders one by one"
        )
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    copied = 0
    for number, (name, target) in enumerate(zip(names, targets, strict=True), 1):
        place = f"{number} of {len(names)}: {target}"
        if target.exists():
            print(f"{place} is there")
            continue
        size = _copy(name, target)
        copied += size
        print(f"{place}, {human_bytes(size)}", flush=True)
    took = human_time(time.monotonic() - began)
    return (
        f"{counted(len(names), 'files')} in {out}, {human_bytes(copied)} in {took}; train with "
        f"--training.dataset_path={out}"
    )


def _files_of(source: str, subset: str | None, split: str | None) -> Sequence[str]:
    """Return the names of all files of a source. Raises DataError."""
    text = hub_text(source)
    if text is not None:
        return hub_files(text, subset, split, "SOURCE")[0]
    if not is_url(source):
        raise DataError(f"SOURCE: {source} is no name or id of the hub and no URL")
    return url_files(source, "SOURCE")


def _numbers(text: str, count: int) -> list[int]:
    found: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if match is None:
            raise DataError(f"--files: expected numbers as 0-3,7, got {text!r}")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not found or max(found) >= count:
        raise DataError(
            f"--files: {text} is not within the {counted(count, 'files')}, 0 to {count - 1}"
        )
    return list(dict.fromkeys(found))


def _copy(name: str, target: Path) -> int:
    """Copy a file by way of a partial one, which a later try continues; return its bytes."""
    try:
        with open_file(name, PATIENCE) as source:
            # Its name tells the content: parts of two versions must not become one file.
            content = hashlib.sha256(f"{name} {source.raw.identity}".encode()).hexdigest()[:8]
            partial = target.with_name(f"{target.name}.{content}.partial")
            with open(partial, "ab", opener=not_a_link) as copy:
                source.seek(copy.tell())
                shutil.copyfileobj(source, copy, _PIECE)
                sync(copy)
    except DataError as error:
        raise DataError(f"{error}; the same command continues") from error
    size = partial.stat().st_size
    partial.replace(target)
    return size
