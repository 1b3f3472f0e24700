"""`titanlite data verify`: read a prepared folder again, and compare sizes, offsets and hashes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.data import DataError
from titanlite.data.prepared_tokens import hashes_of, part_of, read_index
from titanlite.data.token_cache import records_folder
from titanlite.data.token_integrity import REPAIR
from titanlite.utils import cores, counted, progress_text, say

#: Seconds between two lines of progress.
_REPORT_SECONDS = 10.0


def verify(folder: Path) -> tuple[str, int]:
    """Return what is damaged in a prepared folder, and the exit code.

    Raises DataError for no such folder, and for an unreadable index.
    """
    index = read_index(folder)
    parts = index["parts"]
    records = records_folder("auto")
    problems: list[str] = []
    began = reported = time.monotonic()

    def check(part: Mapping[str, Any]) -> str:
        try:
            part_of(folder, index, part).check_offsets()
            hashes_of(folder, part, records).compare()
        except DataError as error:
            return str(error)
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""

    with ThreadPoolExecutor(min(cores(), 8), thread_name_prefix="titanlite-verify") as pool:
        for number, problem in enumerate(pool.map(check, parts), 1):
            if problem:
                problems.append(problem)
            now = time.monotonic()
            if now - reported > _REPORT_SECONDS:
                reported = now
                share = progress_text(number, len(parts), now - began)
                say(f"{number} of {counted(len(parts), 'parts')}, {share}")
    tokens = sum(part["tokens"] for part in parts)
    title = f"{folder}: {counted(len(parts), 'parts')}, {tokens:,} tokens"
    if not problems:
        return f"{title}: sizes, offsets and hashes are right", exit_codes.DONE
    lines = [f"DAMAGED: {problem}" for problem in problems]
    return "\n".join([*lines, f"{title}: {len(problems)} damaged; {REPAIR}"]), exit_codes.ERROR
