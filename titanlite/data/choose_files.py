"""Which files of a folder are its text: known by name, of one kind, on one level, of one split.

The same rules serve local folders, folders of stores, and the files that a pattern finds. A folder
that leaves a choice is refused, with the candidates. Nothing here imports numpy: the check of a
config asks, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from titanlite.config.toml import quote
from titanlite.data import DataError
from titanlite.data.file_kinds import KINDS, Format, why_no_text
from titanlite.data.listing import FoundFile, Listing, Place, UnclearTextError, some_of
from titanlite.data.split_names import ALL_SPLITS, SPLIT_WORDS, are_apart, split_of
from titanlite.utils import counted, logger

#: Reason → files, below their folder, that are not read for it.
_Passed = dict[str, list[str]]


def choose(found: Sequence[FoundFile], place: Place) -> Listing:
    """Return the text among the files of a folder.

    Raises DataError without text, and UnclearTextError if the choice is unclear.
    """
    passed: _Passed = {}
    texts = _kept(found, lambda file: why_no_text(file.relative), passed)
    if place.reader != "source":
        code = f'source code, which {place.key_of("format")} = "source" reads'
        texts = _kept(texts, lambda file: code if file.is_source else None, passed)
        if any(file.kind and file.kind.has_records for file in texts):
            texts = _kept(texts, lambda file: "documentation" if file.is_markup else None, passed)
    # All of them where no name tells the format.
    if any(_is_of(file, place.reader) for file in texts):
        other = f"not of format {place.reader}"
        texts = _kept(texts, lambda file: None if _is_of(file, place.reader) else other, passed)
    if not texts:
        there = "; ".join(f"{reason}: {some_of(names)}" for reason, names in passed.items())
        kinds = [kind for kind in KINDS if kind.reader != "source"]
        endings = ", ".join(suffix for kind in kinds for suffix in kind.suffixes)
        raise DataError(
            f"{place.key}: the folder {place.path} holds no text{there and f' (there are {there})'}"
            f"; expected names in {endings}, also with .gz or .zst. A pattern reads files with "
            "other names"
        )
    return choose_among(texts, place, passed)


def _kept(
    files: Sequence[FoundFile], reason_of: Callable[[FoundFile], str | None], passed: _Passed
) -> list[FoundFile]:
    kept: list[FoundFile] = []
    for file in files:
        reason = reason_of(file)
        if reason is None:
            kept.append(file)
        else:
            passed.setdefault(reason, []).append(file.relative)
    return kept


def choose_among(texts: Sequence[FoundFile], place: Place, passed: _Passed) -> Listing:
    """Return the files of the wanted split, and add the others to `passed`.

    Raises UnclearTextError for several splits, kinds or levels.
    """
    texts = _of_split(texts, place, passed)
    several = _differences(texts, place)
    if several:
        reason = f"the folder {place.path} holds text {' and '.join(several)}"
        raise UnclearTextError(place.key, reason, _candidates(texts, place))
    return _listing(texts, passed, place.split, {})


def named_files(found: Sequence[FoundFile], place: Place) -> Listing:
    """Return the files that are named or match a pattern, of the wanted split if any.

    Raises UnclearTextError if there is none of that split.
    """
    passed: _Passed = {}
    texts = _of_split(found, place, passed)
    splits = Counter(split or "no split" for split in _splits_of(found, place))
    is_mixed = place.split is None and are_apart(splits)
    return _listing(texts, passed, place.split, splits if is_mixed else {})


def listing_of(names: Sequence[str], split: str | None) -> Listing:
    """Return files found by other rules, in their order."""
    return _listing([FoundFile(name, name.partition("?")[0]) for name in names], {}, split, {})


def _listing(
    texts: Sequence[FoundFile],
    passed: Mapping[str, Sequence[str]],
    split: str | None,
    mixed_splits: Mapping[str, int],
) -> Listing:
    empty = [file.relative for file in texts if file.size == 0]
    if empty:
        logger.warning(f"{some_of(empty)}: empty files add nothing to the text")
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
        mixed_splits=dict(mixed_splits),
        stamps=tuple(file.stamp for file in texts),
    )


def _is_of(file: FoundFile, reader: Format) -> bool:
    if file.kind is None:
        return False
    return file.kind.reader == reader or reader == "source" and file.is_markup


def _of_split(texts: Sequence[FoundFile], place: Place, passed: _Passed) -> list[FoundFile]:
    """Files without the name of a split belong to train."""
    if place.split in (None, ALL_SPLITS):
        return list(texts)
    wanted = SPLIT_WORDS.get(place.split.lower(), place.split) if place.split else ""
    splits = _splits_of(texts, place)
    if wanted == "train" and not any(splits):
        return list(texts)
    if wanted not in splits:
        known = ", ".join(dict.fromkeys(split for split in splits if split))
        has = "no name of a file or folder holds one, so all of them are of train"
        if known:
            has = f"it has {known}"
        raise UnclearTextError(place.key, f"{place.path} has no split {quote(place.split)}; {has}")
    reasons = [f"split {split}" if split else "without a split" for split in splits]
    reason_of: dict[FoundFile, str | None] = dict(zip(texts, reasons, strict=True))
    reason_of |= {file: None for file, split in zip(texts, splits, strict=True) if split == wanted}
    return _kept(texts, reason_of.__getitem__, passed)


def _splits_of(texts: Sequence[FoundFile], place: Place) -> list[str | None]:
    """Names in a code base, such as `test_x.py`, tell no split."""
    is_code = place.reader == "source"
    return [None if is_code or file.is_source else split_of(file.relative) for file in texts]


def _differences(texts: Sequence[FoundFile], place: Place) -> list[str]:
    found: list[str] = []
    if place.split is None and are_apart({split or "" for split in _splits_of(texts, place)}):
        found.append("of several splits")
    if place.reader == "source":
        return found
    if len({file.kind_name for file in texts}) > 1:
        found.append("of several kinds")
    if len({file.is_direct for file in texts}) > 1:
        found.append("on two levels")
    return found


def _candidates(texts: Sequence[FoundFile], place: Place) -> list[str]:
    groups: dict[str, list[str]] = {}
    for file, split in zip(texts, _splits_of(texts, place), strict=True):
        about = file.kind_name
        if split:
            about += f", split {split}"
        if not file.is_direct:
            about += ", in subfolders"
        groups.setdefault(about, []).append(file.relative)
    lines = [
        f"{counted(len(names), 'files')} of {about}: {some_of(names)}"
        for about, names in groups.items()
    ]
    keys = f"{place.key_of('split')} or {place.key_of('format')}"
    return [*lines, f'choose by {keys}, or give a pattern, as "{place.path.rstrip("/")}/**/*.txt"']
