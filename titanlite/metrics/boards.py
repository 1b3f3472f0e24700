"""Boards, each in a separate thread: it may fail or hang, and training goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlite.utils import logger

_CLOSE_SECONDS = 10.0
#: Rows that wait for a board at most: some tens of MB.
MOST_ROWS = 10_000


class BackgroundWriter:
    """Base class: `send` of a subclass runs in the thread, whose first error ends it with a
    warning.
    """

    #: Name in messages, and the advice that follows the message of an error.
    name = ""
    advice = ""
    #: After a failure the launcher soon ends this process, which still has to report the error.
    failed_seconds = 1.0

    def __init__(self) -> None:
        self._rows: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(MOST_ROWS)
        self._warned = False
        #: The run failed; known at the end of the rows.
        self.failed = False
        self._ended = False
        self._stopped_at: float | None = None
        self._thread = threading.Thread(
            target=self._work, name=f"titanlite-{self.name}", daemon=True
        )
        self._thread.start()

    def send(self, rows: Iterator[tuple[int, dict[str, Any]]]) -> None:
        """Connect, send each row (a step, values by name) as it comes, and end in order."""
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if not self._ended:
            self._put((step, dict(values)))

    def stop(self, failed: bool = False) -> None:
        """Let the thread send the rest; `close` waits for it."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self.failed = failed
            self._put(None)

    def close(self, failed: bool = False) -> None:
        """Send the rest and end: within ten seconds of `stop`, or `failed_seconds` if the run
        failed.
        """
        if self._ended:
            return
        self.stop(failed)
        assert self._stopped_at is not None
        seconds = self.failed_seconds if self.failed else _CLOSE_SECONDS
        self._thread.join(max(0.0, self._stopped_at + seconds - time.monotonic()))
        if self._thread.is_alive():
            self._ended = True
            logger.warning(
                f"{self.name} did not end within {seconds:g} s; it may lack the last rows"
            )

    def _put(self, row: tuple[int, dict[str, Any]] | None) -> None:
        """Drop the oldest row of a full queue: training waits for no board."""
        while True:
            with contextlib.suppress(queue.Full):
                self._rows.put_nowait(row)
                return
            with contextlib.suppress(queue.Empty):
                self._rows.get_nowait()
            if not self._warned:
                self._warned = True
                logger.warning(
                    f"{self.name} does not keep up: it will lack the oldest of {MOST_ROWS:,} rows "
                    "that wait. metrics.jsonl has all"
                )

    def _work(self) -> None:
        try:
            self.send(iter(self._rows.get, None))
        except BaseException as error:
            if not self._ended:  # otherwise `close` has reported it
                reason = f"{type(error).__name__}: {error}"
                logger.warning(
                    f"{self.name} is off from here on ({reason}). metrics.jsonl has all "
                    f"numbers{self.advice}"
                )
        self._ended = True


def close_all(boards: Sequence[BackgroundWriter], failed: bool) -> None:
    """Close boards together, so that their limits of time do not add up."""
    for board in boards:
        board.stop(failed)
    for board in boards:
        board.close(failed)


#: Key of metrics.jsonl -> tag, which users of this kind of trainer have dashboards for. Other keys
#: are tags themselves.
TAGS: Mapping[str, str] = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "validation_loss": "validation_metrics/loss",
    "validation_perplexity": "validation_metrics/perplexity",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_seen": "n_tokens_seen",
    "tps": "throughput(tps)",
    "tflops": "tflops",
    "mfu": "mfu(%)",
    "seconds_per_step": "time_metrics/end_to_end(s)",
    "data_seconds": "time_metrics/data_loading(s)",
    "save_seconds": "time_metrics/saving(s)",
    "data_percent": "time_metrics/data_loading(%)",
    "gc_seconds": "time_metrics/garbage_collection(s)",
    "slowest_rank": "ranks/slowest",
    "fastest_rank": "ranks/fastest",
    "lag_seconds": "ranks/lag(s)",
    "lag_percent": "ranks/lag(%)",
    "memory_gib": "memory/max_active(GiB)",
    "memory_percent": "memory/max_active(%)",
    "reserved_gib": "memory/max_reserved(GiB)",
    "reserved_percent": "memory/max_reserved(%)",
    "alloc_retries": "memory/num_alloc_retries",
    "ooms": "memory/num_ooms",
}
#: Keys of metrics.jsonl that boards do not show.
_HIDDEN = ("step", "time", "validation_tokens", "validation_seconds", "eval_seconds")
_FLUSH_SECONDS = 10


def tags(row: Mapping[str, float]) -> dict[str, float]:
    """Return a row of metrics.jsonl under the tags of dashboards, without keys that have none."""
    return {TAGS.get(key, key): value for key, value in row.items() if key not in _HIDDEN}


class TensorBoard(BackgroundWriter):
    """Writes into a dated subfolder of `folder`, within about ten seconds.

    purge_step: first step that will be written. A resumed run (over 1) continues in the newest
    subfolder, where TensorBoard forgets the values from this step on.
    """

    name = "TensorBoard"
    failed_seconds = 0.3

    def __init__(self, folder: Path, purge_step: int) -> None:
        self.folder, self._purge_step = Path(folder), purge_step
        super().__init__()

    def send(self, rows: Iterator[tuple[int, dict[str, Any]]]) -> None:
        dated = list(self.folder.glob("2???????-????"))
        if dated and self._purge_step > 1:
            self.folder = max(dated)
        else:
            self.folder /= datetime.now().strftime("%Y%m%d-%H%M")
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(
            str(self.folder), purge_step=self._purge_step, flush_secs=_FLUSH_SECONDS
        ) as writer:
            for step, values in rows:
                for tag, value in values.items():
                    writer.add_scalar(tag, value, step)
