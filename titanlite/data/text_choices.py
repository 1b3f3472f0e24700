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


def unclear(
    texts: Sequence[FoundFile],
    split_of_each: Sequence[str | None],
    found: Sequence[FoundFile],
    place: Place,
) -> UnclearTextError:
    """Return the error for files that are several texts. found: all files of the folder.

    Source code and its markup are one text beside others.
    """
    has_code = any(file.is_source for file in texts)
    data = [not (has_code and file.is_code_or_markup) for file in texts]
    is_all_code = not any(data)
    every = zip(texts, split_of_each, data, strict=True)
    rest = [(file, split or "") for file, split, is_data in every if is_data or is_all_code]
    splits = _told_apart({split for _, split in rest}, place)
    has_levels = not is_all_code and len({file.is_direct for file, _ in rest}) > 1
    groups: dict[_Group, list[FoundFile]] = {}
    for file, split in rest:
        kind = _SOURCE if is_all_code else file.kind_name
        level = file.is_direct if has_levels else None
        groups.setdefault(_Group(split if splits else None, level, kind), []).append(file)
    if len(rest) < len(texts):
        groups[_Group(None, None, _SOURCE)] = list(filter(_is_code, texts))
    several = {
        "of several splits": splits,
        "of several kinds": len({group.kind for group in groups}) > 1,
        "on two levels": has_levels,
    }
    named = " and ".join(filter(several.get, several))
    reason = f"the folder {place.path} holds text {named}"
    return UnclearTextError(place.key, reason, _choices(groups, splits, found, place))


def _is_code(file: FoundFile) -> bool:
    return file.is_code_or_markup


def _told_apart(splits: set[str], place: Place) -> set[str]:
    """Return the splits that are a choice: none if one is chosen, or if they overlap."""
    return set() if place.split is not None or not are_apart(splits) else splits


def _choices(
    groups: Mapping[_Group, Sequence[FoundFile]],
    splits: set[str],
    found: Sequence[FoundFile],
    place: Place,
) -> list[str]:
    """Return the lines that choose a text, below the tables that they go into."""
    readers = _readers(groups)
    counts = Counter(readers.values())
    paths: list[str] = []
    others: list[str] = []
    for group, files in groups.items():
        about = _about(group, files)
        pattern = pattern_of(files, found, place.path)
        reader = readers.get(group, "auto")
        is_alone = counts[reader] == 1 and len(counts) > 1
        # A format alone chooses it.
        if group[:2] == (None, None) and is_alone and (pattern is None or reader == "source"):
            others.append(f"{place.format_line(reader)}  # {_kinds_of(files)}")
        elif pattern is None:
            paths.append(
                f"(no single pattern finds {about}, as {files[0].relative}: move them into a "
                "folder)"
            )
        if pattern is not None:
            paths.append(f"{place.path_line(pattern)}  # {about}")
    if splits:
        # Splits that are held out come last.
        ordered = sorted(splits - {""}, key=lambda split: (holds_out([split]), split))
        others += [place.split_line(split) for split in ordered]
        others.append(f"{place.split_line(ALL_SPLITS)}  # the files of all splits")
    return _listed(paths, others, place)


def _readers(groups: Mapping[_Group, Sequence[FoundFile]]) -> dict[_Group, Format]:
    """Return the format of each group that has one."""
    readers: dict[_Group, Format] = {}
    for group, files in groups.items():
        kind = files[0].kind
        if group.kind == _SOURCE or kind is not None:
            readers[group] = "source" if kind is None or group.kind == _SOURCE else kind.reader
    return readers


def _listed(paths: Sequence[str], others: Sequence[str], place: Place) -> list[str]:
    """Return the lines below the tables that they go into. paths: those of the text's table."""
    table = "data" if place.table == "training" else place.table
    which = "one of these lines {} says which is meant:"
    lines: list[str] = []
    if paths:
        lines = [which.format(place.where(place.table)), *(f"  {line}" for line in paths)]
        which = "or one of these {}:"
    if others:
        lines += [which.format(place.where(table)), *(f"  {line}" for line in others)]
    return lines


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
