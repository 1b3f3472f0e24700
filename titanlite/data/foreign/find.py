"""The token files of a path: one file, those of a pattern or of a folder, local or behind a URL.

A folder has the rules of text (`titanlite.data.choose`): one kind, one level, one split.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.choose import choose_among, named_files
from titanlite.data.kinds import is_hidden
from titanlite.data.listing import FoundFile, Listing, Place
from titanlite.data.local_files import all_files
from titanlite.data.token_paths import SUFFIXES, pair_of

MEGATRON = "Megatron-LM's .bin and .idx"


@dataclass(frozen=True)
class Found:
    """The token files of a path, in order, and the sizes of all files there by path or URL."""

    listing: Listing
    sizes: Mapping[str, int]

    @property
    def is_megatron(self) -> bool:
        return MEGATRON in self.listing.kinds


def find_tokens(place: Place) -> Found:
    """Return the token files of a path.

    Raises DataError, naming the config's key, where there are none, or a folder leaves open which
    are meant. A store that cannot be asked raises it too.
    """
    files, is_folder = _remote(place) if is_url(place.path) else _local(place)
    if is_folder:
        files = [file for file in files if not _is_hidden(file.relative)]
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
        raise DataError(
            f"{place.key}: {public_name(place.path)} holds no token files; expected names in "
            f"{endings}"
        )
    if is_folder:
        passed = {"other kinds of files": others} if others else {}
        listing = choose_among(tokens, place, passed)
    else:
        listing = named_files(tokens, place)
    sizes = {file.name: file.size for file in files if file.size is not None}
    return Found(listing, sizes)


def _kind_of(relative: str, names: Collection[str]) -> str | None:
    """Return the kind of token files that a name stands for.

    None: none, or the second file of Megatron-LM's pair.
    """
    suffix = _suffix(relative)
    if suffix == ".idx":
        return MEGATRON
    if suffix == ".bin" and str(pair_of(Path(relative))[1]) in names:
        return None
    return f"tokens in {suffix}" if suffix in SUFFIXES else None


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _is_hidden(relative: str) -> bool:
    return any(map(is_hidden, PurePosixPath(relative).parts))


# Where files are


def _local(place: Place) -> tuple[list[FoundFile], bool]:
    """Return the files of a local path with those beside them, and whether it is a folder."""
    path = Path(place.path)
    if path.is_dir():
        return [_found(file, path) for file in all_files(path)], True
    matches = [path]
    if not path.is_file():
        matches = [Path(name) for name in glob.iglob(str(path), recursive=True)]
    files = {file for file in matches or pair_of(path) if file.is_file()}
    if not files:
        raise DataError(
            f"{place.key}: {path} does not exist; give a token file, a pattern or a folder"
        )
    pairs = [pair_of(file) for file in files if file.suffix in (".bin", ".idx")]
    files |= {file for pair in pairs for file in pair if file.is_file()}
    root = Path(os.path.commonpath([file.parent for file in files]))
    return [_found(file, root) for file in files], False


def _found(file: Path, root: Path) -> FoundFile:
    return FoundFile(str(file), file.relative_to(root).as_posix(), file.stat().st_size)


def _remote(place: Place) -> tuple[list[FoundFile], bool]:
    from titanlite.data.shards import remote_tokens

    return remote_tokens(place)
