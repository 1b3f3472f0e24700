"""Progress of `titanlite data prepare`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from titanlite.utils import counted

_REPORT_SECONDS = 10.0


class Progress(NamedTuple):
    documents: int
    text_bytes: int
    tokens: int
    #: Of the files, which may be packed.
    read: int

    def plus(self, other: Progress) -> Progress:
        return Progress(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = Progress(0, 0, 0, 0)


@contextlib.contextmanager
def reporter(total: int, tasks: int) -> Iterator[Callable[[Progress, int], None]]:
    """Show progress on standard error: a bar on a terminal, else lines. total: bytes of the files."""
    began = time.monotonic()

    def words(done: Progress, finished: int) -> str:
        speed = done.text_bytes / 1e6 / max(time.monotonic() - began, 1e-9)
        return (
            f"{counted(done.documents, 'documents')}, {done.tokens / 1e6:,.1f}M tokens, {speed:,.1f} MB/s, "
            f"{finished} of {counted(tasks, 'groups of files')}"
        )

    if not sys.stderr.isatty():
        reported = began

        def lines(done: Progress, finished: int) -> None:
            nonlocal reported
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                print(f"{min(done.read / max(total, 1), 1):.0%}: {words(done, finished)}", file=sys.stderr, flush=True)

        yield lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("", total=total)
        yield lambda done, finished: bar.update(shown, completed=done.read, description=words(done, finished))
