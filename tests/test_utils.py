"""Progress for people, and lines of a file."""

from __future__ import annotations

import resource

import pytest

from titanlite.runs.read_jsonl import read_lines
from titanlite.utils import append_line, progress_text


def test_a_line_that_is_written_in_part_is_an_error_and_the_next_line_is_whole(tmp_path):
    file = tmp_path / "lines.jsonl"
    append_line(file, {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (file.stat().st_size + 5, hard)
    )  # as a full disk, which takes 5 bytes
    try:
        with pytest.raises(OSError, match="No space left"):
            append_line(file, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append_line(file, {"step": 3})
    assert read_lines(file) == [{"step": 1}, {"step": 3}]


def test_progress_is_told_where_it_tells_something():
    assert progress_text(25, 100, 30.0) == "about 25%, 0:01:30 left"
    assert progress_text(99, 100, 9.9) == "about 99%, 0.1s left"
    assert [
        progress_text(*words)
        for words in ((0, 100, 5.0), (100, 100, 5.0), (7, 0, 5.0), (1, 2, 0.0))
    ] == [""] * 4
