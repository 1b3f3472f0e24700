"""Points of a ladder as files: `points.json`, which a ladder writes, and CSV from elsewhere."""

from __future__ import annotations

import csv
import io
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
        found = found.get("points")
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise LadderError(f'{path}: expected a list of points, or an object with a list "points"')
    points = []
    for place, entry in enumerate(found, 1):
        numbers: dict[str, Any] = {}
        for name in _NAMES:
            numbers[name] = _number(entry.get(name), f"{path}: point {place}: {name}")
        name, trunk = (str(entry.get(name, ""))[:200] for name in ("name", "trunk"))
        points.append(Point(**numbers, name=name, trunk=trunk))
    return points


def _from_csv(path: Path, data: bytes) -> list[Point]:
    try:
        rows = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise LadderError(f"{path}: is no CSV in UTF-8: {error}") from None
    head = [name.strip().lower() for name in rows[0]] if rows else []
    places = {}
    for name, others in _NAMES.items():
        place = next((head.index(other) for other in others if other in head), None)
        if place is None:
            names = ", ".join(_NAMES)
            raise LadderError(f"{path}:1: no column {name!r}; the first line names {names}")
        places[name] = place
    points = []
    for line, row in enumerate(rows[1:], 2):
        if any(row):
            numbers: dict[str, Any] = {}
            for name, place in places.items():
                text = row[place] if place < len(row) else ""
                numbers[name] = _number(text, f"{path}:{line}: {name}")
            points.append(Point(**numbers, name=f"row {line}"))
    return points


def _number(value: Any, where: str) -> float:
    """Return a number of a file. Raises LadderError."""
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise LadderError(f"{where} is {value!r:.60}: expected a number")
