"""The log on standard output: rank 0 logs everything, other ranks only warnings. No torch here."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, TextIO

from titanlite.utils import escape, logger, wants_color

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # on Python 3.10 it takes no subscript

_RESET = "\033[0m"
#: Key of the step line -> ANSI code. The step is bold: red is for errors.
FIELD_COLORS = {
    "step": "1",
    "loss": "32",
    "memory": "33",
    "tps": "34",
    "mfu": "35",
    "grad_norm": "36",
    "lr": "36",
    "tokens": "90",
    "left": "90",
}
_LEVEL_COLORS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}
_FIELD = re.compile(rf"(?<!\S)({'|'.join(FIELD_COLORS)}): +\S+")


class ConsoleHandler(_StreamHandler):
    """Writes the log lines of one rank. `color`: escape codes may go to the stream.

    A step line has `figures` (`extra={"figures": …}`), and its fields have colours.
    """

    def __init__(self, rank: int, color: bool | None, stream: TextIO | None) -> None:
        self.given = stream
        super().__init__(self.target())
        self.color = wants_color(self.target(), color)
        self.rank = rank
        self.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        self.setFormatter(logging.Formatter("%(message)s"))

    def target(self) -> TextIO:
        """Return the stream: a notebook or a test may have replaced sys.stdout."""
        return sys.stdout if self.given is None else self.given

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = self.target()
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not hasattr(record, "figures"):
            text = escape(text)
        elif self.color:
            text = _FIELD.sub(
                lambda match: f"\033[{FIELD_COLORS[match[1]]}m{match[0]}{_RESET}", text
            )
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname}: {text}"
        if self.rank:
            text = f"[rank {self.rank}] {text}"
        if self.color and record.levelno in _LEVEL_COLORS:
            text = f"\033[{_LEVEL_COLORS[record.levelno]}m{text}{_RESET}"
        return f"{logging.Formatter().formatTime(record, '%Y-%m-%d %H:%M:%S')} {text}"


def setup_console(rank: int, color: bool | None = None, stream: TextIO | None = None) -> None:
    """Send the `titanlite` logger to `stream` (None: standard output), in place of an earlier call.

    Rank 0 shows INFO and up, others WARNING and up. color: as `wants_color` takes it.
    """
    if (before := console_handler()) is not None:
        logger.removeHandler(before)
    logger.addHandler(ConsoleHandler(rank, color, stream))
    logger.setLevel(logging.INFO)
    # Libraries that call logging.basicConfig would otherwise print every line a second time.
    logger.propagate = False


def ensure_console(rank: int) -> None:
    """Call `setup_console` where nothing shows the log: in a plain script or a notebook.

    A notebook's server may have a handler for warnings alone. A level that somebody chose stays.
    """
    in_notebook = "ipykernel" in sys.modules
    is_shown = logger.hasHandlers() and (logger.isEnabledFor(logging.INFO) or not in_notebook)
    if logger.level == logging.NOTSET and not is_shown:
        setup_console(rank)


def console_handler() -> ConsoleHandler | None:
    """Return the handler of `setup_console`; None: it was not called."""
    return next(
        (handler for handler in logger.handlers if isinstance(handler, ConsoleHandler)), None
    )
