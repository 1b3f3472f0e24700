"""Which files of a folder are its text: known by name, of one kind, on one level, of one split.

The same rules serve local folders, folders of stores, and the files that a pattern finds. A folder
that leaves a choice is refused, with the lines that make it. Nothing here imports numpy: the check
of a config asks, too.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from titanlite.config.toml import quote
from titanlite.data import DataError
from titanlite.data.kinds import (
    COMPRESSED,
    KINDS,
    Format,
    Kind,
    ending_of,
    is_hidden,
    kind_of_name,
    why_no_text,
)
from titanlite.utils import counted, human_bytes

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
#: Names that a report shows of each group.
_SHOWN = 3


class UnclearTextError(DataError):
    """A folder leaves open which of its files are meant, or has no file of the split that is asked
    for.

    `reason`, `lines`: the message without the key.
    """

    def __init__(self, key: str, reason: str, lines: Sequence[str] = ()) -> None:
        self.reason, self.lines = reason, tuple(lines)
        super().__init__("\n".join([f"{key}: {reason}", *(f"  {line}" for line in lines)]))


class FoundFile(NamedTuple):
    """A file of a folder.

    `name`: path or URL. `relative`: its path below the folder, with slashes. `size`: bytes; None:
    not known.
    """

    name: str
    relative: str
    size: int | None = None

    @property
    def base(self) -> str:
        return PurePosixPath(self.relative).name

    @property
    def kind(self) -> Kind | None:
        return kind_of_name(self.base)

    @property
    def is_direct(self) -> bool:
        """Whether it lies in the folder itself."""
        return "/" not in self.relative


@dataclass(frozen=True)
class Listing:
    """The files of a text in the order of reading, and what lies beside them."""

    files: tuple[str, ...]
    #: Name of a kind → number of files.
    kinds: Mapping[str, int]
    #: Bytes of the files; None: not known.
    size: int | None
    split: str | None
    #: Reason → names, below the folder, of the files that are not read.
    passed_over: Mapping[str, tuple[str, ...]]
    #: Split → number of files, where a pattern finds those of several.
    mixed_splits: Mapping[str, int]

    def describe(self) -> str:
        """Return what was found, and what was passed over and why, in words."""
        kinds = ", ".join(
            f"{counted(count, 'files')} of {name}" for name, count in self.kinds.items()
        )
        size = f" ({human_bytes(self.size)})" if self.size is not None else ""
        split = f", split {self.split}" if self.split else ""
        passed = [f"{_some(names)} ({reason})" for reason, names in self.passed_over.items()]
        return kinds + size + split + (f"; passed over: {', '.join(passed)}" if passed else "")

    def warning(self) -> str | None:
        """Return what is wrong with a pattern that finds files of several splits; None
        otherwise.
        """
        if not self.mixed_splits:
            return None
        found = ", ".join(
            f"{split} ({counted(count, 'files')})" for split, count in self.mixed_splits.items()
        )
        return f"the pattern finds files of several splits, which are read together: {found}"


@dataclass(frozen=True)
class Place:
    """A folder, file or pattern as the config names it.

    path: as written. key: of the config, or SOURCE of a command. split, reader: those that are
    asked for.
    """

    path: str
    key: str = "training.dataset_path"
    split: str | None = None
    reader: Format = "auto"

    @property
    def is_of_a_command(self) -> bool:
        return "." not in self.key

    @property
    def table(self) -> str:
        """Name of the table in TOML that holds the key, as `training` or `data.source[0]`."""
        return self.key.rpartition(".")[0]

    def path_line(self, pattern: str) -> str:
        """Return what to write for a pattern."""
        if self.is_of_a_command:
            return shlex.quote(pattern)
        return f"{self.key.rpartition('.')[2]} = {quote(pattern)}"

    def split_line(self, split: str) -> str:
        """Return what to write for a split."""
        return f"--split {split}" if self.is_of_a_command else f"split = {quote(split)}"

    def where(self, table: str) -> str:
        """Return where these lines go, in words."""
        if self.is_of_a_command:
            return "on the command line"
        array = re.fullmatch(r"(.+)\[(\d+)\]", table)
        return f"in [[{array[1]}]], number {int(array[2]) + 1}" if array else f"in [{table}]"


def choose(found: Sequence[FoundFile], place: Place) -> Listing:
    """Return the text among the files of a folder.

    Raises UnclearTextError where files of several splits, of several kinds, or on two levels could
    be meant, or none is of the split; DataError where there is no text.
    """
    passed: dict[str, list[str]] = {}
    texts = []
    for file in found:
        reason = _why_not(file)
        if reason is None:
            texts.append(file)
        else:
            passed.setdefault(reason, []).append(file.relative)
    texts = _without_descriptions(texts, passed)
    texts = _of_reader(texts, place, passed)
    if not texts:
        there = f" (there are {_reasons(passed)})" if passed else ""
        endings = ", ".join(suffix for kind in KINDS for suffix in kind.suffixes)
        advice = f"expected names in {endings}, also with {' or '.join(COMPRESSED)}"
        raise DataError(f"{place.key}: the folder {place.path} holds no text{there}; {advice}")
    texts = _of_split(texts, place, passed)
    _refuse_several(texts, found, place)
    return _listing(texts, passed, place.split)


def named_files(found: Sequence[FoundFile], place: Place) -> Listing:
    """Return the files that are named, or found by a pattern: all of them, or those of the split
    that is asked for.

    Raises UnclearTextError if there is none of that split.
    """
    passed: dict[str, list[str]] = {}
    texts = _of_split(found, place, passed)
    listing = _listing(texts, passed, place.split)
    if place.split is not None:
        return listing
    splits = Counter(split_of(file.relative) or "no split" for file in found)
    if len(splits) < 2 or not _holds_out(splits):
        return listing
    return Listing(
        listing.files, listing.kinds, listing.size, None, listing.passed_over, dict(splits)
    )


def listing_of(names: Sequence[str], split: str | None) -> Listing:
    """Return files that were found by other rules, in their order."""
    return _listing([FoundFile(name, name.partition("?")[0]) for name in names], {}, split)


def _why_not(file: FoundFile) -> str | None:
    folders = PurePosixPath(file.relative).parts[:-1]
    if any(map(is_hidden, folders)):
        return "hidden"
    return why_no_text(file.base)


def _without_descriptions(
    texts: Sequence[FoundFile], passed: dict[str, list[str]]
) -> list[FoundFile]:
    """Return the files without those that describe the records beside them."""
    has_records = any(file.kind and file.kind.has_records for file in texts)
    kept = []
    for file in texts:
        if has_records and file.kind and file.kind.describes_records:
            passed.setdefault("documentation", []).append(file.relative)
        else:
            kept.append(file)
    return kept


def _of_reader(
    texts: list[FoundFile], place: Place, passed: dict[str, list[str]]
) -> list[FoundFile]:
    """Return the files of the format that is asked for; all of them where no name tells that
    format.
    """
    kept = [file for file in texts if file.kind and file.kind.reader == place.reader]
    if not kept:
        return texts
    others = [file.relative for file in texts if file not in set(kept)]
    if others:
        passed[f"not of format {place.reader}"] = others
    return kept


# Splits


def split_of(relative: str) -> str | None:
    """Return the split that a path below a folder names, as `datasets` finds it; None if it names
    none.

    A part `NAME-00000-of-00002` is of the split NAME if that holds a word of a split. Else the
    words of folders go before those of the file.
    """
    *folders, name = PurePosixPath(relative).parts
    shard = _SHARD.fullmatch(name)
    if shard and (word := _split_word(shard[1].replace("_", "-"))):
        return word if shard[1].lower() in SPLIT_WORDS else shard[1]
    return next((word for part in (*folders, name) if (word := _split_word(part))), None)


def _split_word(name: str) -> str | None:
    words = _BETWEEN_WORDS.split(name.replace("_", "-").lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def _holds_out(splits: Iterable[str]) -> bool:
    """Return whether one of these splits is held out from training."""
    return any(_split_word(split) in HELD_OUT for split in splits)


def _of_split(
    texts: Sequence[FoundFile], place: Place, passed: dict[str, list[str]]
) -> list[FoundFile]:
    """Return the files of the split that is asked for.

    Files without any name of a split are of the split train.
    """
    if place.split in (None, ALL_SPLITS):
        return list(texts)
    wanted = SPLIT_WORDS.get(place.split.lower(), place.split) if place.split else ""
    splits = [split_of(file.relative) for file in texts]
    if wanted == "train" and not any(splits):
        return list(texts)
    kept = [file for file, split in zip(texts, splits, strict=True) if split == wanted]
    if not kept:
        known = ", ".join(dict.fromkeys(split for split in splits if split))
        has = (
            f"it has {known}"
            if known
            else "no name of a file or folder holds one, so all of them are of train"
        )
        raise UnclearTextError(place.key, f"{place.path} has no split {quote(place.split)}; {has}")
    for file, split in zip(texts, splits, strict=True):
        if split != wanted:
            reason = f"split {split}" if split else "without a split"
            passed.setdefault(reason, []).append(file.relative)
    return kept


# Several texts


class _Group(NamedTuple):
    """What the files of one text share."""

    split: str | None
    is_direct: bool | None
    kind: str


def _refuse_several(texts: Sequence[FoundFile], found: Sequence[FoundFile], place: Place) -> None:
    """Raise UnclearTextError unless the files are one text."""
    splits = {split_of(file.relative) or "" for file in texts}
    several_splits = place.split is None and len(splits) > 1 and _holds_out(splits)
    several_levels = len({file.is_direct for file in texts}) > 1
    groups: dict[_Group, list[FoundFile]] = {}
    for file in texts:
        split = split_of(file.relative) or "" if several_splits else None
        level = file.is_direct if several_levels else None
        kind = file.kind.name if file.kind else "another kind"
        groups.setdefault(_Group(split, level, kind), []).append(file)
    if len(groups) == 1:
        return
    kinds = len({group.kind for group in groups}) > 1
    differences = [
        *(["of several splits"] if several_splits else []),
        *(["of several kinds"] if kinds else []),
        *(["on two levels"] if several_levels else []),
    ]
    reason = f"the folder {place.path} holds text {' and '.join(differences)}"
    lines = [f"one of these lines {place.where(place.table)} says which is meant:"]
    for group, files in groups.items():
        pattern = pattern_of(files, found, place.path)
        about = _about(group, files)
        if pattern:
            lines.append(f"  {place.path_line(pattern)}  # {about}")
        else:
            lines.append(
                f"  (no single pattern finds {about}, as {files[0].relative}: move them into a "
                "folder)"
            )
    if several_splits:
        lines.append(
            f"or one of these {place.where('data' if place.table == 'training' else place.table)}:"
        )
        lines += [
            f"  {place.split_line(split)}" for split in sorted(splits, key=_split_order) if split
        ]
        lines.append(f"  {place.split_line(ALL_SPLITS)}  # the files of all splits")
    raise UnclearTextError(place.key, reason, lines)


def _split_order(split: str) -> tuple[bool, str]:
    return _holds_out([split]), split


def _about(group: _Group, files: Sequence[FoundFile]) -> str:
    """Return number, kind, level, split and size of a group of files."""
    levels = {None: "", True: ", directly in the folder", False: ", in its subfolders"}
    sizes = [file.size for file in files]
    size = "" if None in sizes else f", {human_bytes(sum(size for size in sizes if size))}"
    split = (
        "" if group.split is None else f", split {group.split}" if group.split else ", of no split"
    )
    return f"{counted(len(files), 'files')} of {group.kind}{split}{levels[group.is_direct]}{size}"


def pattern_of(files: Sequence[FoundFile], found: Sequence[FoundFile], folder: str) -> str | None:
    """Return a pattern that finds these files of all that were found, and no others; None if there
    is no simple one.
    """
    wanted = {file.relative for file in files}
    others = [file.relative for file in found if file.relative not in wanted]
    root = glob.escape(folder.rstrip("/"))
    for candidate in _candidates(sorted(wanted)):
        matches = _matcher(candidate).fullmatch
        if all(map(matches, wanted)) and not any(map(matches, others)):
            return f"{root}/{candidate}"
    return None


def _candidates(names: Sequence[str]) -> Iterator[str]:
    """Yield patterns for files, given below their folder, the simplest first.

    Brackets escape signs in names.
    """
    if len(names) == 1:
        yield glob.escape(names[0])
        return
    bases = [PurePosixPath(name).name for name in names]
    endings = set(map(ending_of, bases))
    ending = glob.escape(endings.pop()) if len(endings) == 1 else ""
    start = os.path.commonprefix(bases)
    word = re.sub(r"[\d\W_]+$", "", start)
    words = {
        split_word
        for base in bases
        for split_word in _BETWEEN_WORDS.split(base)
        if split_word in SPLIT_WORDS
    }
    ends = [f"*{ending}", f"{glob.escape(word)}*{ending}", f"{glob.escape(start)}*{ending}"]
    ends += [f"*{one}*{ending}" for one in sorted(words)]
    folders = [PurePosixPath(name).parts[:-1] for name in names]
    common = os.path.commonprefix(folders)
    below = "".join(f"{glob.escape(part)}/" for part in common)
    depths = {len(parts) - len(common) for parts in folders}
    between = [depths.pop() * "*/"] if len(depths) == 1 else []
    for step in (*between, "**/"):
        yield from (f"{below}{step}{end}" for end in ends)


def _matcher(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a pattern of `_candidates`, which stars do not lead into
    hidden names.
    """
    signs = {"**/": r"(?:[^/.][^/]*/)*", "*": r"[^/]*"}
    text = ""
    for part in re.split(r"(\*\*/|\*|\[.\])", pattern):
        text += signs.get(part) or re.escape(part[1] if re.fullmatch(r"\[.\]", part) else part)
    return re.compile(text)


# Words


def _listing(
    texts: Sequence[FoundFile], passed: Mapping[str, Sequence[str]], split: str | None
) -> Listing:
    kinds = Counter(file.kind.name if file.kind else "another kind" for file in texts)
    sizes = [file.size for file in texts]
    size = None if None in sizes else sum(one for one in sizes if one)
    left = {reason: tuple(sorted(names)) for reason, names in passed.items()}
    return Listing(tuple(file.name for file in texts), dict(kinds), size, split, left, {})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    )


def _reasons(passed: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{reason}: {_some(names)}" for reason, names in passed.items())
