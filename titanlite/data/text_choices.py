"""The error for a folder of several texts: what they are, and the line that chooses each."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from titanlite.data.kinds import Format, ending_of
from titanlite.data.listing import FoundFile, Place, UnclearTextError
from titanlite.data.splits import ALL_SPLITS, SPLIT_WORDS, are_apart, holds_out, words_of
from titanlite.utils import counted, human_bytes

#: Kind of a group of files of several languages.
_SOURCE = "source code"


class _Group(NamedTuple):
    """What the files of one text share; None for what all texts of the folder share."""

    split: str | None
    is_direct: bool | None
    kind: str


class _Division(NamedTuple):
    """Files as several texts.

    splits: those that keep texts apart; empty: none do. has_levels: whether levels do.
    """

    groups: dict[_Group, list[FoundFile]]
    splits: set[str]
    has_levels: bool


def unclear(
    texts: Sequence[FoundFile],
    split_of_each: Sequence[str | None],
    found: Sequence[FoundFile],
    place: Place,
) -> UnclearTextError:
    """Return the error for files that are several texts. found: all files of the folder."""
    groups, splits, has_levels = _divided(texts, split_of_each, place)
    differences: list[str] = []
    if splits:
        differences.append("of several splits")
    if len({group.kind for group in groups}) > 1:
        differences.append("of several kinds")
    if has_levels:
        differences.append("on two levels")
    lines = _choices(groups, splits, found, place)
    reason = f"the folder {place.path} holds text {' and '.join(differences)}"
    return UnclearTextError(place.key, reason, lines)


def _divided(
    texts: Sequence[FoundFile], split_of_each: Sequence[str | None], place: Place
) -> _Division:
    """Divide files by what keeps texts apart. Source code and its markup are one text beside
    others.
    """
    has_code = any(file.is_source for file in texts)
    code = [file for file in texts if has_code and file.is_code_or_markup]
    is_mixed = 0 < len(code) < len(texts)
    rest = list(zip(texts, split_of_each, strict=True))
    if is_mixed:
        rest = [(file, split) for file, split in rest if not file.is_code_or_markup]
    splits = {split or "" for _, split in rest}
    if place.split is not None or not are_apart(splits):
        splits = set()
    levels = {file.is_direct for file, _ in rest}
    has_levels = len(levels) > 1 and (is_mixed or not has_code)
    groups = _grouped(rest, by_split=bool(splits), by_level=has_levels)
    if is_mixed:
        groups[_Group(None, None, _SOURCE)] = code
    return _Division(groups, splits, has_levels)


def _choices(
    groups: Mapping[_Group, Sequence[FoundFile]],
    splits: set[str],
    found: Sequence[FoundFile],
    place: Place,
) -> list[str]:
    """Return the lines that choose a text, below the tables that they go into."""
    patterns = {group: pattern_of(groups[group], found, place.path) for group in groups}
    formats = _formats(groups, patterns)
    paths: list[str] = []
    for group, pattern in patterns.items():
        if pattern is not None or group not in formats:
            paths.append(_choice(group, groups[group], pattern, place))
    others: list[str] = []
    for group, reader in formats.items():
        others.append(f"{place.format_line(reader)}  # {_kinds_of(groups[group])}")
    if splits:
        others += _split_choices(splits, place)
    table = "data" if place.table == "training" else place.table
    lines: list[str] = []
    if paths:
        lines.append(f"one of these lines {place.where(place.table)} says which is meant:")
        lines += [f"  {line}" for line in paths]
    if others and paths:
        lines.append(f"or one of these {place.where(table)}:")
    elif others:
        lines.append(f"one of these lines {place.where(table)} says which is meant:")
    lines += [f"  {line}" for line in others]
    return lines


def _grouped(
    texts: Sequence[tuple[FoundFile, str | None]], *, by_split: bool, by_level: bool
) -> dict[_Group, list[FoundFile]]:
    """Return the files of each text: those of one kind, and perhaps of one split and one level.

    texts: files, each with its split, all of a code base or none.
    """
    is_code = any(file.is_source for file, _ in texts)
    groups: dict[_Group, list[FoundFile]] = {}
    for file, split in texts:
        group = _Group(
            split=(split or "") if by_split else None,
            is_direct=file.is_direct if by_level else None,
            kind=_SOURCE if is_code else file.kind_name,
        )
        groups.setdefault(group, []).append(file)
    return groups


def _choice(group: _Group, files: Sequence[FoundFile], pattern: str | None, place: Place) -> str:
    """Return the line that chooses a group of files."""
    about = _about(group, files)
    if pattern is None:
        return f"(no single pattern finds {about}, as {files[0].relative}: move them into a folder)"
    return f"{place.path_line(pattern)}  # {about}"


def _formats(
    groups: Mapping[_Group, Sequence[FoundFile]], patterns: Mapping[_Group, str | None]
) -> dict[_Group, Format]:
    """Return the format of each group that this alone chooses, and that no pattern finds.

    Source code has one in any case.
    """
    readers: dict[_Group, Format] = {}
    for group, files in groups.items():
        kind = files[0].kind
        if group.kind == _SOURCE:
            readers[group] = "source"
        elif kind is not None:
            readers[group] = kind.reader
    counts = Counter(readers.values())
    chosen: dict[_Group, Format] = {}
    for group, reader in readers.items():
        is_whole = group.split is None and group.is_direct is None
        is_alone = counts[reader] == 1 and len(counts) > 1
        if is_whole and is_alone and (patterns[group] is None or reader == "source"):
            chosen[group] = reader
    return chosen


def _split_choices(splits: set[str], place: Place) -> Iterator[str]:
    """Yield the lines that choose a split, those that are held out last, and one for all."""
    for split in sorted(splits, key=lambda split: (holds_out([split]), split)):
        if split:
            yield place.split_line(split)
    yield f"{place.split_line(ALL_SPLITS)}  # the files of all splits"


def _about(group: _Group, files: Sequence[FoundFile]) -> str:
    """Return number, kind, split, level and size of a group of files."""
    text = f"{counted(len(files), 'files')} of {group.kind}"
    if group.split:
        text += f", split {group.split}"
    elif group.split is not None:
        text += ", of no split"
    if group.is_direct:
        text += ", directly in the folder"
    elif group.is_direct is not None:
        text += ", in its subfolders"
    sizes = [file.size for file in files]
    if None not in sizes:
        text += f", {human_bytes(sum(size for size in sizes if size))}"
    return text


def _kinds_of(files: Sequence[FoundFile]) -> str:
    """Return the numbers of files of each kind. Markup is not counted with its source code."""
    code = [file for file in files if file.is_source]
    kinds = Counter(file.kind_name for file in code or files)
    text = ", ".join(f"{counted(count, 'files')} of {kind}" for kind, count in kinds.items())
    return f"{text}, with their markup" if code else text


# Patterns


def pattern_of(files: Sequence[FoundFile], found: Sequence[FoundFile], folder: str) -> str | None:
    """Return a pattern that finds these files, and no others of all that were found.

    None: there is no simple one.
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
    ends = _ends([PurePosixPath(name).name for name in names])
    folders = [PurePosixPath(name).parts[:-1] for name in names]
    common = os.path.commonprefix(folders)
    below = "".join(f"{glob.escape(part)}/" for part in common)
    depths = {len(parts) - len(common) for parts in folders}
    if len(depths) == 1:
        step = depths.pop() * "*/"
        yield from (f"{below}{step}{end}" for end in ends)
    yield from (f"{below}**/{end}" for end in ends)


def _ends(bases: Sequence[str]) -> list[str]:
    """Return patterns for names without their folders: by their ending, start, and words of
    splits.
    """
    endings = {ending_of(base) or PurePosixPath(base).suffix for base in bases}
    ending = glob.escape(endings.pop()) if len(endings) == 1 else ""
    start = os.path.commonprefix(bases)
    start_word = re.sub(r"[\d\W_]+$", "", start)
    split_words = {word for base in bases for word in words_of(base) if word in SPLIT_WORDS}
    return [
        f"*{ending}",
        f"{glob.escape(start_word)}*{ending}",
        f"{glob.escape(start)}*{ending}",
        *(f"*{word}*{ending}" for word in sorted(split_words)),
    ]


def _matcher(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a pattern of `_candidates`, which stars do not lead into
    hidden names.
    """
    signs = {"**/": r"(?:[^/.][^/]*/)*", "*": r"[^/]*"}
    text = ""
    for part in re.split(r"(\*\*/|\*|\[.\])", pattern):
        if part in signs:
            text += signs[part]
        elif re.fullmatch(r"\[.\]", part):
            text += re.escape(part[1])
        else:
            text += re.escape(part)
    return re.compile(text)
