"""Weights & Biases, in a thread of its own: whatever becomes of it, training goes on, and as fast."""

from __future__ import annotations

import os
import queue
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.utils import logger

#: Holds the id of the run at Weights & Biases, below the run's folder.
ID_FILE = "wandb-run-id"

_PROJECT = "titanlite"
#: Rows that may wait for the thread: more than come while it looks for a network that is not there.
_QUEUE = 10_000
_CLOSE_SECONDS = 10.0
#: After a failure the launcher soon ends this process, which still has to say why.
_FAILED_SECONDS = 1.0
#: What wandb itself may take to begin and to end a run. The end of the process waits for either.
_INIT_SECONDS, _FINISH_SECONDS = 30.0, 8.0


class Tracker:
    """A run at Weights & Biases; make one on rank 0 only.

    folder: of the run; its name is the run's name, and wandb's own files go below it. config: nested tables.
    first_step: first step that will be written. Over 1 the run that the folder names goes on, and steps that it has
    already are not taken twice.

    wandb's environment variables (WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY, WANDB_MODE, …) go before what is given here.
    The first error ends it with one warning; what it cannot keep up with is dropped, with one warning.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], description: str = "", first_step: int = 1) -> None:
        self._folder, self._config, self._description = Path(folder), config, description
        self._resumed = first_step > 1
        #: The id of the run at Weights & Biases; "" until the thread knows it.
        self.run_id = ""
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_QUEUE)
        self._exit_code = 0
        self._dropped = self._ended = False
        self._thread = threading.Thread(target=self._work, name="titanlite-wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name. Hands them to the thread and returns."""
        if self._ended:
            return
        try:
            self._rows.put_nowait((step, dict(values)))
        except queue.Full:
            if not self._dropped:
                self._dropped = True
                logger.warning(
                    f"Weights & Biases does not keep up: {_QUEUE:,} rows wait for it. What comes now is dropped there; "
                    "metrics.jsonl has it all"
                )

    def close(self, failed: bool = False) -> None:
        """Send what is left and end the run there; gives up after ten seconds.

        failed: mark the run so, and give up after one second.
        """
        if self._ended:
            return
        self._exit_code = int(failed)
        while True:
            try:
                self._rows.put_nowait(None)
                break
            except queue.Full:  # the end must get through: it takes the place of a row
                self._drop_one()
        seconds = _FAILED_SECONDS if failed else _CLOSE_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._ended = True
            logger.warning(f"Weights & Biases did not end within {seconds:g} s; it may lack the last rows")

    def _drop_one(self) -> None:
        try:
            self._rows.get_nowait()
        except queue.Empty:
            return

    def _work(self) -> None:
        try:
            run = self._begin()
            where = run.url or f"offline, in {run.dir}"
            logger.info(f"Weights & Biases: {where}")
            while (row := self._rows.get()) is not None:
                step, values = row
                run.log(values, step=step)
            run.finish(exit_code=self._exit_code)
        except BaseException as error:
            if not self._ended:  # else it is known already that it did not end
                logger.warning(
                    f"Weights & Biases is off from here on ({type(error).__name__}: {error}). metrics.jsonl has all "
                    "numbers; without a network WANDB_MODE=offline keeps them for `wandb sync`"
                )
        self._ended = True

    def _begin(self) -> Any:
        self.run_id = self._run_id()
        import wandb

        # Silent, it does not ask for a login on the terminal either.
        wandb.setup(settings=wandb.Settings(silent=True))
        # Captured, each line of the log would wait for wandb on the thread that writes it.
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
        ours: dict[str, Any] = {name: value for variable, (name, value) in given.items() if variable not in os.environ}
        return wandb.init(id=self.run_id, config=dict(self._config), settings=settings, **ours)

    def _run_id(self) -> str:
        """The id of the run that goes on, else a new one, which the folder keeps."""
        path = self._folder / ID_FILE
        run_id = os.environ.get("WANDB_RUN_ID")
        if run_id is None and self._resumed and path.exists():
            run_id = path.read_text().strip()
        run_id = run_id or secrets.token_hex(4)
        path.write_text(f"{run_id}\n")
        return run_id
