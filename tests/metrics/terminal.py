"""A pseudo-terminal for tests of the live view; pyte shows its screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import re
import select
import struct
import termios
import threading
from collections.abc import Sequence

import pyte

from titanlite.metrics.step_line import titan_line
from titanlite.utils import logger

#: No program writes it, and a terminal passes it on unchanged.
_MARK = b"\x1b]777;all of it\x1b\\"
#: Seconds for bytes to pass a terminal on a busy machine.
_PATIENCE = 300.0


def figures(step: int, steps: int = 60) -> dict[str, float]:
    return {
        "step": step,
        "loss": 7 - step / 100,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "tps": 5123.4,
        "memory_gib": 0.43,
        "memory_percent": 12.3,
        "tokens_seen": step * 1024,
        "seconds_left": (steps - step) * 2.0,
        "waits_percent": 0.0,
    }


def log_step(step: int) -> None:
    """Log a step as MetricsLogger does."""
    logger.info(titan_line(figures(step)), extra={"figures": figures(step)})


class Terminal:
    """`stream` is the program's end, `screen` what the other end shows."""

    def __init__(self, columns: int, lines: int) -> None:
        self.master, self.end = os.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.stream = os.fdopen(self.end, "w", buffering=1, encoding="utf-8")
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._emulator = pyte.ByteStream(self.screen)
        self.sent = b""
        # A terminal takes text at any time: its kernel buffer holds but a few drawings.
        self._arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._gone = threading.Event()
        self._reader = threading.Thread(target=self._take, daemon=True)
        self._reader.start()

    def _take(self) -> None:
        while not self._gone.is_set():
            if select.select([self.master], [], [], 0.01)[0]:
                self._arrived.put(os.read(self.master, 65536))

    def read(self) -> bytes:
        """Return the text sent since; the screen shows it.

        A mark follows the text through the terminal: when the mark arrives, so have all bytes
        before it.
        """
        self.stream.flush()
        os.write(self.end, _MARK)
        new = b""
        while _MARK not in new:
            new += self._arrived.get(timeout=_PATIENCE)
        new = new.replace(_MARK, b"")
        self._emulator.feed(new)
        self.sent += new
        return new

    def rows(self) -> list[str]:
        """Return all rows that can be seen or scrolled back to, without empty rows at the end."""
        self.read()
        above = [
            "".join(row[x].data for x in range(self.screen.columns))
            for row in self.screen.history.top
        ]
        rows = [row.rstrip() for row in [*above, *self.screen.display]]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def hang_up(self) -> None:
        """Close the other end: writing gives an error."""
        self._gone.set()
        self._reader.join()
        os.close(self.master)

    def close(self) -> None:
        if not self._gone.is_set():
            self.hang_up()
        with contextlib.suppress(OSError):
            self.stream.close()


def texts(rows: Sequence[str]) -> list[str]:
    """Return log lines without their time stamps."""
    return [row[20:] if re.match(r"\d{4}-\d\d-\d\d \d\d:", row) else row for row in rows]


def step_lines(*steps: int) -> list[str]:
    return [titan_line(figures(step)) for step in steps]
