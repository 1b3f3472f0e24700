"""What the live view shows, on a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import io
import logging
import re
import struct
import termios
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from tests.metrics.terminal import Clock, Terminal, figures, log_step, show, step_lines, texts
from titanlite.metrics.console import setup_console
from titanlite.metrics.live import ROWS, LiveView, paint, progress, start_view, table
from titanlite.runs.logs import RankLog
from titanlite.utils import logger

pytestmark = pytest.mark.usefixtures("clean_console")
ESCAPE = re.compile(r"\033")
TITLES = ["step", "loss", "grad norm", "lr", "tokens/s", "memory"]


def test_lines_scroll_above_a_table_and_a_progress_line(terminal: Terminal) -> None:
    """A step that leaves the table is such a line."""
    terminal.resize(200, 30)
    clock = Clock()
    setup_console(0, stream=terminal.stream)
    said = [f"line {n}" for n in range(40)]
    for line in said[:35]:
        logger.info(line)
    show(terminal, clock=clock)
    for step in range(1, 13):
        clock.now += 1
        log_step(step)
    for line in said[35:]:
        logger.info(line)
    rows = texts(terminal.rows())
    assert rows[:35] + rows[39:44] == said and rows[35:39] == step_lines(1, 2, 3, 4) and rows[44] == ""
    del rows[35:39]
    assert re.split(r"\s{2,}", rows[41].strip()) == TITLES
    assert [row.split()[0] for row in rows[42:50]] == [str(step) for step in range(5, 13)] and ROWS == 8
    assert rows[49].split() == ["12", "6.8800", "1.5000", "3.00e-04", "5,123", "0.43", "GiB", "(12%)"]
    assert rows[50].startswith("12/60 ━━━") and rows[50].count("━") == int(
        0.2 * rows[50].count("━") + 0.2 * rows[50].count("─")
    )
    assert rows[50].endswith(" 20%  loss 6.8800  5,123 tokens/s  0.43 GiB (12%)  left 0:01:36")
    assert len(rows) == 51
    # The next line of anybody goes where the cursor is: below the last line of the log.
    cursor = terminal.screen.cursor
    assert cursor.x == 0 and texts([terminal.screen.display[cursor.y - 1].rstrip()]) == ["line 39"]


@pytest.mark.parametrize("lines", [30, 4])
def test_every_step_can_be_scrolled_back_to_when_the_run_ends(terminal: Terminal, lines: int) -> None:
    """The last ones in the table, which stays as text, also on a terminal that had no room for it; nothing else."""
    terminal.resize(200, lines)
    clock = Clock()
    view = show(terminal, steps=12, clock=clock)
    for step in range(1, 13):
        clock.now += 1
        logger.info(f"before {step}")
        log_step(step)
    view.close()
    view.close()
    logger.info("training done")
    log_step(13)
    rows = texts(terminal.rows())
    said = [[f"before {step}", *step_lines(*range(max(step - 8, 1), step - 7))] for step in range(1, 13)]
    assert rows[:16] == sum(said, []) and rows[16] == ""
    assert [row.split()[0] for row in rows[18:26]] == [str(step) for step in range(5, 13)]
    assert rows[26].startswith("12/12 ━") and rows[26].endswith(
        "100%  loss 6.8800  5,123 tokens/s  0.43 GiB (12%)  took 12.0s"
    )
    assert rows[27:] == ["training done", *step_lines(13)], "after the view, step lines are lines again"


def test_a_view_without_figures_leaves_nothing(terminal: Terminal) -> None:
    view = show(terminal)
    assert terminal.rows()[-1].startswith("0/60 ─") and terminal.rows()[-1].endswith("─ 0%")
    view.close()
    logger.info("after")
    assert texts(terminal.rows()) == ["after"]


def test_between_two_logs_only_step_and_time_go_on(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    log_step(10)
    for step in (11, 12, 13, 14, 15):
        clock.now += 2
        view.tick(step)
    assert terminal.rows()[-1].endswith(" 25%  loss 6.9000  5,123 tokens/s  0.43 GiB (12%)  left 0:01:30")
    assert terminal.rows()[-1].startswith("15/60 ") and len([r for r in terminal.rows() if "1.5000" in r]) == 1


def test_drawn_ten_times_a_second_at_most_and_free_when_nothing_is_due(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    terminal.read()
    for step in range(1, 1001):
        clock.now += 0.001
        view.tick(step % 60)
        view._pen.flush(2)
    assert 9 <= terminal.read().count(b"\0337") <= 10
    began = time.perf_counter()
    for _ in range(10_000):
        view.tick(5)
    assert (time.perf_counter() - began) / 10_000 < 50e-6
    assert terminal.read() == b""


def test_colours_by_key(terminal: Terminal) -> None:
    show(terminal)
    log_step(20)
    logger.warning("careful")
    terminal.read()
    assert [terminal.colors(t) for t in ("loss 6.8000", "5,123 tokens/s", "0.43 GiB (12%)", "20/60")] == [
        {"green"},
        {"blue"},
        {"brown"},
        {"red"},
    ]
    assert terminal.colors("1.5000") == terminal.colors("3.00e-04") == {"cyan"}
    assert terminal.colors("WARNING: careful") == {"brown"}
    plain = paint(progress(figures(20), 20, 60, "left 1s", 99), 99, color=False)
    assert not ESCAPE.search(plain) and plain.endswith("left 1s")


@pytest.mark.parametrize("how", ["NO_COLOR", "key"])
def test_no_colours_but_the_view(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    setup_console(0, color=False if how == "key" else None, stream=terminal.stream)
    view = start_view(0, 60)
    assert isinstance(view, LiveView)
    log_step(20)
    time.sleep(0.11)
    view.tick(21)
    assert terminal.rows()[-1].startswith("21/60 ━")
    assert terminal.colors("6.8000") == {"default"} and not re.search(rb"\033\[\d+m", terminal.sent)


@pytest.mark.parametrize(
    ("columns", "lines", "titles", "steps", "line"),
    [
        (80, 24, TITLES, 8, r"12/60 ━+─+ 20%  loss 6.8800  5,123 tokens/s  0.43 GiB \(12%\)  left 0:01:36"),
        (
            60,
            24,
            ["step", "loss", "grad norm", "tokens/s", "memory"],
            8,
            r"12/60 ━+─+ 20%  loss 6.8800  left 0:01:36",
        ),
        (40, 24, ["step", "loss", "tokens/s"], 8, r"12/60 ━+─+ 20%  left 0:01:36"),
        (20, 24, ["step", "loss"], 8, r"12/60 ━+─+ 20%"),
        (10, 24, ["step"], 8, r"12/60  20"),
        (80, 10, TITLES, 3, r"12/60 ━+─+ 20%  loss 6.8800  5,123 tokens/s  0.43 GiB \(12%\)  left 0:01:36"),
        (80, 4, [], 0, r"12/60 ━+─+ 20%  loss 6.8800  5,123 tokens/s  0.43 GiB \(12%\)  left 0:01:36"),
    ],
)
def test_small_terminals(columns: int, lines: int, titles: list[str], steps: int, line: str) -> None:
    terminal = Terminal(columns, lines)
    clock = Clock()
    setup_console(0, stream=terminal.stream)
    logger.info("x")
    show(terminal, clock=clock)
    for step in range(1, 13):
        clock.now += 1
        log_step(step)
    rows = terminal.rows()
    first = rows.index("") + 1
    view = rows[first:]
    assert len(view) == (1 + steps if steps else 0) + 1, "no row is folded"
    assert all(len(row) < columns for row in view)
    if titles:
        assert re.split(r"\s{2,}", view[0].strip())[: len(titles)] == titles
        assert all(len(row.split()) <= 8 and int(row.split()[0]) for row in view[1:-1])
    assert re.fullmatch(line, view[-1])
    terminal.close()


def test_wide_numbers_stay_in_their_columns() -> None:
    rows = [paint(row, 200, color=False) for row in table([figures(1), replace(figures(2), loss=1e30, mfu=41.23)], 200)]
    assert (
        len({row.index(text) + len(text) for row, text in zip(rows, ("loss", "6.9900", "1.000e+30"), strict=True)}) == 1
    )
    assert "mfu" in rows[0] and "41.2%" in rows[2]
    line = paint(progress(replace(figures(1), loss=float("nan"), memory_percent=None), 1, 60, "", 90), 90, color=False)
    assert line.endswith(" 1%  loss nan  5,123 tokens/s  0.43 GiB")


def test_a_resized_terminal_leaves_nothing_behind(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    logger.info("kept")
    log_step(12)
    terminal.read()
    # As terminals do that fold what no longer fits: the rows below the cursor take more lines, the cursor stays.
    terminal.resize(40, 30)
    terminal.feed(b"\0337" + b"".join(b"\r\nfolded " + b"#" * 30 + b"\r\n####" for _ in range(6)) + b"\0338")
    clock.now += 1
    view.tick(13)
    rows = terminal.rows()
    assert texts(rows[:1]) == ["kept"] and rows[1] == "" and len(rows) == 5
    assert rows[2].split() == ["step", "loss", "tokens/s"] and rows[4].startswith("13/60 ━")
    terminal.resize(120, 40)
    clock.now += 1
    view.tick(14)
    rows = terminal.rows()
    assert len(rows) == 5 and rows[4].endswith("left 0:01:32") and "memory" in rows[2]


@pytest.mark.parametrize("name", ["size", "CI", "KUBERNETES_SERVICE_HOST"])
def test_no_view_on_a_terminal_that_nobody_looks_at(
    name: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_console(0, stream=terminal.stream)
    if name == "size":
        fcntl.ioctl(terminal.end, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    else:
        monkeypatch.setenv(name, "1")
    assert start_view(0, 60) is None
    if name == "size":
        terminal.resize(100, 30)
    monkeypatch.delenv(name, raising=False)
    assert isinstance(start_view(0, 60), LiveView)


@pytest.mark.parametrize("kind", ["file", "dumb", "no TERM"])
def test_no_view_but_plain_lines(kind: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file or pipe byte for byte the lines that other tools read; TERM=dumb needs no NO_COLOR for that."""
    if kind == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if kind == "no TERM":
        monkeypatch.delenv("TERM")
        monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    setup_console(0, stream=out if kind == "file" else terminal.stream)
    assert start_view(0, 60) is None
    log_step(20)
    said = out.getvalue() if kind == "file" else terminal.read().decode().replace("\r\n", "\n")
    assert said[20:] == (
        "step: 20  loss:  6.8000  memory:  0.43GiB(12.30%)  tps: 5,123  grad_norm: 1.5000  lr: 3.00e-04  "
        "tokens: 20.5K  left: 0:01:20\n"
    )
    datetime.strptime(said[:20], "%Y-%m-%d %H:%M:%S ")


def test_without_a_console_there_is_no_view() -> None:
    logger.handlers[:] = [logging.NullHandler()]
    assert start_view(0, 60) is None


def test_the_log_of_the_rank_keeps_every_step_line(terminal: Terminal, tmp_path: Path) -> None:
    show(terminal)
    file = RankLog(tmp_path, 0)
    logger.addHandler(file)
    try:
        for step in range(1, 13):
            log_step(step)
    finally:
        logger.removeHandler(file)
        file.close()
    written = (tmp_path / "logs" / "rank_0.log").read_text()
    assert not ESCAPE.search(written)
    assert [int(n) for n in re.findall(r"INFO step: +(\d+)  loss:", written)] == list(range(1, 13))
