"""The live view on a real pseudo-terminal: what it shows, beside other writers, on terminals that stop or go away."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from tests.metrics.terminal import Clock, Terminal, figures, log_step, show, step_lines, texts
from tests.tiny import TWO_LAYERS
from titanlite.metrics import live
from titanlite.metrics.console import console_handler, setup_console
from titanlite.metrics.live import ROWS, LiveView, paint, progress, start_view, table
from titanlite.utils import logger

ROOT = Path(__file__).resolve().parents[2]
TITLES = ["step", "loss", "grad norm", "lr", "tokens/s", "memory"]
FIELDS = r"loss 6.8800  5,123 tokens/s  0.43 GiB \(12%\)"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal and its environment; logger, view and streams are put back afterwards."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    terminal = Terminal()
    yield terminal
    if (handler := console_handler()) and handler.view:
        handler.view.close()
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    terminal.close()


def test_lines_scroll_above_a_table_and_a_progress_line(terminal: Terminal) -> None:
    """A step that leaves the table becomes such a line."""
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
    done, left = rows[50].count("━"), rows[50].count("─")
    assert re.fullmatch(rf"12/60 ━+─+ 20%  {FIELDS}  left 0:01:36", rows[50]) and done == int(0.2 * (done + left))
    assert len(rows) == 51
    # The next line of any writer goes where the cursor is: below the last line of the log.
    cursor = terminal.screen.cursor
    assert cursor.x == 0 and texts([terminal.screen.display[cursor.y - 1].rstrip()]) == ["line 39"]


def test_a_stopped_terminal_holds_up_no_step_no_line_and_no_end(terminal: Terminal) -> None:
    """Log lines, prints and `close` go on; when it takes text again, the terminal shows all of it in order."""
    sys.stdout = terminal.stream
    clock = Clock()
    setup_console(0)
    handler = console_handler()
    assert handler is not None
    handler.view = view = LiveView(handler, 0, 60, clock)
    log_step(1)
    terminal.read()
    said, long = [f"line {n}" for n in range(1000)], "x" * 60  # together more than a terminal's buffer holds
    began = time.perf_counter()
    with terminal.stopped():
        for n, line in enumerate(said):
            if n % 2:
                print(line, long)
            else:
                logger.info(f"{line} {long}")
            clock.now += 1
            view.tick(2 + n // 20)
        log_step(52)
        view.close(0.2)
        logger.info("after")
        print("at last", flush=True)
        took = time.perf_counter() - began
    assert took < 5
    deadline = time.monotonic() + 20
    while (rows := texts(terminal.rows()))[-1] != "at last" and time.monotonic() < deadline:
        clock.now += 1
        view.tick(60)
    assert rows[:1000] == [f"{line} {long}" for line in said]
    assert [row.split()[0] for row in rows[1002:1004]] == ["1", "52"] and rows[1004].startswith("52/60 ━")
    assert rows[1005:] == ["after", "at last"]


@pytest.mark.slow
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
    assert re.fullmatch(rf"12/12 ━+ 100%  {FIELDS}  took 12.0s", rows[26])
    assert rows[27:] == ["training done", *step_lines(13)], "after the view, step lines are lines again"


@pytest.mark.slow
def test_step_and_time_go_on_between_two_logs_and_a_view_without_figures_leaves_nothing(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    assert re.fullmatch("0/60 ─+ 0%", terminal.rows()[-1])
    view.close()
    logger.info("after")
    assert texts(terminal.rows()) == ["after"]
    view = show(terminal, clock=clock)
    log_step(10)
    for step in (11, 12, 13, 14, 15):
        clock.now += 2
        view.tick(step)
    rows = terminal.rows()
    assert re.fullmatch(r"15/60 ━+─+ 25%  loss 6.9000  .*  left 0:01:30", rows[-1])
    assert len([row for row in rows if "1.5000" in row]) == 1


@pytest.mark.slow
def test_drawn_ten_times_a_second_at_most_and_free_when_nothing_is_due(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    terminal.read()
    for step in range(1, 1001):
        clock.now += 0.001
        view.tick(step % 60)
    assert 9 <= terminal.read().count(b"\0337") <= 10
    began = time.perf_counter()
    for _ in range(10_000):
        view.tick(5)
    assert (time.perf_counter() - began) / 10_000 < 50e-6
    assert terminal.read() == b""


@pytest.mark.slow
@pytest.mark.parametrize("colors", [True, "NO_COLOR", "key"])
def test_colours_by_key_where_they_are_wanted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, colors: bool | str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1" if colors == "NO_COLOR" else "")
    setup_console(0, color=False if colors == "key" else None, stream=terminal.stream)
    view = start_view(0, 60)
    assert view is not None
    log_step(20)
    logger.warning("careful")
    assert terminal.rows()[-1].startswith("20/60 ━")
    shown = {"loss 6.8000": "green", "5,123 tokens/s": "blue", "0.43 GiB (12%)": "brown", "20/60": "red"}
    shown |= {"1.5000": "cyan", "3.00e-04": "cyan", "WARNING: careful": "brown"}
    wanted = {text: {color if colors is True else "default"} for text, color in shown.items()}
    assert {text: terminal.colors(text) for text in shown} == wanted
    assert bool(re.search(rb"\033\[\d+m", terminal.sent)) is (colors is True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "lines", "titles", "steps", "line"),
    [
        (80, 24, TITLES, 8, rf"12/60 ━+─+ 20%  {FIELDS}  left 0:01:36"),
        (60, 24, ["step", "loss", "grad norm", "tokens/s", "memory"], 8, "12/60 ━+─+ 20%  loss 6.8800  left 0:01:36"),
        (40, 24, ["step", "loss", "tokens/s"], 8, r"12/60 ━+─+ 20%  left 0:01:36"),
        (20, 24, ["step", "loss"], 8, r"12/60 ━+─+ 20%"),
        (10, 24, ["step"], 8, r"12/60  20"),
        (80, 10, TITLES, 3, rf"12/60 ━+─+ 20%  {FIELDS}  left 0:01:36"),
        (80, 4, [], 0, rf"12/60 ━+─+ 20%  {FIELDS}  left 0:01:36"),
    ],
)
def test_small_terminals(
    terminal: Terminal, columns: int, lines: int, titles: list[str], steps: int, line: str
) -> None:
    terminal.resize(columns, lines)
    clock = Clock()
    setup_console(0, stream=terminal.stream)
    logger.info("x")
    show(terminal, clock=clock)
    for step in range(1, 13):
        clock.now += 1
        log_step(step)
    rows = terminal.rows()
    view = rows[rows.index("") + 1 :]
    assert len(view) == (1 + steps if steps else 0) + 1, "no row is folded"
    assert all(len(row) < columns for row in view)
    if titles:
        assert re.split(r"\s{2,}", view[0].strip())[: len(titles)] == titles
        assert all(len(row.split()) <= 8 and int(row.split()[0]) for row in view[1:-1])
    assert re.fullmatch(line, view[-1])


def test_wide_numbers_stay_in_their_columns() -> None:
    rows = [paint(row, 200, color=False) for row in table([figures(1), replace(figures(2), loss=1e30, mfu=41.23)], 200)]
    ends = {row.index(text) + len(text) for row, text in zip(rows, ("loss", "6.9900", "1.000e+30"), strict=True)}
    assert len(ends) == 1
    assert "mfu" in rows[0] and "41.2%" in rows[2]
    line = paint(progress(replace(figures(1), loss=float("nan"), memory_percent=None), 1, 60, "", 90), 90, color=False)
    assert line.endswith(" 1%  loss nan  5,123 tokens/s  0.43 GiB")


@pytest.mark.slow
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


@pytest.mark.parametrize("why", ["file", "dumb", "no TERM", "no size", "CI", "KUBERNETES_SERVICE_HOST"])
def test_plain_lines_and_no_view_where_nobody_looks(
    why: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file or pipe byte for byte the lines that other tools read; TERM=dumb needs no NO_COLOR for that."""
    monkeypatch.setenv("NO_COLOR", "" if why == "dumb" else "1")
    out = io.StringIO()
    setup_console(0, stream=out if why == "file" else terminal.stream)
    if why == "no size":
        fcntl.ioctl(terminal.end, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    elif why in ("dumb", "no TERM"):
        monkeypatch.setenv("TERM", "dumb" if why == "dumb" else "")
        setup_console(0, stream=terminal.stream)
    elif why != "file":
        monkeypatch.setenv(why, "1")
    assert start_view(0, 60) is None
    log_step(20)
    said = out.getvalue() if why == "file" else terminal.read().decode().replace("\r\n", "\n")
    assert said[20:] == (
        "step: 20  loss:  6.8000  memory:  0.43GiB(12.30%)  tps: 5,123  grad_norm: 1.5000  lr: 3.00e-04  "
        "tokens: 20.5K  left: 0:01:20\n"
    )
    datetime.strptime(said[:20], "%Y-%m-%d %H:%M:%S ")


# Beside other writers


@pytest.mark.slow
def test_other_processes_and_ranks_may_write_to_the_terminal(terminal: Terminal) -> None:
    """Warnings of other ranks are whole: none has an end of the table in it."""
    clock = Clock()
    view = show(terminal, clock=clock)
    for step in range(1, 9):
        log_step(step)
    for n in range(3):
        os.write(terminal.end, f"something {n}\n".encode())
        clock.now += 1
        view.tick(9 + n)
    terminal.read()
    handlers = logger.handlers[:]
    for rank in (1, 2, 3):
        setup_console(rank, stream=terminal.stream)  # takes rank 0's place, as that of a process of its own would
        guest = start_view(0, 60)
        assert guest is not None
        guest.tick(3)
        logger.warning("no space")
        logger.info("not for the console")
        guest.close()
    logger.handlers[:] = handlers
    clock.now += 1
    view.tick(12)
    rows = texts(terminal.rows())
    assert rows[:3] == [f"something {n}" for n in range(3)]
    assert rows[3:7] == [f"[rank {rank}] WARNING: no space" for rank in (1, 2, 3)] + [""]
    assert rows[-1].startswith("12/60 ") and len(rows) == 7 + 1 + 8 + 1


@pytest.mark.slow
def test_what_libraries_print_goes_above(terminal: Terminal) -> None:
    error = os.fdopen(os.dup(terminal.end), "w", buffering=1)
    sys.stdout, sys.stderr = terminal.stream, error
    setup_console(0)
    view = start_view(0, 60)
    assert view is not None
    for step in range(1, 9):
        log_step(step)
    print("one\ntwo\nthree")
    print("four\nfive", file=sys.stderr)
    logger.info("ours")
    rows = texts(terminal.rows())
    assert rows[:7] == ["one", "two", "three", "four", "five", "ours", ""]
    for percent in (10, 20):
        error.write(f"\rreading: {percent}%")  # a progress bar of tqdm's kind, which knows nothing of the view
        error.flush()
        time.sleep(0.11)
        view.tick(9)
    rows = texts(terminal.rows())
    assert rows[6] == "reading: 20%" and terminal.screen.cursor.x == len("reading: 20%")
    assert rows[7].split()[0] == "step" and rows[-1].startswith("9/60 ") and len(rows) == 17
    view.close()
    assert sys.stdout is terminal.stream and sys.stderr is error
    error.close()


@pytest.mark.slow
def test_a_terminal_that_is_gone_and_an_error_of_the_drawing_end_only_the_view(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    terminal.read()
    with monkeypatch.context() as broken:
        broken.setattr(live, "progress", lambda *_: 1 / 0)
        logger.info("one")
        logger.info("two")
        assert texts(terminal.rows()) == ["one", "two"]
    terminal.hang_up()
    for step in range(1, 5):
        clock.now += 1
        log_step(step)
        view.tick(step)
    logger.info("into nothing")
    view.close()


@pytest.mark.slow
def test_a_forked_child_leaves_the_view_alone(terminal: Terminal) -> None:
    sys.stdout = terminal.stream
    setup_console(0)
    assert start_view(0, 60) is not None
    log_step(1)
    terminal.read()
    child = os.fork()
    if not child:
        sys.stdout.write("child\n")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    assert terminal.read() == b"child\r\n"


@pytest.mark.slow
def test_threads_may_log_while_steps_go_on(terminal: Terminal) -> None:
    view = show(terminal, clock=(clock := Clock()))
    said = [[f"thread {n} line {line}" for line in range(20)] for n in range(3)]
    threads = [threading.Thread(target=lambda lines=lines: [logger.info(line) for line in lines]) for lines in said]
    for thread in threads:
        thread.start()
    for step in range(1, 9):
        log_step(step)
        view.tick(step)
    for thread in threads:
        thread.join()
    clock.now += 1  # the next drawing is due
    view.tick(8)
    rows = texts(terminal.rows())
    assert sorted(rows[:60]) == sorted(sum(said, [])) and len(rows) == 60 + 1 + 1 + 8 + 1


# Under torchrun

TINY = [
    "--job.config_file=debug_model.toml",
    *TWO_LAYERS,
    "--training.batch_size=1",
    "--training.global_batch_size=8",
    "--training.steps=12",
    "--validation.freq=6",
    "--validation.steps=1",
    "--checkpoint.enable_checkpoint",
    "--metrics.log_freq=2",
]


def torchrun(terminal: Terminal, ranks: int, *flags: str) -> int:
    """Run train.py with the terminal as its standard output and error; return the exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    process = subprocess.Popen(
        [*launcher, "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "train.py", *TINY, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=terminal.end,
        stderr=terminal.end,
    )
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        terminal.read(0.1)
    process.kill()
    return process.wait()


@pytest.mark.soak
def test_torchrun_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    """Plain `torchrun train.py`: workers inherit the terminal, and rank 0 shows the view."""
    terminal.resize(250, 40)
    assert torchrun(terminal, 2, f"--job.dump_folder={tmp_path}") == 0
    rows = texts(terminal.rows())
    assert rows[-1] == "training done at step 12" and rows[-2].startswith("12/12 ━") and " took " in rows[-2]
    assert [int(row.split()[0]) for row in rows[-9:-2]] == [1, 2, 4, 6, 8, 10, 12]
    assert rows[-11] == "" and rows[-12].startswith("checkpoint of step 12 written to ")
    for kept in ("a fresh run", "validation at 6: loss", "validation at 12: loss", "model "):
        assert sum(row.startswith(kept) for row in rows) == 1, kept
    assert sum("12/12" in row for row in rows) == 1 and not any("loss:" in row for row in rows)
    assert terminal.sent.count(b"\0337") > 3, "it was shown while the run went on"
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.split()[1] for row in rows[-9:-2]] == [f"{row['loss']:.4f}" for row in written if "loss" in row]
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert "\033" not in log and log.count("INFO step: ") == 7


@pytest.mark.soak
def test_a_run_that_fails_leaves_its_last_state_above_the_reason(terminal: Terminal, tmp_path: Path) -> None:
    terminal.resize(120, 40)
    assert torchrun(terminal, 1, f"--job.dump_folder={tmp_path}", "--optimizer.lr=1e30") == 1
    rows = texts(terminal.rows())
    (view,) = [n for n, row in enumerate(rows) if "grad norm" in row]
    (reason,) = [n for n, row in enumerate(rows) if row.startswith("error: stopped: ")]
    assert rows[view - 1] == "" and rows[reason - 1].split("/")[1].startswith("12 ") and view < reason
    assert sum("━" in row or "─" in row for row in rows) == 1


@pytest.mark.soak
@pytest.mark.parametrize("flag", ["--no-metrics.enable_progress", "--metrics.log_style=fsdp"])
def test_lines_on_a_terminal_where_they_are_wanted(terminal: Terminal, tmp_path: Path, flag: str) -> None:
    terminal.resize(200, 40)
    assert torchrun(terminal, 1, f"--job.dump_folder={tmp_path}", flag) == 0
    pattern = r"I \[train.py:103\] Batch \d+ Loss" if "fsdp" in flag else r"step: +\d+  loss: "
    assert sum(bool(re.search(pattern, row)) for row in terminal.rows()) == 7
    assert b"\0337" not in terminal.sent and b"\033[J" not in terminal.sent
