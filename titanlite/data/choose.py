"""Which files of a folder are its text: known by name, of one kind, on one level, of one split.

The same rules serve local folders, folders of stores, and the files that a pattern finds. A folder
that leaves a choice is refused, with the lines that make it. Nothing here imports numpy: the check
of a config asks, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from titanlite.config.toml import quote
from titanlite.data import DataError
from titanlite.data.kinds import COMPRESSED, KINDS, is_hidden, why_no_text
from titanlite.data.listing import FoundFile, Listing, Place, UnclearTextError, some_of
from titanlite.data.splits import ALL_SPLITS, SPLIT_WORDS, are_apart, split_of

#: Reason → files, below their folder, that are not read for it.
_Passed = dict[str, list[str]]


def choose(found: Sequence[FoundFile], place: Place) -> Listing:
    """Return the text among the files of a folder.

    Raises UnclearTextError where files of several splits, kinds or levels could be meant, or none
    is of the split. Raises DataError where there is no text.
    """
    passed: _Passed = {}
    texts: list[FoundFile] = []
    for file in found:
        reason = _why_not(file)
        if reason is None:
            texts.append(file)
        else:
            passed.setdefault(reason, []).append(file.relative)
    texts = _without_descriptions(texts, passed)
    texts = _of_reader(texts, place, passed)
    if not texts:
        raise DataError(f"{place.key}: the folder {place.path} holds no text{_why_empty(passed)}")
    return choose_among(texts, found, place, passed)


def choose_among(
    texts: Sequence[FoundFile], found: Sequence[FoundFile], place: Place, passed: _Passed
) -> Listing:
    """Return those of the wanted split. found: all files of the folder. passed: gets the others.

    Raises UnclearTextError where the files are of several splits, kinds or levels.
    """
    texts = _of_split(texts, place, passed)
    if _are_several(texts, place):
        from titanlite.data.text_choices import unclear

        raise unclear(texts, found, place)
    return _listing(texts, passed, place.split)


def named_files(found: Sequence[FoundFile], place: Place) -> Listing:
    """Return the files that are named or found by a pattern: all, or those of the wanted split.

    Raises UnclearTextError if there is none of that split.
    """
    passed: _Passed = {}
    texts = _of_split(found, place, passed)
    if place.split is not None:
        return _listing(texts, passed, place.split)
    splits = Counter(split_of(file.relative) or "no split" for file in found)
    if not are_apart(splits):
        return _listing(texts, passed, None)
    return _listing(texts, passed, None, splits)


def listing_of(names: Sequence[str], split: str | None) -> Listing:
    """Return files that were found by other rules, in their order."""
    return _listing([FoundFile(name, name.partition("?")[0]) for name in names], {}, split)


def _listing(
    texts: Sequence[FoundFile],
    passed: Mapping[str, Sequence[str]],
    split: str | None,
    mixed_splits: Mapping[str, int] | None = None,
) -> Listing:
    sizes = [file.size for file in texts]
    size = None
    if None not in sizes:
        size = sum(size for size in sizes if size)
    return Listing(
        files=tuple(file.name for file in texts),
        kinds=dict(Counter(file.kind_name for file in texts)),
        size=size,
        split=split,
        passed_over={reason: tuple(sorted(names)) for reason, names in passed.items()},
        mixed_splits=dict(mixed_splits or {}),
    )


def _why_not(file: FoundFile) -> str | None:
    folders = PurePosixPath(file.relative).parts[:-1]
    if any(map(is_hidden, folders)):
        return "hidden"
    return why_no_text(file.base)


def _why_empty(passed: _Passed) -> str:
    """Return what there is instead of text, and what is expected."""
    there = "; ".join(f"{reason}: {some_of(names)}" for reason, names in passed.items())
    endings = ", ".join(suffix for kind in KINDS for suffix in kind.suffixes)
    expected = f"; expected names in {endings}, also with {' or '.join(COMPRESSED)}"
    if not there:
        return expected
    return f" (there are {there}){expected}"


def _without_descriptions(texts: Sequence[FoundFile], passed: _Passed) -> list[FoundFile]:
    """Return the files without those that describe the records beside them."""
    has_records = any(file.kind and file.kind.has_records for file in texts)
    kept: list[FoundFile] = []
    for file in texts:
        if has_records and file.kind and file.kind.describes_records:
            passed.setdefault("documentation", []).append(file.relative)
        else:
            kept.append(file)
    return kept


def _of_reader(texts: list[FoundFile], place: Place, passed: _Passed) -> list[FoundFile]:
    """Return the files of the format that is asked for; all of them where no name tells that
    format.
    """
    kept: list[FoundFile] = []
    others: list[str] = []
    for file in texts:
        if file.kind and file.kind.reader == place.reader:
            kept.append(file)
        else:
            others.append(file.relative)
    if not kept:
        return texts
    if others:
        passed[f"not of format {place.reader}"] = others
    return kept


def _of_split(texts: Sequence[FoundFile], place: Place, passed: _Passed) -> list[FoundFile]:
    """Return the files of the split that is asked for.

    Files without any name of a split are of the split train.
    """
    if place.split in (None, ALL_SPLITS):
        return list(texts)
    wanted = SPLIT_WORDS.get(place.split.lower(), place.split) if place.split else ""
    splits = [split_of(file.relative) for file in texts]
    if wanted == "train" and not any(splits):
        return list(texts)
    if wanted not in splits:
        known = ", ".join(dict.fromkeys(split for split in splits if split))
        has = "no name of a file or folder holds one, so all of them are of train"
        if known:
            has = f"it has {known}"
        raise UnclearTextError(place.key, f"{place.path} has no split {quote(place.split)}; {has}")
    kept: list[FoundFile] = []
    for file, split in zip(texts, splits, strict=True):
        if split == wanted:
            kept.append(file)
            continue
        reason = f"split {split}" if split else "without a split"
        passed.setdefault(reason, []).append(file.relative)
    return kept


def _are_several(texts: Sequence[FoundFile], place: Place) -> bool:
    """Whether the files are of several kinds, on two levels, or of splits that do not belong
    together.
    """
    kinds = {file.kind_name for file in texts}
    levels = {file.is_direct for file in texts}
    splits = {split_of(file.relative) or "" for file in texts}
    has_several_splits = place.split is None and are_apart(splits)
    return len(kinds) > 1 or len(levels) > 1 or has_several_splits
