"""The live view on a real pseudo-terminal: its content, and outputs without a view."""

from __future__ import annotations

import fcntl
import io
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.metrics.terminal import Terminal, log_step, step_lines, texts
from tests.support.processes import ROOT, TORCHRUN, environment
from tests.support.tiny import TWO_LAYERS
from titanlite.metrics import live
from titanlite.metrics.console import console_handler, setup_console, start_view
from titanlite.metrics.live import ROWS, LiveView
from titanlite.runs.jsonl import read_metrics
from titanlite.utils import logger

TITLES = ["step", "loss", "grad norm", "lr", "tokens/s", "memory"]
COLUMNS = 200
LINES = 40


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal and its environment; view and streams are put back afterwards."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(LINES))
    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    terminal = Terminal(COLUMNS, LINES)
    yield terminal
    if (handler := console_handler()) and handler.view:
        handler.view.close()
    terminal.close()


def _show(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, steps: int = 60) -> LiveView:
    monkeypatch.setattr(live, "_SECONDS_BETWEEN", 0.0)
    sys.stdout = terminal.stream
    setup_console(0)
    view = start_view(0, steps)
    assert view is not None
    return view


def test_lines_scroll_above_a_table_and_a_progress_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that leaves the table becomes such a line; at the end the table stays."""
    view = _show(terminal, monkeypatch, steps=15)
    for step in range(1, 13):
        log_step(step)
    print("a library's line")
    view.tick(14)
    rows = texts(terminal.rows())
    assert rows[:5] == [*step_lines(1, 2, 3, 4), "a library's line"]
    assert re.split(r"\s{2,}", rows[5].strip()) == TITLES
    assert [row.split()[0] for row in rows[6:14]] == [str(step) for step in range(5, 13)]
    assert ROWS == 8
    assert rows[13].split() == [
        "12",
        "6.8800",
        "1.5000",
        "3.00e-04",
        "5,123",
        "0.43",
        "GiB",
        "(12%)",
    ]
    assert rows[14].startswith("14/15")
    assert "93%" in rows[14]
    assert rows[14].endswith("left 32.0s")
    assert len(rows) == 15
    view.tick(15)
    view.close()
    logger.info("training done")
    log_step(15)
    rows = texts(terminal.rows())
    assert rows[14].startswith("15/15 ")
    assert " took " in rows[14]
    assert rows[15:] == ["training done", *step_lines(15)], (
        "after the view, step lines are lines again"
    )
    assert sys.stdout is terminal.stream


def test_lines_of_the_log_stand_in_the_order_of_their_times(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line comes below the steps before it, which leave the table, and above the later ones."""
    view = _show(terminal, monkeypatch, steps=15)
    for step in (1, 2, 3):
        log_step(step)
    logger.warning("careful")
    view.tick(4)
    rows = texts(terminal.rows())
    assert rows[:4] == [*step_lines(1, 2, 3), "WARNING: careful"]
    assert rows[4].startswith("4/15 ")
    assert " left " in rows[4], "the last step tells it, though it left the table"
    assert len(rows) == 5
    for step in range(4, 14):
        log_step(step)
    logger.info("validation")
    view.close()
    rows = texts(terminal.rows())
    assert rows[:-1] == [
        *step_lines(1, 2, 3),
        "WARNING: careful",
        *step_lines(*range(4, 14)),
        "validation",
    ]
    assert rows[-1].startswith("13/15 ")


