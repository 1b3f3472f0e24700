"""Points of a ladder as files: `points.json`, which a ladder writes, and CSV from elsewhere."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titanlite.contrib.lab.ladder.law import LadderError, Point
from titanlite.utils import parse_json

POINTS = "points.json"
#: Columns of a CSV, and other names that papers and tables use for them.
_NAMES = {
    "parameters": ("parameters", "params", "n", "model size"),
    "tokens": ("tokens", "d", "training tokens"),
    "loss": ("loss", "l", "validation_loss"),
}
_FORMAT = 1


def as_entries(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return points as JSON has them."""
    return [asdict(point) for point in points]


def read_points(path: Path) -> list[Point]:
    """Read the points of a file. Raises LadderError for what has none, naming the row."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LadderError(f"{path}: cannot be read: {error.strerror or error}") from None
    if path.suffix == ".json":
        return _from_json(path, data)
    if path.suffix == ".csv":
        return _from_csv(path, data)
    raise LadderError(f"{path}: expected {POINTS} of a ladder, or a file of the kind .csv")


def _from_json(path: Path, data: bytes) -> list[Point]:
    try:
        found = parse_json(data)
    except ValueError as error:
        raise LadderError(f"{path}: is no JSON: {error}") from None
    if isinstance(found, dict):
        if found.get("format", _FORMAT) != _FORMAT:
            raise LadderError(f"{path}: format {found['format']!r:.40} is of another version")
        found = found.get("points")
    if not isinstance(found, list):
        raise LadderError(f'{path}: expected a list of points, or an object with a list "points"')
    points = []
    for place, entry in enumerate(found, 1):
        where = f"{path}: point {place}"
        if not isinstance(entry, dict):
            raise LadderError(f"{where}: expected an object, got {entry!r:.60}")
        numbers = {name: _number(entry.get(name), f"{where}: {name}") for name in _NAMES}
        name = str(entry.get("name", ""))[:200]
        points.append(Point(**numbers, name=name, trunk=str(entry.get("trunk", ""))[:200]))
    return points


def _from_csv(path: Path, data: bytes) -> list[Point]:
    try:
        rows = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise LadderError(f"{path}: is no CSV in UTF-8: {error}") from None
    if not rows:
        raise LadderError(f"{path}: is empty; {_head_in_words()}")
    head = [name.strip().lower() for name in rows[0]]
    places = {}
    for name, others in _NAMES.items():
        place = next((head.index(other) for other in others if other in head), None)
        if place is None:
            raise LadderError(f"{path}:1: no column {name!r}; {_head_in_words()}")
        places[name] = place
    points = []
    for line, row in enumerate(rows[1:], 2):
        if not any(cell.strip() for cell in row):
            continue
        numbers = {}
        for name, place in places.items():
            text = row[place] if place < len(row) else ""
            numbers[name] = _number(text, f"{path}:{line}: {name}")
        points.append(Point(**numbers, name=f"row {line}", trunk=""))
    return points


def _head_in_words() -> str:
    return f"the first line names the columns {', '.join(_NAMES)}"


def _number(value: object, where: str) -> float:
    """Return a number of a file. Raises LadderError."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number or isinstance(value, str):
        try:
            return float(value)  # type: ignore[arg-type]
        except (ValueError, OverflowError):
            pass
    raise LadderError(f"{where} is {value!r:.60}: expected a number")
