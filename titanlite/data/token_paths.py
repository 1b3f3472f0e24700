"""Which paths are of token files. Nothing here imports numpy: the check of a config asks, too."""

from __future__ import annotations

import os
from pathlib import Path

from titanlite.config.data_sections import DataSource
from titanlite.config.urls import is_url, public_name

INDEX = "index.json"
KIND = "titanlite tokens"
#: Ends of the names of other programs' token files, also as the end of a pattern or a URL.
SUFFIXES = (".npy", ".bin", ".ds", ".idx")


def is_tokens(path: str | None) -> bool:
    """Return whether a path is a prepared folder, perhaps unfinished, or another program's tokens.

    The URL of a folder tells nothing.
    """
    if path is None:
        return False
    if is_url(path):
        return public_name(path).lower().endswith(SUFFIXES)
    place = Path(path)
    if not place.is_dir():
        return place.suffix.lower() in SUFFIXES or (
            not place.is_file() and pair_of(place)[1].is_file()
        )
    if is_index(place / INDEX) or any(place.glob("part-*.tokens")):
        return True
    names = [name for name in os.listdir(place) if name[0] != "."]
    is_text = any(".json" in name or name.endswith((".parquet", ".arrow")) for name in names)
    return not is_text and any(name.lower().endswith(SUFFIXES) for name in names)


def is_of_tokens(source: DataSource) -> bool:
    """Return whether a source is of token files, by format or path."""
    return source.format == "tokens" or source.format == "auto" and is_tokens(source.path)


def pair_of(path: Path) -> tuple[Path, Path]:
    """Return Megatron's two files; `path` may name either, or lack a suffix."""
    stem = path.name.removesuffix(".bin").removesuffix(".idx")
    return path.with_name(f"{stem}.bin"), path.with_name(f"{stem}.idx")


def is_index(file: Path | str) -> bool:
    """Return whether a file is the index of a prepared folder."""
    try:
        with open(file, "rb") as stream:
            return KIND.encode() in stream.read(200)
    except OSError:
        return False