def test_the_figures_of_tasks_stand_below_the_table(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = _show(terminal, monkeypatch)
    log_step(1)
    view.show_scores(1, {"eval/quiz/acc": 0.25, "eval/held/bits_per_byte": 1.5, "loss": 2.0})
    view.tick(2)
    *_, scores, progress = texts(terminal.rows())
    assert scores.strip() == "tasks at 1: quiz/acc 0.2500, held/bits_per_byte 1.5000"
    assert progress.startswith("2/60")


def test_it_is_drawn_only_when_a_drawing_is_due(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = _show(terminal, monkeypatch)
    monkeypatch.setattr(live, "_SECONDS_BETWEEN", 1e6)
    log_step(1)
    terminal.read()
    view.tick(2)
    assert terminal.read() == b""
    monkeypatch.setattr(live, "_SECONDS_BETWEEN", 0.0)
    view.tick(3)
    assert b"3/60" in terminal.read()


def test_a_view_without_figures_leaves_nothing_and_one_on_a_closed_terminal_raises_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = _show(terminal, monkeypatch)
    assert terminal.rows()[-1].startswith("0/60")
    view.close()
    logger.info("after")
    assert texts(terminal.rows()) == ["after"]
    view = _show(terminal, monkeypatch)
    terminal.hang_up()
    log_step(1)
    view.tick(2)
    logger.info("into nothing")
    view.close()


@pytest.mark.parametrize(
    "why", ["file", "dumb", "no TERM", "no size", "CI", "KUBERNETES_SERVICE_HOST", "rank 1"]
)
def test_plain_lines_and_no_view_where_nobody_looks(
    why: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file or pipe byte for byte the lines that other tools read."""
    monkeypatch.setenv("NO_COLOR", "" if why == "dumb" else "1")
    out = io.StringIO()
    if why == "no size":
        fcntl.ioctl(terminal.end, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    elif why in ("dumb", "no TERM"):
        monkeypatch.setenv("TERM", "dumb" if why == "dumb" else "")
    elif why in ("CI", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.setenv(why, "1")
    setup_console(int(why == "rank 1"), stream=out if why == "file" else terminal.stream)
    assert start_view(0, 60) is None
    log_step(20)
    said = out.getvalue() if why == "file" else terminal.read().decode().replace("\r\n", "\n")
    assert said[20:] == ("" if why == "rank 1" else step_lines(20)[0] + "\n")


@pytest.mark.soak
@pytest.mark.parametrize(
    "flag", ["", "--no-metrics.enable_progress", "--metrics.log_style=aws_fsdp"]
)
def test_torchrun_on_a_terminal(terminal: Terminal, tmp_path: Path, flag: str) -> None:
    """Plain `torchrun train.py`: workers inherit the terminal, and rank 0 shows the view, if that
    is wanted.
    """
    flags = [
        "--job.config_file=debug_model.toml",
        *TWO_LAYERS,
        "--training.batch_size=1",
        "--training.steps=12",
    ]
    flags += [
        "--training.global_batch_size=8",
        "--validation.freq=6",
        "--validation.steps=1",
        "--metrics.log_freq=2",
    ]
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": terminal.end, "stderr": terminal.end}
    command = [
        sys.executable,
        *TORCHRUN,
        "train.py",
        *flags,
        f"--job.dump_folder={tmp_path}",
        *filter(None, [flag]),
    ]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **streams) as process:
        process.wait(timeout=1800)
    assert process.returncode == 0
    rows = texts(terminal.rows())
    if flag:
        pattern = r"I \[train.py:103\] Batch \d+ Loss" if "fsdp" in flag else r"step: +\d+  loss: "
        assert sum(bool(re.search(pattern, row)) for row in rows) == 7
        return
    assert rows[-1] == "training done at step 12"
    assert rows[-2].startswith("12/12 ")
    assert " took " in rows[-2]
    order = [re.sub(r"[:, ]+", " ", row) for row in rows if row.startswith(("step:", "validation"))]
    assert [" ".join(row.split()[:3]) for row in order] == [
        *(f"step {step} loss" for step in (1, 2, 4, 6)),
        "validation at 6",
        *(f"step {step} loss" for step in (8, 10, 12)),
        "validation at 12",
    ]
    for kept in ("a fresh run", "validation at 6: loss", "validation at 12: loss", "model "):
        assert sum(row.startswith(kept) for row in rows) == 1, kept
    losses = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    shown = [row.split()[3] for row in order if row.startswith("step")]
    assert shown == [f"{loss:.4f}" for loss in losses]
