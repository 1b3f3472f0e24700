"""Points are read from files, and what is wrong in one is named."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.contrib.lab.ladder.made_up import made_up
from titanlite.contrib.lab.ladder.files import read_points
from titanlite.contrib.lab.ladder.law import LadderError, Point


def test_points_written_as_json_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "points.json"
    points = made_up()
    file.write_text(
        json.dumps({"format": 1, "points": [asdict(point) for point in points], "law": {}})
    )
    assert read_points(file) == points
    file.write_text(json.dumps([asdict(point) for point in points]))
    assert read_points(file) == points


def test_a_csv_takes_its_columns_by_name(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("\ufeffrun,D,Loss,N\nfirst,2e8,3.5,1e7\n\nsecond,4e8,3.25,2e7\n", "utf-8")
    assert read_points(file) == [
        Point(1e7, 2e8, 3.5, "row 2"),
        Point(2e7, 4e8, 3.25, "row 4"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "no column 'parameters'; the first line names parameters, tokens, loss"),
        ("a.csv", "N,loss\n1,2\n", "a.csv:1: no column 'tokens'"),
        ("a.csv", "N,D,loss\n1,2,3\n1,x,3\n", "a.csv:3: tokens is 'x': expected a number"),
        ("a.csv", "N,D,loss\n1,2\n", "a.csv:2: loss is ''"),
        ("a.json", "{", "a.json: is no JSON"),
        ("a.json", '{"points": 3}', "expected a list of points"),
        ("a.json", "[3]", "expected a list of points"),
        ("a.json", '[{"parameters": 1, "tokens": 2}]', "point 1: loss is None"),
        ("a.json", '[{"parameters": true, "tokens": 2, "loss": 1}]', "parameters is True"),
        ("a.txt", "1 2 3", "expected points.json of a ladder, or a file of the kind .csv"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(LadderError) as error:
        read_points(file)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LadderError, match=r"none\.csv: cannot be read: No such file"):
        read_points(tmp_path / "none.csv")
