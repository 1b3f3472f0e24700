"""The live view of a terminal: a table of the last logged steps and a progress line, below the lines of the log.

A step that leaves the table becomes a line of the log, so that it can be scrolled back to. At the end the table stays.
The cursor stays where the next line of the log goes; the view lies below it. So whoever writes to the terminal, a
library or another process, writes above the view, and what it overwrites is drawn again. A resized terminal may fold
the rows: they still lie below the cursor, and everything there is erased with the next drawing.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from titanlite.metrics.console import FIELD_COLORS, ConsoleHandler, View, console_handler, is_dumb
from titanlite.metrics.stepline import StepFigures
from titanlite.utils import counted, human_time

#: Logged steps in the table, on a terminal that is high enough.
ROWS = 8
_SECONDS_BETWEEN = 0.1
#: What may wait for a terminal that takes nothing; then the oldest lines are dropped. Ten thousand lines, about.
_WAITING_BYTES = 1 << 20
#: How long a line may wait to be written; once it was too long, later ones do not until the terminal takes something.
_LINE_SECONDS = 0.5
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
    if handler is None or not _is_watched(handler.target()):
        return None
    handler.view = _Guest(handler) if handler.rank else LiveView(handler, done, steps)
    return handler.view


def _is_terminal(stream: TextIO) -> bool:
    """Whether text for the stream may as well be written to its descriptor, and that is a terminal."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.isatty()
    except (OSError, ValueError):
        return False


def _is_watched(stream: TextIO) -> bool:
    """Whether the stream ends on a terminal that can move its cursor and that a person looks at.

    Containers are given terminals too, whose drawings would fill a file; those have no size, or say where they are.
    """
    if not _is_terminal(stream) or is_dumb() or not os.environ.get("TERM"):
        return False
    if os.environ.get("CI") or os.environ.get("KUBERNETES_SERVICE_HOST"):
        return False
    try:
        return os.get_terminal_size(stream.fileno()) != (0, 0)
    except OSError:
        return False


