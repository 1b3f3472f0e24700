"""The log on standard output: rank 0 logs everything, other ranks only warnings. No torch here."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

from titanlite.metrics.terminal import is_dumb, is_terminal, terminal_width, wants_color
from titanlite.utils import escape, logger

if TYPE_CHECKING:
    from titanlite.metrics.live import LiveView

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
    """Writes the log lines of one rank. `color` says whether escape codes may go to the stream.

    A step line has `figures` (`extra={"figures": …}`), and its fields have colours. While there is
    a
    `view`, lines go through it, and steps are shown in its table first.
    """

    def __init__(self, rank: int, color: bool | None, stream: TextIO | None) -> None:
        self.given = stream
        super().__init__(self.target())
        if color is None:
            color = wants_color(self.target())
        self.color = color and not is_dumb()
        self.rank = rank
        self.view: LiveView | None = None
        self.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        self.setFormatter(logging.Formatter("%(message)s"))

    def target(self) -> TextIO:
        """Return the stream that lines go to now: a notebook or a test may have replaced
        sys.stdout.
        """
        return sys.stdout if self.given is None else self.given

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = self.target()
        if self.view is None:
            super().emit(record)
            return
        try:
            text, figures = self.format(record), getattr(record, "figures", None)
            if figures is None:
                self.view.print(text)
            else:
                self.view.add(figures, text)
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        stamp = f"{logging.Formatter().formatTime(record, '%Y-%m-%d %H:%M:%S')} "
        is_step = hasattr(record, "figures")
        if is_step and self.color:
            text = _FIELD.sub(
                lambda match: f"\033[{FIELD_COLORS[match[1]]}m{match[0]}{_RESET}", text
            )
        elif not is_step:
            text = escape(text)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname}: {text}"
        if self.rank:
            text = f"[rank {self.rank}] {text}"
        if not is_step:
            width = terminal_width(self.target())
            text = folded(f"{stamp}{text}", len(stamp), width).removeprefix(stamp)
        if self.color and record.levelno in _LEVEL_COLORS:
            text = f"\033[{_LEVEL_COLORS[record.levelno]}m{text}{_RESET}"
        return f"{stamp}{text}"


#: The name of a row of the start report, and the spaces behind it.
_ROW_NAME = re.compile(r"\S.*?\s{2,}(?=\S)")


def folded(text: str, begin: int, width: int) -> str:
    """Return text with its lines folded between words where they are wider than `width` columns; 0:
    as it is.

    begin: columns of the first line before its own text. Further lines begin below the text of a
    row of the start report, else below its name. A word that is wider than a line stays whole.
    """
    if not width:
        return text
    lines = []
    for number, line in enumerate(text.splitlines()):
        own = begin
        if number > 0:
            own = len(line) - len(line.lstrip())
        name = _ROW_NAME.match(line, own)
        indent = own
        if name:
            indent = name.end()
        if indent > width // 2:  # too little is left for the text
            indent = min(own, width // 2)
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def setup_console(rank: int, color: bool | None = None, stream: TextIO | None = None) -> None:
    """Send the `titanlite` logger to `stream` (None: standard output).

    A second call replaces the first.

    Rank 0 shows INFO and up, others WARNING and up. color: None means on a terminal, unless
    NO_COLOR or
    FORCE_COLOR say otherwise. With TERM=dumb there are none.
    """
    if (before := console_handler()) is not None:
        logger.removeHandler(before)
    logger.addHandler(ConsoleHandler(rank, color, stream))
    logger.setLevel(logging.INFO)
    # Libraries that call logging.basicConfig would otherwise print every line a second time.
    logger.propagate = False


def ensure_console(rank: int) -> None:
    """Call `setup_console` where nothing shows the log: in a plain script or a notebook without its
    own logging.

    A notebook's server may have a handler for warnings alone. A logger with a level is somebody's
    choice, and stays.
    """
    in_notebook = "ipykernel" in sys.modules
    is_shown = logger.hasHandlers() and (logger.isEnabledFor(logging.INFO) or not in_notebook)
    if logger.level == logging.NOTSET and not is_shown:
        setup_console(rank)


def console_handler() -> ConsoleHandler | None:
    """Return the handler of `setup_console`, if that was called."""
    return next(
        (handler for handler in logger.handlers if isinstance(handler, ConsoleHandler)), None
    )


def start_view(done: int, steps: int) -> LiveView | None:
    """Show the view of a run of `steps` steps, `done` of them done, where `setup_console` logs to a
    person's terminal.

    Return None elsewhere, and on other ranks than 0.
    """
    handler, environment = console_handler(), os.environ
    # Containers get terminals too, whose drawings would fill a file. Those have no size, or say
    # where they are.
    if (
        is_dumb()
        or not environment.get("TERM")
        or environment.get("CI")
        or environment.get("KUBERNETES_SERVICE_HOST")
    ):
        return None
    if handler is None or handler.rank or not is_terminal(stream := handler.target()):
        return None
    with contextlib.suppress(OSError):
        if os.get_terminal_size(stream.fileno()) != (0, 0):
            from titanlite.metrics.live import LiveView  # its library takes a while to import

            handler.view = LiveView(handler, done, steps)
    return handler.view
