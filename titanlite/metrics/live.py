"""The live view of a terminal, below the lines of the log.

It is a table of the last logged steps and a progress line.

A step that leaves the table becomes a line of the log, so you can scroll back to it. Another line
of the log takes all steps out of the table, so lines stand in the order of their times. At the end
the table stays.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from titanlite.metrics.step_line import Figures, shown_memory
from titanlite.metrics.terminal import is_terminal
from titanlite.utils import human_time

if TYPE_CHECKING:
    from titanlite.metrics.console import ConsoleHandler

#: Logged steps in the table, on a terminal that is high enough.
ROWS = 8
#: Names of figures of tasks begin so.
SCORE = "eval/"
#: A drawing takes some milliseconds of the training thread.
_SECONDS_BETWEEN = 0.5
#: A terminal of fewer columns shows only some fields.
_NARROW = 80


#: Title -> colour, and text of a cell; "" for a figure that is not known.
_COLUMNS: dict[str, tuple[str, Callable[[Figures], str]]] = {
    "step": ("bold", lambda f: f"{f['step']:,}"),
    "loss": ("green", lambda f: f"{f['loss']:.4f}"),
    "grad norm": ("cyan", lambda f: f"{f['grad_norm']:.4f}"),
    "lr": ("cyan", lambda f: f"{f['lr']:.2e}"),
    "tokens/s": ("blue", lambda f: f"{round(f['tps']):,}"),
    "mfu": ("magenta", lambda f: f"{f['mfu']:.1f}%" if "mfu" in f else ""),
    "memory": ("yellow", lambda f: "{:.2f} GiB ({:.0f}%)".format(*shown_memory(f))),
}
_ALWAYS = ("step", "loss", "tokens/s")


class LiveView:
    """Draws the view on the console's terminal.

    What the log, sys.stdout and sys.stderr say there goes above it.
    """

    def __init__(self, handler: ConsoleHandler, done: int, steps: int) -> None:
        self._handler, self._step, self._steps = handler, done, steps
        self._began = self._drawn = time.monotonic()
        #: Figures of a step, and the line that the step becomes when it leaves the table.
        self._shown: list[tuple[Figures, str]] = []
        #: Figures of the last logged step.
        self._last: Figures | None = None
        #: Of the latest tasks, in words.
        self._scores = ""
        self._console = Console(
            file=handler.target(),
            force_terminal=True,
            color_system="standard" if handler.color else None,
            highlight=False,
        )
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            auto_refresh=False,
            redirect_stderr=is_terminal(sys.stderr),
        )
        self._live.start(refresh=True)

    def tick(self, step: int) -> None:
        """Call after every step; draws at most twice a second.

        Costs a clock call when no drawing is due.
        """
        self._step = step
        if (now := time.monotonic()) >= self._drawn + _SECONDS_BETWEEN:
            self._drawn = now
            with contextlib.suppress(
                Exception
            ):  # the terminal may be gone, and no drawing may cost a step
                self._live.refresh()

    def add(self, figures: Figures, line: str) -> None:
        """Show a logged step. Its line is written when the step leaves the table."""
        self._last = figures
        self._shown.append((figures, line))
        if len(self._shown) > ROWS:
            self._write(self._shown.pop(0)[1])
        self.tick(int(figures["step"]))

    def show_scores(self, step: int, row: Mapping[str, float]) -> None:
        """Show the figures of tasks below the table. row: of metrics.jsonl."""
        parts = []
        for name, value in row.items():
            if name.startswith(SCORE):
                parts.append(f"{name.removeprefix(SCORE)} {value:.4f}")
        self._scores = f"tasks at {step:,}: {', '.join(parts)}"

    def print(self, line: str) -> None:
        """Write a line above the view, below the lines of all steps before it."""
        earlier = self._shown
        self._shown = []
        for _, step_line in earlier:
            self._write(step_line)
        self._write(line)

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(Text.from_ansi(line), soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen, the cursor below it."""
        if self._handler.view is self:
            self._handler.view = None
            self._live.transient = self._last is None
            with contextlib.suppress(OSError):
                self._live.stop()

    def _render(self) -> Group:
        wide = self._console.width >= _NARROW
        rows = [figures for figures, _ in self._shown][
            -max(min(ROWS, self._console.height // 2 - 2), 1) :
        ]
        columns = {title: [cell(row) for row in rows] for title, (_, cell) in _COLUMNS.items()}
        shown = [title for title in columns if (wide or title in _ALWAYS) and any(columns[title])]
        table = Table(box=None, header_style="bright_black", padding=(0, 2))
        for title in shown:
            table.add_column(title, justify="right", style=_COLUMNS[title][0], no_wrap=True)
        for cells in zip(*(columns[title] for title in shown), strict=True):
            table.add_row(*cells)
        bar = ProgressBar(
            self._steps,
            self._step,
            40 if wide else 10,
            complete_style="green",
            finished_style="green",
        )
        progress = Table.grid(padding=(0, 2))
        count = Text(f"{self._step:,}/{self._steps:,}", "bold")
        percent = f"{int(100 * self._step / self._steps)}%"
        progress.add_row(count, bar, percent, self._time_left())
        parts: list[RenderableType] = [table] if rows else []
        if self._scores:
            parts.append(Text(self._scores, "cyan", no_wrap=True, overflow="ellipsis"))
        return Group(*parts, progress)

    def _time_left(self) -> str:
        """Return the words on the time left, or on the time taken; empty where it is not known."""
        if self._step >= self._steps:
            return f"took {human_time(time.monotonic() - self._began)}"
        last = self._last
        if last is None or "seconds_left" not in last:
            return ""
        if last["step"] >= self._steps:  # a rollback came after it
            return ""
        share = (self._steps - self._step) / (self._steps - last["step"])
        return f"left {human_time(last['seconds_left'] * share)}"
