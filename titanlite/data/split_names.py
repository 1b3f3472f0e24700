"""Which split of a data set the name of a file or folder tells, as `datasets` finds it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

#: Splits by the whole words that stand for them in names of files and folders, as in `datasets`.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
#: Splits that training must not read together with others.
HELD_OUT = ("validation", "test")
#: Value of a key `split` that takes the files of all splits.
ALL_SPLITS = "all"

#: Between words of a name, as in `datasets`.
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")
#: A part of a split as `datasets` writes it: what stands before the numbers names the split, as
#: `train_sft`.
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\b.*")


def split_of(relative: str) -> str | None:
    """Return the split that a path below a folder names, if any.

    A part `NAME-00000-of-00002` is of the split NAME if that holds a word of a split. Else folders
    go before the file.
    """
    *folders, name = PurePosixPath(relative).parts
    shard = _SHARD.fullmatch(name)
    if shard:
        split = _split_word(shard[1].replace("_", "-"))
        if split:
            return split if shard[1].lower() in SPLIT_WORDS else shard[1]
    for part in (*folders, name):
        split = _split_word(part)
        if split:
            return split
    return None


def holds_out(splits: Iterable[str]) -> bool:
    """Return whether one of these splits is held out from training."""
    return any(_split_word(split) in HELD_OUT for split in splits)


def are_apart(splits: Collection[str]) -> bool:
    """Return whether several splits must not be read together, as one is held out."""
    return len(splits) > 1 and holds_out(splits)


def words_of(name: str) -> list[str]:
    """Return the parts of a name between signs and numbers."""
    return _BETWEEN_WORDS.split(name)


def _split_word(name: str) -> str | None:
    for word in words_of(name.replace("_", "-").lower()):
        if word in SPLIT_WORDS:
            return SPLIT_WORDS[word]
    return None
