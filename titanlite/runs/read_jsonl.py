"""Reading of files with a JSON object in each line, damaged lines and all."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.utils import escape_name, json_lines, logger


def read_lines(path: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the JSON objects in a file's lines, without damaged ones; none without a file.

    problems: gets a text per damaged line or unreadable file; None: they are logged. A killed
    process may leave a last line without its end: no problem.
    """
    found: list[dict[str, Any]] = []
    said: list[str] = []
    try:
        for line in json_lines(path):
            if line.entry is not None:
                found.append(line.entry)
            elif line.raw.endswith(b"\n"):
                said.append(line.problem)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        said.append(f"{path} cannot be read: {error.strerror or error}")
    tell(said, problems)
    return found


def tell(said: Sequence[str], problems: list[str] | None) -> None:
    """Add texts to a list of problems, or log them as warnings."""
    if problems is not None:
        problems.extend(said)
        return
    for text in said:
        logger.warning(escape_name(text))


def read_metrics(path: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, but for damaged lines. Raises FileNotFoundError.

    problems: as for `read_lines`.
    """
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return read_lines(path, problems)
