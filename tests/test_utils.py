"""Numbers for people."""

from __future__ import annotations

import pytest

from titanlite.utils import Table, human_bytes, human_count, human_time, render


def test_times_counts_and_bytes_as_people_read_them() -> None:
    times = {0.04: "0.0s", 3.21: "3.2s", 59.97: "0:01:00", 5025.4: "1:23:45", 3599.6: "1:00:00", 4e5: "111:06:40"}
    counts = {999: "999", 1000: "1.0K", 12_345_678: "12.3M", 999_960: "1.0M", 8_030_261_248: "8.0B", 15e12: "15.0T"}
    sizes = {512: "512 B", 1536: "1.5 KiB", 80 * 1024**3: "80.0 GiB", 1024**4: "1.0 TiB"}
    for human, expected in ((human_time, times), (human_count, counts), (human_bytes, sizes)):
        assert {number: human(number) for number in expected} == expected  # type: ignore[operator]


@pytest.mark.parametrize(
    "name, value, bold", [("NO_COLOR", "1", False), ("TERM", "dumb", False), ("TERM", "xterm", True)]
)
def test_a_table_is_plain_where_no_colours_are_wanted(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, bold: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    assert ("\x1b" in render(Table(("a",), [("b",)]), True)) is bold
