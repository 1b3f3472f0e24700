"""The live view of a terminal: a table of the last logged steps and a progress line, below the lines of the log.

The cursor stays where the next line of the log goes; the view lies below it. So whoever writes to the terminal, a
library or another process, writes above the view, and what it overwrites is drawn again. A resized terminal may fold
the rows: they still lie below the cursor, and everything there is erased with the next drawing.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from titanlite.observe.console import FIELD_COLORS, ConsoleHandler, View, console_handler
from titanlite.observe.stepline import StepFigures, human_time

#: Logged steps in the table, on a terminal that is high enough.
ROWS = 8
_SECONDS_BETWEEN = 0.1
_LONGEST_BAR, _SHORTEST_BAR = 40, 10
_GAP = 2

_ERASE_BELOW = "\033[J"
_ERASE_RIGHT = "\033[K"
_SAVE_CURSOR, _RESTORE_CURSOR = "\0337", "\0338"
#: Down one line in the same column; on the last line the screen scrolls.
_DOWN = "\033D"
_GREY = "90"

#: A row of the view: (key of its colour or "", text).
_Row = list[tuple[str, str]]


def _number(value: float) -> str:
    return f"{value:.3e}" if abs(value) >= 1e5 else f"{value:.4f}"


def _memory(f: StepFigures) -> str:
    return f"{f.memory_gib:.2f} GiB" + ("" if f.memory_percent is None else f" ({f.memory_percent:.0f}%)")


#: Key, title, text of a cell; the first two are never left out.
_COLUMNS: tuple[tuple[str, str, Callable[[StepFigures], str]], ...] = (
    ("step", "step", lambda f: f"{f.step:,}"),
    ("loss", "loss", lambda f: _number(f.loss)),
    ("grad_norm", "grad norm", lambda f: _number(f.norm)),
    ("lr", "lr", lambda f: f"{f.lr:.2e}"),
    ("tps", "tokens/s", lambda f: f"{round(f.tps):,}"),
    ("mfu", "mfu", lambda f: "" if f.mfu is None else f"{f.mfu:.1f}%"),
    ("memory", "memory", _memory),
)
#: What a narrow terminal does without, first to last.
_OPTIONAL_COLUMNS = ("lr", "grad_norm", "mfu", "memory", "tps")
_OPTIONAL_FIELDS = ("memory", "tps", "loss", "left")


def table(figures: Sequence[StepFigures], columns: int) -> list[_Row]:
    """A title row and one row per step, as many columns as have room."""
    cells = {key: [title, *map(text, figures)] for key, title, text in _COLUMNS}
    if not any(cells["mfu"][1:]):
        del cells["mfu"]
    widths = {key: max(8, *map(len, column)) for key, column in cells.items()}
    shown = _fitting({key: width + _GAP for key, width in widths.items()}, columns, _OPTIONAL_COLUMNS)
    return [
        [(key if row else _GREY, f"{cells[key][row]:>{widths[key]}}{' ' * _GAP}") for key in shown]
        for row in range(len(figures) + 1)
    ]


def progress(last: StepFigures | None, step: int, steps: int, time_text: str, columns: int, blocks: str = "━─") -> _Row:
    """`120/600 ━━━──────── 20%  loss 5.1234  5,123 tokens/s  0.43 GiB  left 0:04:05`, or what has room of it.

    blocks: the characters of what is done and of what is left.
    """
    fields = {}
    if last is not None:
        fields = {"loss": f"loss {_number(last.loss)}", "tps": f"{round(last.tps):,} tokens/s", "memory": _memory(last)}
    if time_text:
        fields["left"] = time_text
    share = step / steps
    counter, percent = f"{step:,}/{steps:,} ", f" {int(100 * share)}%"
    room = columns - len(counter) - len(percent)
    shown = _fitting({key: len(text) + _GAP for key, text in fields.items()}, room - _SHORTEST_BAR, _OPTIONAL_FIELDS)
    room -= sum(len(fields[key]) + _GAP for key in shown)
    bar = max(min(room, _LONGEST_BAR), 0)
    done = int(bar * share)
    row = [("step", counter), ("loss", blocks[0] * done), (_GREY, blocks[1] * (bar - done)), ("", percent)]
    for key in shown:
        row += [("", " " * _GAP), (key, fields[key])]
    return row


def _fitting(widths: Mapping[str, int], room: int, optional: Sequence[str]) -> list[str]:
    """The keys that have room together, after leaving out `optional` ones in their order."""
    shown = dict(widths)
    for key in optional:
        if sum(shown.values()) <= room:
            break
        shown.pop(key, None)
    return list(shown)


def paint(row: _Row, columns: int, color: bool) -> str:
    """The row as text, at most `columns` wide."""
    text = ""
    for key, part in row:
        part, columns = part[:columns], columns - len(part[:columns])
        code = FIELD_COLORS.get(key, key)
        text += f"\033[{code}m{part}\033[0m" if color and code and part.strip() else part
    return text


def start_view(done: int, steps: int) -> View | None:
    """Show the view of a run of `steps` steps, `done` of them done, where `setup_console` logs to a terminal.

    Of several ranks on one terminal, rank 0 draws it. None: no such terminal.
    """
    handler = console_handler()
    if handler is None or not _is_terminal(handler.target()):
        return None
    handler.view = _Guest(handler) if handler.rank else LiveView(handler, done, steps)
    return handler.view


def _is_terminal(stream: TextIO) -> bool:
    """Whether the stream ends on a terminal that can move its cursor."""
    if os.environ.get("TERM", "") in ("", "dumb"):
        return False
    try:
        return stream.isatty() and stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


class LiveView:
    """The view on the console's terminal.

    `tick` and `add` belong to the training thread; other threads may print meanwhile. Nothing raises because of the
    terminal: one that is gone ends the view.
    """

    def __init__(
        self, handler: ConsoleHandler, done: int, steps: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._handler, self._stream = handler, handler.target()
        self._fd = self._stream.fileno()
        self._blocks = "━─" if _can_encode(self._stream, "━─") else "#-"
        self._step, self._steps = done, steps
        self._clock, self._began, self._due = clock, clock(), 0.0
        self._figures: deque[StepFigures] = deque(maxlen=ROWS)
        self._lock = threading.RLock()
        self._aside = 0
        self._process = os.getpid()
        self._open = True
        self._guard = _start_guard(self._fd)
        for name in ("stdout", "stderr"):
            if _is_terminal(getattr(sys, name)):
                setattr(sys, name, _Passage(getattr(sys, name), self))
        self._draw()

    def tick(self, step: int) -> None:
        """After every step; draws at most ten times a second. Costs a clock call when nothing is due."""
        self._step = step
        if self._clock() >= self._due:
            with self._lock:
                # A terminal that takes nothing (Ctrl-S) must not make the training wait.
                if not self._aside and self._open and select.select([], [self._fd], [], 0)[1]:
                    self._draw()

    def add(self, figures: StepFigures) -> None:
        """After a logged step, with its figures."""
        with self._lock:
            self._figures.append(figures)
        self.tick(figures.step)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Lines written inside find nothing below the cursor; the view is drawn again below them."""
        if not self._open or os.getpid() != self._process:  # a forked child has a copy of the view but no business here
            yield
            return
        with self._lock:
            self._aside += 1
            try:
                if self._aside == 1:
                    self._write(_ERASE_BELOW)
                yield
            finally:
                self._aside -= 1
                if not self._aside and self._open:
                    self._draw()

    def close(self) -> None:
        """Leave the last state on the screen as plain text, and the cursor below it."""
        with self._lock:
            if self._open:
                rows = self._rows() if self._figures else []
                self._write(_ERASE_BELOW + "".join(f"\r\n{row}" for row in rows) + ("\r\n" if rows else ""))
                self._open = False
        if self._handler.view is self:
            self._handler.view = None
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _Passage) and stream.view is self:
                setattr(sys, name, stream.stream)
        if self._guard is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._guard.communicate(b"closed\n", timeout=1)
            self._guard = None

    def _rows(self) -> list[str]:
        columns, lines = _size(self._fd)
        columns -= 1  # a full row would leave the cursor between two lines
        figures = list(self._figures)
        figures = figures[max(len(figures) - max(min(ROWS, lines // 2 - 2), 0), 0) :]
        last = self._figures[-1] if self._figures else None
        rows = table(figures, columns) if figures else []
        rows.append(progress(last, self._step, self._steps, self._time(last), columns, self._blocks))
        return [paint(row, columns, self._handler.color) for row in rows]

    def _time(self, last: StepFigures | None) -> str:
        if self._step >= self._steps:
            return f"took {human_time(self._clock() - self._began)}"
        if last is None or last.seconds_left is None:
            return ""
        return f"left {human_time(last.seconds_left * (self._steps - self._step) / (self._steps - last.step))}"

    def _draw(self) -> None:
        rows = self._rows()
        # Room first, by scrolling where the cursor is too low, so that the saved position stays right.
        frame = _DOWN * len(rows) + f"\033[{len(rows)}A{_SAVE_CURSOR}{_ERASE_RIGHT}"
        frame += "".join(f"\r\n{row}{_ERASE_RIGHT}" for row in rows)
        self._write(frame + _ERASE_BELOW + _RESTORE_CURSOR)
        self._due = self._clock() + _SECONDS_BETWEEN

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._open = False


class _Guest:
    """Another rank on the terminal of rank 0's view: erases it before it writes; rank 0 draws it again."""

    def __init__(self, handler: ConsoleHandler) -> None:
        self._handler = handler

    def tick(self, step: int) -> None:
        pass

    def add(self, figures: StepFigures) -> None:
        pass

    @contextmanager
    def aside(self) -> Iterator[None]:
        with contextlib.suppress(OSError, ValueError):
            stream = self._handler.target()
            stream.write(_ERASE_BELOW)
            stream.flush()
        yield

    def close(self) -> None:
        """An exception may be on its way to the terminal."""
        with self.aside():
            self._handler.view = None


class _Passage:
    """sys.stdout or sys.stderr while a view is shown: what libraries print goes above it."""

    def __init__(self, stream: TextIO, view: View) -> None:
        self.stream, self.view = stream, view

    def write(self, text: str) -> int:
        if "\n" not in text:
            return self.stream.write(text)
        with self.view.aside():
            written = self.stream.write(text)
            self.stream.flush()
            return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _start_guard(terminal: int) -> subprocess.Popen[bytes] | None:
    """A process that erases the view when this one is killed: what is said after that would be written into it."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", "read -r word || printf '\\033[J'"],
            stdin=subprocess.PIPE,
            stdout=terminal,
            start_new_session=True,  # a signal to this process's group is not for it
        )
    except OSError:
        return None


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding)
    except (LookupError, UnicodeError, AttributeError, TypeError):
        return False
    return True


def _size(terminal: int) -> tuple[int, int]:
    """Columns and lines; a terminal that does not know them counts as 80 x 24."""
    try:
        columns, lines = os.get_terminal_size(terminal)
    except OSError:
        columns, lines = 0, 0
    return columns or 80, lines or 24
