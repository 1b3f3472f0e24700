"""The live view on a real pseudo-terminal; pyte says what a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import queue
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pyte
import pytest

from tests.tiny import TWO_LAYERS
from titanlite.observe import live
from titanlite.observe.console import colorize, console_handler, logger, setup_console
from titanlite.observe.live import ROWS, LiveView, paint, progress, start_view, table
from titanlite.observe.stepline import StepFigures, titan_line
from titanlite.runs.logs import RankLog

ROOT = Path(__file__).resolve().parents[2]
ESCAPE = re.compile(r"\033")
TITLES = ["step", "loss", "grad norm", "lr", "tokens/s", "memory"]


def figures(step: int, steps: int = 60) -> StepFigures:
    return StepFigures(
        step=step,
        loss=7 - step / 100,
        norm=1.5,
        lr=3e-4,
        memory_gib=0.43,
        memory_percent=12.3,
        tps=5123.4,
        mfu=None,
        tokens_seen=step * 1024,
        seconds_left=(steps - step) * 2.0,
        samples_per_second=9.4,
    )


def log_step(step: int) -> None:
    """What the observer does with a logged step."""
    logger.info(colorize(titan_line(figures(step))), extra={"figures": figures(step)})


class Terminal:
    """A pseudo-terminal: `stream` is the program's end, `screen` what the other end shows."""

    def __init__(self, columns: int = 100, lines: int = 30) -> None:
        self.master, self.end = os.openpty()
        self.stream = os.fdopen(self.end, "w", buffering=1, encoding="utf-8")
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._emulator = pyte.ByteStream(self.screen)
        self.sent = b""
        self.resize(columns, lines)
        # A terminal takes what is written at any time: its kernel buffer holds but a few drawings.
        self._arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._taking, self._gone = threading.Lock(), threading.Event()
        self._reader = threading.Thread(target=self._take, daemon=True)
        self._reader.start()

    def _take(self) -> None:
        while not self._gone.is_set():
            with self._taking:
                if select.select([self.master], [], [], 0.01)[0]:
                    self._arrived.put(os.read(self.master, 65536))

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def read(self, wait: float = 0.03) -> bytes:
        """What was sent since, once nothing more comes; the screen shows it."""
        if (handler := console_handler()) and isinstance(handler.view, LiveView):
            handler.view._pen.flush(2)
        new = b""
        while True:
            try:
                new += self._arrived.get(timeout=wait)
            except queue.Empty:
                with self._taking:
                    if self._arrived.empty() and (
                        self._gone.is_set() or not select.select([self.master], [], [], 0)[0]
                    ):
                        break
        self._emulator.feed(new)
        self.sent += new
        return new

    def feed(self, data: bytes) -> None:
        """Put something on the screen as the terminal itself would."""
        self._emulator.feed(data)

    def rows(self) -> list[str]:
        """Everything that can be seen or scrolled back to, without empty rows at the end."""
        self.read()
        above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        rows = [row.rstrip() for row in [*above, *self.screen.display]]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def colors(self, text: str) -> set[str]:
        """Foreground colours of the characters of `text`, where it stands last on the screen."""
        y = max(n for n, row in enumerate(self.screen.display) if text in row)
        x = self.screen.display[y].index(text)
        return {self.screen.buffer[y][x + n].fg for n, char in enumerate(text) if char != " "}

    @contextlib.contextmanager
    def stopped(self, how: str = "Ctrl-S") -> Iterator[None]:
        """Inside, the terminal takes nothing; asleep, it takes until its buffer is full."""
        if how == "asleep":
            with self._taking:
                yield
            return
        termios.tcflow(self.end, termios.TCOOFF)
        try:
            yield
        finally:
            termios.tcflow(self.end, termios.TCOON)

    def hang_up(self) -> None:
        """The other end is gone: whoever writes gets an error."""
        self._gone.set()
        self._reader.join()
        os.close(self.master)

    def close(self) -> None:
        if not self._gone.is_set():
            self.hang_up()
        with contextlib.suppress(OSError):
            self.stream.close()


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A terminal's environment; the logger and its view are put back afterwards."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    if (handler := console_handler()) and handler.view:
        handler.view.close()
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def show(terminal: Terminal, steps: int = 60, clock: Clock | None = None) -> LiveView:
    setup_console(0, stream=terminal.stream)
    handler = console_handler()
    assert handler is not None
    handler.view = view = LiveView(handler, 0, steps, clock or Clock())
    return view


