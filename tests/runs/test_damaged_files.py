"""Damaged lines and files of a run are named, and hide neither its other lines nor the
other runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.run_folders import Start, training_row, write_metrics
from titanlite.cli.main import main
from titanlite.runs import ATTEMPTS
from titanlite.runs.attempts import read_attempts
from titanlite.runs.jsonl import MetricsLog
from titanlite.utils import parse_json

DEEP = b"[" * 100_000 + b"]" * 100_000
DAMAGES = {
    "deep": DEEP,
    "deep_in_a_key": b'{"event": "start", "attempt": 9, "step": ' + b"[" * 500 + b"]" * 500 + b"}",
    "no_utf8": b'{"step": "\xff\xfe"}',
    "long_number": b'{"step": ' + b"9" * 5000 + b"}",
    "no_object": b"[1, 2]",
}


def _insert(file: Path, number: int, line: bytes) -> None:
    """Put a line at its number, from 1."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[: number - 1], line + b"\n", *lines[number - 1 :]]))


def _listed(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    assert main(["runs", str(folder), *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [ATTEMPTS, "metrics.jsonl"])
def test_a_damaged_line_is_named_and_the_rest_is_read(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    for run in ("bad", "good"):
        write_metrics(tmp_path / run, [training_row(1, 8.0), training_row(2, 6.0)])
        start(tmp_path / run).end("done", 2)
    _insert(tmp_path / "bad" / name, 2, DAMAGES[damage])
    out = _listed(capsys, tmp_path)
    lines = {Path(line.split()[0]).name: line.split()[1:] for line in out.splitlines()[1:3]}
    assert lines["bad"][:5] == lines["good"][:5] == ["done", "2", "of", "40", "6.0000"]
    assert out.count("note: ") == 1
    assert f"note: {tmp_path}/bad/{name}:2: no JSON" in out
    found = {Path(run["run"]).name: run for run in json.loads(_listed(capsys, tmp_path, "--json"))}
    assert len(found["bad"]["problems"]) == 1
    assert found["good"]["problems"] == []
    if name == ATTEMPTS:
        assert f"{ATTEMPTS}:2: no JSON" in _listed(capsys, tmp_path, "--attempts")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_with_a_damaged_line_resumes(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    write_metrics(tmp_path, [training_row(1, 8.0), training_row(2, 6.0)])
    start(tmp_path)
    _insert(tmp_path / ATTEMPTS, 1, DAMAGES[damage])
    _insert(tmp_path / "metrics.jsonl", 2, DAMAGES[damage])
    assert start(tmp_path, step=1, tokens=1000).lines == [  # type: ignore[attr-defined]
        (
            "attempt 1 was killed and lost at least 1 step (1,000 tokens), by the last row of its "
            "metrics"
        )
    ]
    MetricsLog(tmp_path / "metrics.jsonl").truncate_after(1)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert [row["step"] for row in rows] == [1]
    assert f"{tmp_path}/{ATTEMPTS}:1: no JSON" in caplog.text
    assert "metrics.jsonl:2: no JSON" in caplog.text
    assert [one["attempt"] for one in read_attempts(tmp_path)] == [1, 2]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_lock_counts_as_one_without_a_holder(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    write_metrics(tmp_path / "bad", [training_row(1, 8.0)])
    start(tmp_path / "bad")
    (tmp_path / "bad" / "run.lock").write_bytes(DAMAGES[damage])
    assert "8.0000" in _listed(capsys, tmp_path)


def test_json_is_read_to_a_hundred_levels() -> None:
    assert parse_json("[" * 90 + "]" * 90)
    for text in ("[" * 101 + "]" * 101, "[" * 100_000, '{"a": ' * 101 + "1" + "}" * 101):
        with pytest.raises(ValueError, match="levels deep"):
            parse_json(text)
