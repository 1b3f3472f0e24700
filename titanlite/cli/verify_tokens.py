"""`titanlite data verify`: read a folder of token files again, and compare all that can be
compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from titanlite.data import DataError
from titanlite.data.foreign.opening import whole_parts
from titanlite.data.prepared_tokens import part_hashes, part_of, read_index
from titanlite.data.token_cache import records_folder
from titanlite.data.token_checks import REPAIR, PartHashes, check_offsets, check_part
from titanlite.data.token_parts import Part
from titanlite.data.token_paths import INDEX, is_index, is_tokens
from titanlite.utils import counted, human_bytes, human_time, progress_text, say

#: Seconds between two lines of progress.
_REPORT_SECONDS = 10.0
#: Tokens that are looked at together.
_TOKENS = 1 << 24


@dataclass
class Verdict:
    """What was found in a folder."""

    folder: str
    kind: str
    parts: int
    bytes: int = 0
    tokens: int = 0
    #: Parts whose hashes fit.
    hashes_fit: int = 0
    #: Names of parts without hashes, whose other figures fit.
    without_hashes: list[str] = field(default_factory=list)
    #: Name of a part → what is wrong.
    problems: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Yield the verdict in words."""
        for problem in self.problems.values():
            yield f"DAMAGED: {problem}"
        size = f"{counted(self.parts, 'parts')}, {self.tokens:,} tokens, {human_bytes(self.bytes)}"
        about = f"{self.folder} ({self.kind}): {size}, {human_time(self.seconds)}"
        if self.problems:
            repair = f"; {REPAIR}" if self.kind == _PREPARED else "; copy them again"
            yield (
                f"{about}: {len(self.problems)} of {counted(self.parts, 'parts')} are "
                f"damaged{repair}"
            )
        elif self.without_hashes:
            fits = "sizes, offsets and ids are right"
            yield (
                f"{about}: {fits}; {counted(len(self.without_hashes), 'parts')} have no hashes to "
                "compare"
            )
        else:
            yield f"{about}: the hashes of all parts are right"


_PREPARED = "titanlite tokens"


class _Progress:
    """Prints a line now and then, from several threads."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._lock = Lock()
        self._began = self._reported = time.monotonic()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._reported >= _REPORT_SECONDS:
                self._reported = now
                done = f"{human_bytes(self._done)} of {human_bytes(self._total)}"
                say(f"{done}, {progress_text(self._done, self._total, now - self._began)}")


def verify(folder: Path, workers: int) -> Verdict:
    """Compare sizes, offsets, ids and hashes of token files: a prepared folder, or files of another
    program.

    Raises DataError for a path that is not of token files, and for an index that cannot be read.
    """
    began = time.monotonic()
    if not is_tokens(str(folder)):
        raise DataError(
            f"{folder} holds no token files; `titanlite data prepare` makes such a folder"
        )
    verdict = _verify_prepared(folder, workers) if _is_prepared(folder) else _verify_foreign(folder)
    verdict.seconds = time.monotonic() - began
    return verdict


def _is_prepared(folder: Path) -> bool:
    return folder.is_dir() and (is_index(folder / INDEX) or any(folder.glob("part-*.tokens")))


def _verify_prepared(folder: Path, workers: int) -> Verdict:
    index = read_index(folder)
    parts: Sequence[Mapping[str, Any]] = index["parts"]
    total = sum(sum(part["bytes"].values()) for part in parts)
    verdict = Verdict(
        str(folder), _PREPARED, len(parts), total, sum(part["tokens"] for part in parts)
    )
    progress = _Progress(total)
    hashes = part_hashes(folder, index, records_folder("auto"))

    def check(number: int) -> str | None:
        return _problem(folder, index, parts[number], hashes[number], progress)

    with ThreadPoolExecutor(workers, thread_name_prefix="titanlite-verify") as pool:
        try:
            found = list(pool.map(check, range(len(parts))))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for part, part_hash, problem in zip(parts, hashes, found, strict=True):
        if problem is not None:
            verdict.problems[part["name"]] = problem
        elif part_hash.hashes:
            verdict.hashes_fit += 1
        else:
            verdict.without_hashes.append(part["name"])
    return verdict


def _problem(
    folder: Path,
    index: Mapping[str, Any],
    part: Mapping[str, Any],
    hashes: PartHashes,
    progress: _Progress,
) -> str | None:
    """Return what is wrong with a part; None if nothing is."""
    try:
        check_part(folder, part, np.dtype(index["dtype"]).itemsize)
        opened = part_of(folder, index, part)
        check_offsets(opened.file.with_suffix(".offsets"), opened.find_offsets(), opened.size)
        if not hashes.hashes:
            _check_ids(opened, index["max_id"])
            return None
        damaged = hashes.compare(progress)
    except DataError as error:
        return str(error)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{folder / str(part['name'])} cannot be checked: {error}"
    if damaged is not None:
        return f"{damaged}: its content does not fit its hash in {INDEX}"
    hashes.note()
    return None


def _check_ids(part: Part, most: int) -> None:
    """Raise DataError for an id above `most`."""
    for begin in range(0, part.size, _TOKENS):
        highest = int(part.tokens[begin : begin + _TOKENS].max())
        if highest > most:
            raise DataError(
                f"{part.file} holds the id {highest}, and {INDEX} says that {most} is the highest"
            )


def _verify_foreign(path: Path) -> Verdict:
    """Check the files of another program, which have no hashes."""
    try:
        kind, parts = whole_parts(str(path))
    except OSError as error:
        raise DataError(
            f"{error.filename or path} cannot be read: {error.strerror or error}"
        ) from error
    except DataError as error:
        return Verdict(str(path), "files of another program", 1, problems={path.name: str(error)})
    if not parts:
        raise DataError(
            f"{path} holds {kind} without header, index or hash: nothing tells what the files must "
            "be. A run compares samples of the ids with its vocabulary"
        )
    names = [Path(part.name).name for part in parts]
    size = sum(part.size * part.dtype.itemsize for part in parts)
    return Verdict(
        str(path), kind, len(parts), size, sum(part.size for part in parts), without_hashes=names
    )
