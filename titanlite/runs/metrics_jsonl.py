"""metrics.jsonl: one JSON object per line, written at once. No torch here.

Numbers that are not finite are the strings "nan", "inf" and "-inf". JSON has no such numbers, and
Python's `float()` reads these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from titanlite.utils import atomic_write, escape_name, json_lines, logger, not_a_link, public_tree

T = TypeVar("T")

#: Name of the file below `job.dump_folder`.
FILE = "metrics.jsonl"


class MetricsLog:
    """Appends rows to `path`.

    URLs lose logins and queries. Rows that a full disk refuses are lost with one warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._warned = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one whole row, or nothing; it is in the file when this returns."""
        shown = {name: json_value(value) for name, value in public_tree(row).items()}
        line = (json.dumps(shown, allow_nan=False) + "\n").encode()
        try:
            with open(self.path, "ab", buffering=0, opener=not_a_link) as file:
                before = file.tell()
                if file.write(line) < len(line):
                    file.truncate(before)
                    raise OSError("only a part of a row could be written; is there space left?")
        except OSError as error:
            self._warn(error)

    def truncate_after(self, step: int, again: Collection[str] = ()) -> None:
        """Drop torn lines and rows of steps after `step`, so that a resumed run writes none twice.
        Atomic.

        Rows without a step are kept. again: figures of `step` that will be measured again.
        """

        def stays(row: Mapping[str, Any]) -> bool:
            if _step(row) != step:
                return _step(row) < step
            return not any(name in row for name in again)

        kept = []
        try:
            for line, row, problem in json_lines(self.path):
                if row is not None and stays(row):
                    kept.append(line.rstrip(b"\n") + b"\n")
                elif row is None and line.endswith(b"\n"):
                    logger.warning(escape_name(f"{problem}, and left out from now on"))
            content = b"".join(kept)
            if content != self.path.read_bytes():
                atomic_write(self.path, content)
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                f"cannot write {self.path}: {error}. Training continues; rows are lost until it can"
            )


def json_value(value: T) -> T | str:
    """Return `value`, or "nan", "inf" or "-inf" for a float without a form in JSON."""
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _step(row: Mapping[str, Any]) -> float:
    step = row.get("step")
    return step if isinstance(step, int | float) else -math.inf
