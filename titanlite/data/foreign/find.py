"""The token files of a path: one file, those of a pattern or of a folder.

A folder has the rules of text (`titanlite.data.choose_files`): one kind, one level, one split.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.choose_files import choose_among, named_files
from titanlite.data.connection_check import COPY
from titanlite.data.file_kinds import is_hidden
from titanlite.data.listing import FoundFile, Listing, Place
from titanlite.data.local_files import all_files
from titanlite.data.token_paths import SUFFIXES, pair_of

MEGATRON = "Megatron-LM's .bin and .idx"


def find_tokens(place: Place) -> Listing:
    """Return the token files of a path, in order.

    Raises DataError, naming the config's key, if there is none or the choice is unclear.
    """
    if is_url(place.path):
        name = public_name(place.path)
        raise DataError(f"{place.key}: token files are read from a disk, not from {name}; {COPY}")
    path = Path(place.path)
    is_folder = path.is_dir()
    if is_folder:
        files = [_found(file, path) for file in all_files(path)]
        files = [one for one in files if not any(map(is_hidden, Path(one.relative).parts))]
    else:
        files = _named(path, place.key)
    files.sort(key=lambda file: PurePosixPath(file.relative).parts)
    names = {file.relative for file in files}
    tokens: list[FoundFile] = []
    others: list[str] = []
    for file in files:
        kind = _kind_of(file.relative, names)
        if kind is not None:
            tokens.append(file._replace(stated_kind=kind))
        elif _suffix(file.relative) != ".bin":
            others.append(file.relative)
    if not tokens and not is_folder:
        # Named as tokens, by `format` of a source.
        tokens = [file._replace(stated_kind="tokens") for file in files]
    if not tokens:
        endings = ", ".join(SUFFIXES)
        raise DataError(f"{place.key}: {path} holds no token files; expected names in {endings}")
    if not is_folder:
        return named_files(tokens, place)
    return choose_among(tokens, place, {"other kinds of files": others} if others else {})


def _kind_of(relative: str, names: Collection[str]) -> str | None:
    """None also for the second file of Megatron-LM's pair."""
    suffix = _suffix(relative)
    if suffix == ".idx":
        return MEGATRON
    if suffix == ".bin" and str(pair_of(Path(relative))[1]) in names:
        return None
    return f"tokens in {suffix}" if suffix in SUFFIXES else None


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _named(path: Path, key: str) -> list[FoundFile]:
    matches = [path]
    if not path.is_file():
        matches = [Path(name) for name in glob.iglob(str(path), recursive=True)]
    files = {file for file in matches or pair_of(path) if file.is_file()}
    if not files:
        raise DataError(f"{key}: {path} does not exist; give a token file, a pattern or a folder")
    pairs = [pair_of(file) for file in files if file.suffix in (".bin", ".idx")]
    files |= {file for pair in pairs for file in pair if file.is_file()}
    root = Path(os.path.commonpath([file.parent for file in files]))
    return [_found(file, root) for file in files]


def _found(file: Path, root: Path) -> FoundFile:
    return FoundFile(str(file), file.relative_to(root).as_posix(), file.stat().st_size)
