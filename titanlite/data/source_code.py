"""When files of source code are a text, and which files beside them belong to it.

`kinds.LANGUAGES` has their suffixes. Imported where a folder holds such files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from titanlite.data.splits import SPLIT_WORDS

if TYPE_CHECKING:
    from titanlite.data.listing import FoundFile

#: The largest share of source code, in bytes of the text beside it, that is passed over.
SCRIPTS_SHARE = 0.1


def is_code_base(files: Sequence[FoundFile]) -> bool:
    """Return whether files are source code and the markup that documents it."""
    if not any(file.is_source for file in files):
        return False
    return all(file.is_code_or_markup for file in files)


def are_scripts(files: Sequence[FoundFile]) -> bool:
    """Return whether the source code among files is so little that it is no part of their text.

    A file without a known size counts as empty.
    """
    code = 0
    rest = 0
    others = False
    for file in files:
        if file.is_source:
            code += file.size or 0
        elif not file.is_code_or_markup:
            others = True
            rest += file.size or 0
    return others and code <= SCRIPTS_SHARE * rest


def splits_of_code(files: Sequence[FoundFile]) -> list[str | None]:
    """Return the split of each file of a code base; None: it has none.

    Words in names tell none, as in `test_x.py`. Folders do, if all files lie in such folders and
    one of these is of the split train.
    """
    first = [PurePosixPath(file.relative).parts[0].lower() for file in files]
    splits = [SPLIT_WORDS.get(folder) for folder in first]
    if None in splits or "train" not in splits or any(file.is_direct for file in files):
        return [None] * len(splits)
    return splits