def texts(rows: Sequence[str]) -> list[str]:
    """Log lines without their time stamps."""
    return [row[20:] if re.match(r"\d{4}-\d\d-\d\d \d\d:", row) else row for row in rows]


def test_lines_scroll_above_a_table_and_a_progress_line(terminal: Terminal) -> None:
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
    assert rows[:40] == said and rows[40] == ""
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


def test_the_last_state_stays_as_text_and_nothing_is_left_over(terminal: Terminal) -> None:
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
    assert rows[:12] == [f"before {step}" for step in range(1, 13)]
    assert [row.split()[0] for row in rows[14:22]] == [str(step) for step in range(5, 13)]
    assert rows[22].startswith("12/12 ━") and rows[22].endswith(
        "100%  loss 6.8800  5,123 tokens/s  0.43 GiB (12%)  took 12.0s"
    )
    assert rows[23] == "training done"
    assert "".join(rows[24:]).startswith("step: 13  loss:"), "after the view, step lines are lines again"
    assert sum("━" in row for row in rows) == 1 and sum("grad norm" in row for row in rows) == 1


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


def test_other_processes_may_write_to_the_terminal(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    log_step(12)
    terminal.read()
    for n in range(3):
        os.write(terminal.end, f"[rank 1] WARNING: something {n}\n".encode())
        clock.now += 1
        view.tick(13 + n)
        terminal.read()
    rows = terminal.rows()
    assert rows[:4] == [
        "[rank 1] WARNING: something 0",
        "[rank 1] WARNING: something 1",
        "[rank 1] WARNING: something 2",
        "",
    ]
    assert len(rows) == 7 and rows[6].startswith("15/60 ")


def test_warnings_of_other_ranks_on_the_same_terminal_are_whole(terminal: Terminal) -> None:
    """Several lines between two drawings: none has an end of the table in it."""
    clock = Clock()
    view = show(terminal, clock=clock)
    for step in range(1, 9):
        log_step(step)
    clock.now += 1
    view.tick(9)
    handlers = logger.handlers[:]
    for rank in (1, 2, 3):
        setup_console(rank, stream=terminal.stream)  # takes rank 0's place, as that of a process of its own would
        guest = start_view(0, 60)
        assert guest is not None and not isinstance(guest, LiveView)
        guest.tick(3)
        logger.warning("no space")
        logger.info("not for the console")
        guest.close()
    logger.handlers[:] = handlers
    clock.now += 1
    view.tick(10)
    rows = texts(terminal.rows())
    assert rows[:4] == [f"[rank {rank}] WARNING: no space" for rank in (1, 2, 3)] + [""]
    assert rows[-1].startswith("10/60 ") and len(rows) == 4 + 1 + 8 + 1


def test_what_libraries_print_goes_above(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    error = os.fdopen(os.dup(terminal.end), "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", error)
    setup_console(0)
    view = start_view(0, 60)
    assert isinstance(view, LiveView)
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


def test_a_terminal_that_is_gone_ends_the_view_and_nothing_else(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    terminal.hang_up()
    for step in range(1, 5):
        clock.now += 1
        log_step(step)
        view.tick(step)
    logger.info("into nothing")
    view.close()


def test_a_stopped_terminal_does_not_hold_the_training(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    log_step(1)
    terminal.read()

    def train() -> None:
        for step in range(2, 20):
            clock.now += 1
            view.tick(step)

    with terminal.stopped():
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join(5)
        waits = thread.is_alive()
    assert not waits and terminal.rows()[-1].startswith("19/60 ")


@pytest.mark.parametrize("how", ["Ctrl-S", "asleep"])
def test_a_stopped_terminal_holds_up_no_line_and_no_end(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Log lines, prints and `close` go on; awake, the terminal shows all of it in order."""
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    clock = Clock()
    setup_console(0)
    handler = console_handler()
    assert handler is not None
    handler.view = view = LiveView(handler, 0, 60, clock)
    log_step(1)
    terminal.read()
    said, long = [f"line {n}" for n in range(1000)], "x" * 60  # together more than a terminal's buffer holds
    took: list[float] = []

    def train() -> None:
        began = time.perf_counter()
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
        took.append(time.perf_counter() - began)

    with terminal.stopped(how):
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join(20)
    assert took and took[0] < 6
    deadline = time.monotonic() + 20
    while (rows := texts(terminal.rows()))[-1] != "at last" and time.monotonic() < deadline:
        pass
    assert rows[:1000] == [f"{line} {long}" for line in said]
    assert [row.split()[0] for row in rows[1002:1004]] == ["1", "52"] and rows[1004].startswith("52/60 ━")
    assert rows[1005:] == ["after", "at last"]


def test_of_too_much_for_a_stopped_terminal_the_oldest_goes(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_WAITING_BYTES", 3000)
    show(terminal)
    terminal.read()
    with terminal.stopped():
        for n in range(500):
            logger.info(f"line {n}")
    rows = texts(terminal.rows())
    (gap,) = [n for n, row in enumerate(rows) if "dropped" in row]
    first, last = rows[:gap], rows[gap + 1 : rows.index("", gap)]
    dropped = 500 - len(first) - len(last)
    assert rows[gap] == f"({dropped} lines dropped: the terminal took none)" and 50 < len(last) < 110
    assert first + last == [f"line {n}" for n in (*range(len(first)), *range(500 - len(last), 500))]


def test_a_step_waits_for_nobody_who_is_at_the_view(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    clock.now += 1
    thread = threading.Thread(target=view.tick, args=(7,), daemon=True)
    with view._pen._change:
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
    clock.now += 1
    view.tick(8)
    assert terminal.rows()[-1].startswith("8/60 ")


def test_a_stream_that_is_closed_under_the_view_harms_nothing(terminal: Terminal, tmp_path: Path) -> None:
    """Nor the file that gets its number."""
    setup_console(0, stream=(stream := os.fdopen(os.dup(terminal.end), "w")))
    number = stream.fileno()
    view = start_view(0, 60)
    assert isinstance(view, LiveView)
    stream.close()
    with open(tmp_path / "other", "wb") as file:
        assert file.fileno() == number
        time.sleep(0.11)
        view.tick(3)
        log_step(4)
        view.close()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_descriptor_of_any_number_will_do(terminal: Terminal) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    try:
        os.dup2(terminal.end, 1050)
        with os.fdopen(1050, "w") as stream:
            setup_console(0, stream=stream)
            view = start_view(0, 60)
            assert isinstance(view, LiveView)
            time.sleep(0.11)
            view.tick(3)
            assert terminal.rows()[-1].startswith("3/60 ")
            view.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_of_the_drawing_costs_the_view_and_no_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = show(terminal)
    terminal.read()
    monkeypatch.setattr(live, "progress", lambda *_: 1 / 0)
    logger.info("one")
    logger.info("two")
    assert texts(terminal.rows()) == ["one", "two"]
    monkeypatch.undo()
    view.close()


def test_a_forked_child_leaves_the_view_alone(terminal: Terminal) -> None:
    show(terminal)
    log_step(1)
    terminal.read()
    handler = console_handler()
    assert handler is not None
    child = os.fork()
    if not child:
        handler.target().write("child\n")
        handler.target().flush()
        os._exit(0)
    os.waitpid(child, 0)
    assert terminal.read() == b"child\r\n"


KILLED = """
import os, sys, time
from tests.observe.test_live import figures, log_step
from titanlite.observe.console import logger, setup_console
from titanlite.observe.live import start_view
setup_console(0)
logger.info("kept")
start_view(0, 60)
log_step(1)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_a_clean_terminal(terminal: Terminal, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdout=terminal.end, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stderr is not None and process.stderr.readline() == b"ready\n"
    deadline = time.monotonic() + 20
    while not any("0/60" in row or "1/60" in row for row in terminal.rows()):
        assert time.monotonic() < deadline
    process.send_signal(number)
    assert process.wait(10) == -number
    while len(terminal.rows()) > 1 and time.monotonic() < deadline:
        pass
    assert texts(terminal.rows()) == ["kept"]
    process.stderr.close()


def test_a_run_that_is_killed_with_its_terminal_leaves_no_words_of_the_shell(terminal: Terminal) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=terminal.end, stderr=subprocess.PIPE)
    assert process.stderr is not None and process.stderr.readline() == b"ready\n"
    terminal.hang_up()
    process.kill()
    assert process.communicate(timeout=20)[1] == b""


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
    """In a file or pipe byte for byte the lines that other tools read."""
    monkeypatch.setenv("NO_COLOR", "1")
    if kind == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if kind == "no TERM":
        monkeypatch.delenv("TERM")
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
    assert not any("loss:" in row for row in terminal.rows())


TINY = [
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
    """Runs train.py with the terminal as its standard output and error; the exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    process = subprocess.Popen(
        [*launcher, "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "train.py", *flags],
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
def test_torchrun_on_a_terminal(tmp_path: Path) -> None:
    """Plain `torchrun train.py`: workers inherit the terminal, and rank 0 shows the view."""
    terminal = Terminal(250, 40)
    flags = ["--job.config_file=debug_model.toml", *TINY, f"--job.dump_folder={tmp_path}"]
    assert torchrun(terminal, 2, *flags) == 0
    rows = texts(terminal.rows())
    assert rows[-1] == "training done at step 12" and rows[-2].startswith("12/12 ━") and " took " in rows[-2]
    assert [int(row.split()[0]) for row in rows[-9:-2]] == [1, 2, 4, 6, 8, 10, 12]
    assert rows[-11] == "" and rows[-12].startswith("checkpoint of step 12 written to ")
    for kept in ("a fresh run", "validation at 6: loss", "validation at 12: loss", "model "):
        assert sum(row.startswith(kept) for row in rows) == 1, kept
    assert sum("12/12" in row for row in rows) == 1 and not any("loss:" in row for row in rows)
    assert terminal.sent.count(b"\0337") > 3, "it was shown while the run went on"
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written if "loss" in row] == [1, 2, 4, 6, 8, 10, 12]
    shown = [row.split()[1] for row in rows[-9:-2]]
    assert shown == [f"{row['loss']:.4f}" for row in written if "loss" in row]
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert not ESCAPE.search(log) and log.count("INFO step: ") == 7
    terminal.close()


@pytest.mark.soak
def test_a_run_that_fails_leaves_its_last_state_above_the_reason(tmp_path: Path) -> None:
    terminal = Terminal(120, 40)
    flags = ["--job.config_file=debug_model.toml", *TINY, f"--job.dump_folder={tmp_path}", "--optimizer.lr=1e30"]
    assert torchrun(terminal, 1, *flags) == 1
    rows = texts(terminal.rows())
    (view,) = [n for n, row in enumerate(rows) if "grad norm" in row]
    (reason,) = [n for n, row in enumerate(rows) if row.startswith("error: stopped: ")]
    assert rows[view - 1] == "" and rows[reason - 1].split("/")[1].startswith("12 ") and view < reason
    assert sum("━" in row or "─" in row for row in rows) == 1
    terminal.close()


@pytest.mark.soak
@pytest.mark.parametrize("flag", ["--no-metrics.enable_progress", "--metrics.log_style=fsdp"])
def test_lines_on_a_terminal_where_they_are_wanted(tmp_path: Path, flag: str) -> None:
    terminal = Terminal(200, 40)
    flags = ["--job.config_file=debug_model.toml", *TINY, f"--job.dump_folder={tmp_path}", flag]
    assert torchrun(terminal, 1, *flags) == 0
    rows = terminal.rows()
    pattern = r"I \[train.py:103\] Batch \d+ Loss" if "fsdp" in flag else r"step: +\d+  loss: "
    assert sum(bool(re.search(pattern, row)) for row in rows) == 7
    assert b"\0337" not in terminal.sent and b"\033[J" not in terminal.sent
    terminal.close()
