"""The live view of a terminal: a table of the last logged steps and a progress line, below the lines of the log.

A step that leaves the table becomes a line of the log, so you can scroll back to it. At the end the table stays.
The cursor stays where the next line of the log goes, and the view lies below it. So a library or another process that
writes to the terminal writes above the view, and the next drawing restores the rows that it overwrote. A resized
terminal may fold the rows: they still lie below the cursor, and the next drawing erases everything there.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from titanlite.metrics.console import FIELD_COLORS, ConsoleHandler, StepFigures, console_handler, is_dumb
from titanlite.utils import human_time

#: Logged steps in the table, on a terminal that is high enough.
ROWS = 8
_SECONDS_BETWEEN = 0.1
#: The longest wait for a terminal that takes no line. While some text still waits, further lines wait no longer.
_LINE_SECONDS = 0.5
_LONGEST_BAR, _SHORTEST_BAR, _GAP = 40, 10, 2

_ERASE_BELOW, _ERASE_RIGHT = "\033[J", "\033[K"
_SAVE_CURSOR, _RESTORE_CURSOR = "\0337", "\0338"
#: Down one line in the same column; on the last line the screen scrolls.
_DOWN = "\033D"
_GREY = "90"

#: A row of the view: (key of its colour or "", text).
_Row = list[tuple[str, str]]


def _number(value: float) -> str:
    return f"{value:.3e}" if abs(value) >= 1e5 else f"{value:.4f}"


#: Key -> title, and text of a cell. Narrow terminals leave out the optional ones, first to last.
_COLUMNS: dict[str, tuple[str, Callable[[StepFigures], str]]] = {
    "step": ("step", lambda f: f"{f.step:,}"),
    "loss": ("loss", lambda f: _number(f.loss)),
    "grad_norm": ("grad norm", lambda f: _number(f.norm)),
    "lr": ("lr", lambda f: f"{f.lr:.2e}"),
    "tps": ("tokens/s", lambda f: f"{round(f.tps):,}"),
    "mfu": ("mfu", lambda f: "" if f.mfu is None else f"{f.mfu:.1f}%"),
    "memory": (
        "memory",
        lambda f: f"{f.memory_gib:.2f} GiB" + ("" if f.memory_percent is None else f" ({f.memory_percent:.0f}%)"),
    ),
}
_OPTIONAL_COLUMNS = ("lr", "grad_norm", "mfu", "memory", "tps")
_OPTIONAL_FIELDS = ("memory", "tps", "loss", "left")


def table(figures: Sequence[StepFigures], columns: int) -> list[_Row]:
    """Return a title row and one row per step, with as many columns as fit."""
    cells = {key: [title, *map(text, figures)] for key, (title, text) in _COLUMNS.items()}
    if not any(cells["mfu"][1:]):
        del cells["mfu"]
    widths = {key: max(8, *map(len, column)) for key, column in cells.items()}
    shown = _fitting({key: width + _GAP for key, width in widths.items()}, columns, _OPTIONAL_COLUMNS)
    return [
        [(key if row else _GREY, f"{cells[key][row]:>{widths[key]}}{' ' * _GAP}") for key in shown]
        for row in range(len(figures) + 1)
    ]


def progress(last: StepFigures | None, step: int, steps: int, time_text: str, columns: int, blocks: str = "━─") -> _Row:
    """Return `120/600 ━━━──────── 20%  loss 5.1234  5,123 tokens/s  0.43 GiB  left 0:04:05`, or what fits of it.

    blocks: the characters of the done part and of the rest.
    """
    fields = {} if last is None else {key: _COLUMNS[key][1](last) for key in ("loss", "tps", "memory")}
    if last is not None:
        fields |= {"loss": f"loss {fields['loss']}", "tps": f"{fields['tps']} tokens/s"}
    if time_text:
        fields["left"] = time_text
    share = step / steps
    counter, percent = f"{step:,}/{steps:,} ", f" {int(100 * share)}%"
    room = columns - len(counter) - len(percent)
    shown = _fitting({key: len(text) + _GAP for key, text in fields.items()}, room - _SHORTEST_BAR, _OPTIONAL_FIELDS)
    bar = max(min(room - sum(len(fields[key]) + _GAP for key in shown), _LONGEST_BAR), 0)
    done = int(bar * share)
    row = [("step", counter), ("loss", blocks[0] * done), (_GREY, blocks[1] * (bar - done)), ("", percent)]
    for key in shown:
        row += [("", " " * _GAP), (key, fields[key])]
    return row


def _fitting(widths: Mapping[str, int], room: int, optional: Sequence[str]) -> list[str]:
    """Return the keys that fit together, after leaving out `optional` ones in their order."""
    shown = dict(widths)
    for key in optional:
        if sum(shown.values()) > room:
            shown.pop(key, None)
    return list(shown)


def paint(row: _Row, columns: int, color: bool) -> str:
    """Return the row as text, at most `columns` wide."""
    text = ""
    for key, part in row:
        part, columns = part[:columns], columns - len(part[:columns])
        code = FIELD_COLORS.get(key, key)
        text += f"\033[{code}m{part}\033[0m" if color and code and part.strip() else part
    return text


def start_view(done: int, steps: int) -> LiveView | None:
    """Show the view of a run of `steps` steps, `done` of them done, where `setup_console` logs to a person's terminal.

    Return None elsewhere. Ranks may share a terminal: rank 0 draws, the others only erase the view before their lines.
    """
    handler, environment = console_handler(), os.environ
    # Containers get terminals too, whose drawings would fill a file. Those have no size, or say where they are.
    if is_dumb() or not environment.get("TERM") or environment.get("CI") or environment.get("KUBERNETES_SERVICE_HOST"):
        return None
    if handler is None or not _is_terminal(stream := handler.target()):
        return None
    with contextlib.suppress(OSError):  # it has gone, or this user may not open it
        if os.get_terminal_size(stream.fileno()) != (0, 0):
            handler.view = LiveView(handler, done, steps)
    return handler.view


def _is_terminal(stream: TextIO) -> bool:
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.isatty()
    except (OSError, ValueError):
        return False


class LiveView:
    """Draws the view on the console's terminal. What the log, sys.stdout and sys.stderr say there goes above it.

    The training thread calls `tick` and `add`; other threads may print meanwhile. Training never waits for the
    terminal: one that takes nothing (Ctrl-S, a connection that sleeps) gets its text later, in order.
    """

    def __init__(
        self, handler: ConsoleHandler, done: int, steps: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._handler, self._stream = handler, handler.target()
        # Opened again: on a duplicate, O_NONBLOCK would hold for every process that shares the terminal.
        self._fd = os.open(os.ttyname(self._stream.fileno()), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        self._lock = threading.RLock()
        self._waiting = bytearray()
        self._step, self._steps = done, steps
        self._clock, self._began, self._due = clock, clock(), clock() + _SECONDS_BETWEEN
        #: Figures of a step, and the line that the step becomes when it leaves the table.
        self._shown: tuple[tuple[StepFigures, str], ...] = ()
        self._draws = handler.rank == 0
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if _is_terminal(stream) and os.fstat(stream.fileno()).st_rdev == os.fstat(self._fd).st_rdev:
                stream.flush()
                setattr(sys, name, _Redirect(stream, self))
        self._draw()

    def tick(self, step: int) -> None:
        """Call after every step; draws at most ten times a second. Costs a clock call when no drawing is due."""
        self._step = step
        if (now := self._clock()) >= self._due:
            self._due = now + _SECONDS_BETWEEN
            self._draw()

    def add(self, figures: StepFigures, line: str) -> None:
        """Show a logged step. Its line is written when the step leaves the table."""
        steps = (*self._shown, (figures, line))
        self._shown = steps[-ROWS:]
        for _, text in steps[:-ROWS]:
            self.print(f"{text}\n")
        self.tick(figures.step)

    def print(self, text: str) -> None:
        """Write text above the view. A part of a line (a progress bar of another program) stays at the cursor."""
        with self._lock:
            if "\n" not in text:
                self._write(text)
            else:
                self._write(_ERASE_BELOW + text, 0 if self._waiting else _LINE_SECONDS)
                self._draw()

    def close(self, seconds: float = 2.0) -> None:
        """Leave the last state on the screen as plain text, the cursor below it. Wait for the terminal at most so long.

        If the terminal does not take all of it in time, later text still goes through here, so that nothing blocks.
        """
        rows = self._rows(ROWS) if self._draws and self._shown else []
        self._draws, self._shown = False, ()
        last = "".join(f"\r\n{row}" for row in rows) + "\r\n" * bool(rows)
        if self._handler.view is not self or not self._write(_ERASE_BELOW + last, seconds):
            return
        self._handler.view = None
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _Redirect) and stream.view is self:
                setattr(sys, name, stream.stream)

    def _draw(self) -> None:
        """Draw the view, unless older text still waits for the terminal."""
        with self._lock, contextlib.suppress(Exception):  # no error of the view may cost a line or a step
            if self._write("") and self._draws:
                rows = self._rows()
                # Make room first, by scrolling where the cursor is too low, so that the saved position stays right.
                frame = _DOWN * len(rows) + f"\033[{len(rows)}A{_SAVE_CURSOR}{_ERASE_RIGHT}"
                frame += "".join(f"\r\n{row}{_ERASE_RIGHT}" for row in rows)
                self._write(frame + _ERASE_BELOW + _RESTORE_CURSOR, _SECONDS_BETWEEN)

    def _write(self, text: str, seconds: float = 0.0) -> bool:
        """Write the bytes that wait, then the text, for at most so long; return whether all is written."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._waiting += text.encode(self._stream.encoding, "replace")
            while self._waiting:
                try:
                    del self._waiting[: os.write(self._fd, self._waiting)]
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(0.005)
                except OSError:  # the terminal is gone
                    self._waiting.clear()
            return True

    def _rows(self, most: int | None = None) -> list[str]:
        """Return title, at most so many steps (None: as many as the terminal has room for), and progress."""
        columns, lines = 80, 24
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._fd)
        columns -= 1  # a full row would leave the cursor between two lines
        most = max(min(ROWS, lines // 2 - 2), 0) if most is None else most
        figures = [figures for figures, _ in self._shown]
        last, left = figures[-1] if figures else None, ""
        figures = figures[max(len(figures) - most, 0) :]
        if self._step >= self._steps:
            left = f"took {human_time(self._clock() - self._began)}"
        elif last is not None and last.seconds_left is not None:
            left = f"left {human_time(last.seconds_left * (self._steps - self._step) / (self._steps - last.step))}"
        blocks = "━─" if "━".encode(self._stream.encoding, "replace") != b"?" else "#-"
        rows = table(figures, columns) if figures else []
        rows.append(progress(last, self._step, self._steps, left, columns, blocks))
        return [paint(row, columns, self._handler.color) for row in rows]


class _Redirect:
    """A stream of the terminal while a view is shown: its text goes above the view."""

    def __init__(self, stream: TextIO, view: LiveView) -> None:
        self.stream, self.view, self._process = stream, view, os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._process:  # a forked child must not touch the view
            return self.stream.write(text)
        self.view.print(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
