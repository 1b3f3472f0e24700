"""The files of a local path: a file, a folder or a pattern.

The rules are those of `titanlite.data.choose_files`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from titanlite.data import DataError
from titanlite.data.choose_files import choose, named_files
from titanlite.data.file_kinds import why_no_text
from titanlite.data.listing import FoundFile, Listing, Place


def list_text(place: Place) -> Listing:
    """Return the text of a file, pattern or folder.

    Raises DataError, naming the config's key, if there is none or the choice is unclear.
    """
    path = Path(place.path)
    if path.is_file():
        return named_files([_found(path, path.parent)], place)
    if path.is_dir():
        found: list[FoundFile] = []
        for file in sorted(all_files(path)):
            relative = file.relative_to(path).as_posix()
            if why_no_text(relative) is not None:
                found.append(FoundFile(str(file), relative))
            elif file.is_file():
                found.append(FoundFile(str(file), relative, _size(file)))
            else:
                raise DataError(
                    f"{file} is a link to a file that does not exist; copy the file, or remove the "
                    "link"
                )
        return choose(found, place)
    # A pattern with two ** finds a file several times.
    matches = {Path(name) for name in glob.iglob(str(path), recursive=True)}
    files = sorted(file for file in matches if file.is_file())
    if not files:
        hint = ""
        if not path.is_absolute():
            name = place.key.removesuffix("_path").removesuffix(".path")
            where = f"looked from {Path.cwd()}"
            hint = f" ({where}; a data set of the Hugging Face hub is named by {name})"
        raise DataError(
            f"{place.key}: {path} does not exist{hint}; give a file, a pattern or a folder of text"
        )
    return named_files([_found(file, _fixed_part(path)) for file in files], place)


def _fixed_part(pattern: Path) -> Path:
    return next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))


def _found(file: Path, folder: Path) -> FoundFile:
    return FoundFile(str(file), file.relative_to(folder).as_posix(), _size(file))


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None  # the error comes when it is read


def all_files(path: Path) -> Iterator[Path]:
    """Yield the files of a folder and all subfolders, also behind links, each folder once.

    Folders whose names begin with a dot are left out.
    """
    seen: set[str] = set()
    for folder, subfolders, names in os.walk(path, followlinks=True):
        place = os.path.realpath(folder)
        if place in seen:
            subfolders.clear()
            continue
        seen.add(place)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in names)
