"""TensorBoard and Weights & Biases, each with its own thread: it may fail or hang, and training
goes on.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlite.utils import logger

_CLOSE_SECONDS = 10.0
#: Rows that may wait for the thread: more than come while it looks for a network that is not there.
_QUEUE = 10_000


class BackgroundWriter:
    """Base class: `send` of a subclass runs in the thread, over all rows until the end.

    The first error ends it with one warning. Rows that it cannot keep up with are dropped, with one
    warning.
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
        self._thread = threading.Thread(
            target=self._work, name=f"titanlite-{self.name}", daemon=True
        )
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
                f"{self.name} does not keep up: {_QUEUE:,} rows wait for it. Further rows are "
                "dropped there; metrics.jsonl has all of them"
            )

    def close(self, failed: bool = False) -> None:
        """Send the rest and end; give up after ten seconds, or `failed_seconds` when the run
        failed.
        """
        if self._ended:
            return
        self.failed = failed
        self._rows.put(None)
        seconds = self.failed_seconds if failed else _CLOSE_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._ended = True
            logger.warning(
                f"{self.name} did not end within {seconds:g} s; it may lack the last rows"
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


#: Key of metrics.jsonl -> tag, which users of this kind of trainer have dashboards for.
TAGS: Mapping[str, str] = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "validation_loss": "validation_metrics/loss",
    "validation_perplexity": "validation_metrics/perplexity",
    "float8_drift": "float8/drift",
    "float8_drift_relative": "float8/drift(relative)",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_seen": "n_tokens_seen",
    "tps": "throughput(tps)",
    "tflops": "tflops",
    "mfu": "mfu(%)",
    "seconds_per_step": "time_metrics/end_to_end(s)",
    "data_seconds": "time_metrics/data_loading(s)",
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
#: Keys with these prefixes are tags already, many of them by layer or source.
_TAGS = ("grad_norm/", "validation/", "eval/", "loss/", "share/", "experts/")
_FLUSH_SECONDS = 10


def tags(row: Mapping[str, float]) -> dict[str, float]:
    """Return a row of metrics.jsonl under the tags of dashboards, without the keys that
    have none.
    """
    found = {}
    for key, value in row.items():
        if key.startswith(_TAGS):
            found[key] = value
        elif key in TAGS:
            found[TAGS[key]] = value
    return found


class TensorBoard(BackgroundWriter):
    """Writes into a dated subfolder of `folder`, within about ten seconds.

    purge_step: first step that will be written. A resumed run (over 1) continues in the newest
    subfolder. TensorBoard forgets the values there from this step on. A new run begins a subfolder.
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
                    add = writer.add_text if isinstance(value, str) else writer.add_scalar
                    add(tag, value, step)


#: Holds the id of the run at Weights & Biases, below the run's folder.
ID_FILE = "wandb-run-id"

_PROJECT = "titanlite"
#: Limits of wandb itself to begin and to end a run. The end of the process waits for either.
_INIT_SECONDS, _FINISH_SECONDS = 30.0, 8.0


class WandbWriter(BackgroundWriter):
    """A run at Weights & Biases; make one on rank 0 only.

    folder: of the run; its name is the run's name, and wandb's own files go below it. config:
    nested tables. first_step: first step that will be written. Over 1 the run that the folder names
    continues. Weights & Biases keeps the first values of steps that it has already.

    wandb's environment variables (WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY, WANDB_MODE, …) override
    these settings.
    """

    name = "Weights & Biases"
    advice = "; without a network WANDB_MODE=offline keeps them for `wandb sync`"

    def __init__(
        self, folder: Path, config: Mapping[str, Any], description: str = "", first_step: int = 1
    ) -> None:
        self._folder, self._config, self._description = Path(folder), config, description
        self._resumed = first_step > 1
        #: The id of the run at Weights & Biases; "" until the thread knows it.
        self.run_id = ""
        super().__init__()

    def send(self, rows: Iterator[tuple[int, dict[str, float]]]) -> None:
        self.run_id = self._find_id()
        import wandb

        # Silent, it does not ask for a login on the terminal either.
        wandb.setup(settings=wandb.Settings(silent=True))
        # If wandb captured the console, the thread that writes a line of the log would wait for it.
        settings = wandb.Settings(silent=True, console="off", finish_timeout=_FINISH_SECONDS)
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings.init_timeout = _INIT_SECONDS
        given = {
            "WANDB_PROJECT": ("project", _PROJECT),
            "WANDB_NAME": ("name", self._folder.resolve().name),
            "WANDB_NOTES": ("notes", self._description),
            "WANDB_DIR": ("dir", str(self._folder)),
        }
        if self._resumed:
            given["WANDB_RESUME"] = ("resume", "allow")
        ours: dict[str, Any] = {
            name: value for variable, (name, value) in given.items() if variable not in os.environ
        }
        run = wandb.init(id=self.run_id, config=dict(self._config), settings=settings, **ours)
        logger.info(f"{self.name}: {run.url or f'offline, in {run.dir}'}")
        for step, values in rows:
            run.log(dict(values), step=step)
        run.finish(exit_code=int(self.failed))

    def _find_id(self) -> str:
        """Return the id of the resumed run, or a new one, and keep it in the folder."""
        path = self._folder / ID_FILE
        run_id = os.environ.get("WANDB_RUN_ID")
        if run_id is None and self._resumed and path.exists():
            run_id = path.read_text().strip()
        run_id = run_id or secrets.token_hex(4)
        path.write_text(f"{run_id}\n")
        return run_id
