"""A metrics backend in a thread of its own: it may fail or hang, and training goes on as fast."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from titanlite.utils import logger

_CLOSE_SECONDS = 10.0
#: Rows that may wait for the thread: more than come while it looks for a network that is not there.
_QUEUE = 10_000


class BackgroundWriter:
    """Base class: `send` of a subclass runs in the thread, over all rows until the end.

    The first error ends it with one warning. Rows that it cannot keep up with are dropped, with one warning.
    """

    #: In messages; and the advice that follows the message of an error.
    name = ""
    advice = ""
    #: After a failure the launcher soon ends this process, which still has to report the error.
    failed_seconds = 1.0

    def __init__(self) -> None:
        self._rows: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        #: The run failed; known at the end of the rows.
        self.failed = False
        self._dropped = self._ended = False
        self._thread = threading.Thread(target=self._work, name=f"titanlite-{self.name}", daemon=True)
        self._thread.start()

    def send(self, rows: Iterator[tuple[int, dict[str, Any]]]) -> None:
        """Connect, send each row (a step, values by name) as it comes, and end in order."""
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Hand values by name to the thread, and return."""
        if self._ended:
            return
        if self._rows.qsize() < _QUEUE:
            self._rows.put((step, dict(values)))
        elif not self._dropped:
            self._dropped = True
            logger.warning(
                f"{self.name} does not keep up: {_QUEUE:,} rows wait for it. Further rows are dropped there; "
                "metrics.jsonl has all of them"
            )

    def close(self, failed: bool = False) -> None:
        """Send the rest and end; give up after ten seconds, or `failed_seconds` when the run failed."""
        if self._ended:
            return
        self.failed = failed
        self._rows.put(None)
        seconds = self.failed_seconds if failed else _CLOSE_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._ended = True
            logger.warning(f"{self.name} did not end within {seconds:g} s; it may lack the last rows")

    def _work(self) -> None:
        try:
            self.send(iter(self._rows.get, None))
        except BaseException as error:
            if not self._ended:  # otherwise `close` has reported it
                reason = f"{type(error).__name__}: {error}"
                logger.warning(
                    f"{self.name} is off from here on ({reason}). metrics.jsonl has all numbers{self.advice}"
                )
        self._ended = True