class LiveView:
    """The view on the console's terminal.

    `tick` and `add` belong to the training thread; other threads may print meanwhile. Nothing raises because of the
    terminal: one that is gone ends the view. One that takes nothing is written to later.
    """

    def __init__(
        self, handler: ConsoleHandler, done: int, steps: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._handler, self._stream = handler, handler.target()
        self._blocks = "━─" if _can_encode(self._stream, "━─") else "#-"
        self._step, self._steps = done, steps
        self._clock, self._began, self._due = clock, clock(), clock() + _SECONDS_BETWEEN
        #: Of the table: figures, and the line that the step becomes when it leaves.
        self._shown: tuple[tuple[StepFigures, str], ...] = ()
        self._open = True
        self._pen = _Pen(handler, self._frame)
        self._guard = _start_guard(self._pen.fd)
        self._pen.draw()

    def tick(self, step: int) -> None:
        """After every step; draws at most ten times a second. Costs a clock call when nothing is due."""
        self._step = step
        if (now := self._clock()) >= self._due:
            self._due = now + _SECONDS_BETWEEN
            self._pen.draw()

    def add(self, figures: StepFigures, line: str) -> None:
        """After a logged step, with its figures and its line."""
        steps = (*self._shown, (figures, line))
        self._shown = steps[-ROWS:]
        for _, text in steps[:-ROWS]:
            self._pen.say(f"{text}\n".encode(self._stream.encoding, "replace"))
        self.tick(figures.step)

    def close(self, seconds: float = 2.0) -> None:
        """Leave the last state on the screen as plain text, and the cursor below it."""
        if self._open:
            rows = self._rows(ROWS) if self._shown else []
            self._open = False
            self._pen.close("".join(f"\r\n{row}" for row in rows) + ("\r\n" if rows else ""), seconds)
        if self._handler.view is self:
            self._handler.view = None
        if self._guard is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._guard.communicate(b"closed\n", timeout=seconds)
            self._guard = None

    def _rows(self, most: int | None = None) -> list[str]:
        """Title, at most so many steps (None: as many as the terminal has room for), progress."""
        columns, lines = _size(self._pen.fd)
        columns -= 1  # a full row would leave the cursor between two lines
        most = max(min(ROWS, lines // 2 - 2), 0) if most is None else most
        figures = [figures for figures, _ in self._shown]
        last = figures[-1] if figures else None
        figures = figures[max(len(figures) - most, 0) :]
        rows = table(figures, columns) if figures else []
        rows.append(progress(last, self._step, self._steps, self._time(last), columns, self._blocks))
        return [paint(row, columns, self._handler.color) for row in rows]

    def _time(self, last: StepFigures | None) -> str:
        if self._step >= self._steps:
            return f"took {human_time(self._clock() - self._began)}"
        if last is None or last.seconds_left is None:
            return ""
        return f"left {human_time(last.seconds_left * (self._steps - self._step) / (self._steps - last.step))}"

    def _frame(self) -> str:
        if not self._open:
            return ""
        rows = self._rows()
        # Room first, by scrolling where the cursor is too low, so that the saved position stays right.
        frame = _DOWN * len(rows) + f"\033[{len(rows)}A{_SAVE_CURSOR}{_ERASE_RIGHT}"
        frame += "".join(f"\r\n{row}{_ERASE_RIGHT}" for row in rows)
        return frame + _ERASE_BELOW + _RESTORE_CURSOR


class _Guest:
    """Another rank on the terminal of rank 0's view: erases it before it writes; rank 0 draws it again."""

    def __init__(self, handler: ConsoleHandler) -> None:
        self._handler, self._pen = handler, _Pen(handler, str)

    def tick(self, step: int) -> None:
        pass

    def add(self, figures: StepFigures, line: str) -> None:
        pass

    def close(self, seconds: float = 2.0) -> None:
        """An exception may be on its way to the terminal."""
        if self._handler.view is self:
            self._handler.view = None
            self._pen.close("", seconds)


class _Pen:
    """A thread that writes to the console's terminal what this process says there, and a frame below it.

    From here to `close` the console's stream, sys.stdout and sys.stderr lead to it where they are that terminal. So a
    terminal that takes nothing (Ctrl-S, a connection that sleeps) holds nobody up for long. Lines keep their order;
    frames are only drawn when no line waits.
    """

    def __init__(self, handler: ConsoleHandler, frame: Callable[[], str]) -> None:
        self._handler, self._frame = handler, frame
        stream = handler.target()
        self._encoding = stream.encoding
        self.fd = os.dup(stream.fileno())  # the stream's own may be closed, and then be that of another file
        self.process = os.getpid()
        self._said: deque[bytes] = deque()
        self._bytes = self._dropped = 0
        self._drawing = self._writing = self._stuck = self._ended = self._gone = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="titanlite-terminal", daemon=True)
        self._thread.start()
        if handler.given is not None:
            handler.given = self._passage(handler.given)
        sys.stdout, sys.stderr = self._passage(sys.stdout), self._passage(sys.stderr)

    def _passage(self, stream: TextIO) -> Any:
        if not _is_terminal(stream) or os.fstat(stream.fileno()).st_rdev != os.fstat(self.fd).st_rdev:
            return stream
        stream.flush()
        return _Passage(stream, self)

    def say(self, text: bytes, seconds: float = _LINE_SECONDS) -> None:
        """Have it written. A whole line is written when this returns, if the terminal takes it in time."""
        with self._change:
            self._said.append(text)
            self._bytes += len(text)
            while self._bytes > _WAITING_BYTES and len(self._said) > 1:
                oldest = self._said.popleft()
                self._bytes -= len(oldest)
                self._dropped += oldest.count(b"\n")
            self._change.notify_all()
        if b"\n" in text:
            self.flush(0 if self._stuck else seconds)

    def draw(self) -> None:
        """Have the frame drawn, unless another thread is here just now: a later one will do."""
        if self._change.acquire(blocking=False):
            try:
                self._drawing = True
                self._change.notify_all()
            finally:
                self._change.release()

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, at most so long; whether it is."""
        if threading.current_thread() is self._thread:
            return True
        with self._change:
            done = self._change.wait_for(lambda: not (self._said or self._drawing or self._writing), seconds)
            self._stuck = not done
        return done

    def close(self, last: str, seconds: float) -> None:
        """Erase the frame, write `last`, and give the streams back.

        Where the terminal took not all of it in time they lead here on, so that nothing waits for it or goes before.
        """
        self.say((_ERASE_BELOW + last).encode(self._encoding, "replace"), 0)
        if not self.flush(seconds):
            return
        for place, name in ((self._handler, "given"), (sys, "stdout"), (sys, "stderr")):
            stream = getattr(place, name)
            if isinstance(stream, _Passage) and stream.pen is self:
                setattr(place, name, stream.stream)
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _work(self) -> None:
        while True:
            with self._change:
                self._writing = self._stuck = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._said or self._drawing or self._ended)
                if self._ended and not self._said:
                    break
                text = b"".join(self._said)
                if self._dropped:
                    text = f"({counted(self._dropped, 'lines')} dropped: the terminal took none)\n".encode() + text
                draw = self._drawing or b"\n" in text
                self._said.clear()
                self._bytes = self._dropped = 0
                self._drawing, self._writing = False, True
            self._write(_ERASE_BELOW.encode() + text if b"\n" in text else text)
            if draw and not self._said:
                self._write(self._drawn())
        os.close(self.fd)

    def _drawn(self) -> bytes:
        try:
            return self._frame().encode(self._encoding, "replace")
        except Exception:  # the lines are worth more than the view
            self._frame = str
            return b""

    def _write(self, data: bytes) -> None:
        while data and not self._gone:
            try:
                data = data[os.write(self.fd, data) :]
            except BlockingIOError:  # somebody made the terminal so
                time.sleep(0.05)
            except OSError:
                self._gone = True


class _Passage:
    """A stream of the terminal while a view is shown: what is written there goes above it."""

    def __init__(self, stream: TextIO, pen: _Pen) -> None:
        self.stream, self.pen = stream, pen

    def write(self, text: str) -> int:
        if os.getpid() != self.pen.process:  # a forked child has neither the thread nor any business with the view
            return self.stream.write(text)
        self.pen.say(text.encode(self.stream.encoding, self.stream.errors or "strict"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _start_guard(terminal: int) -> subprocess.Popen[bytes] | None:
    """A process that erases the view when this one is killed: what is said after that would be written into it."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", "read -r word || printf '\\033[J'"],
            stdin=subprocess.PIPE,
            stdout=terminal,
            stderr=subprocess.DEVNULL,  # the terminal may be gone too
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
