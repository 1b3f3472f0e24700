"""Weights & Biases, with the tags of TensorBoard."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titanlite.metrics.background_writer import BackgroundWriter
from titanlite.utils import logger

#: Holds the id of the run at Weights & Biases, below the run's folder.
ID_FILE = "wandb-run-id"

_PROJECT = "titanlite"
#: Limits of wandb itself to begin and to end a run. The end of the process waits for either.
_INIT_SECONDS, _FINISH_SECONDS = 30.0, 8.0


class WandbWriter(BackgroundWriter):
    """A run at Weights & Biases; make one on rank 0 only.

    folder: of the run; its name is the run's name, and wandb's own files go below it. config: nested tables.
    first_step: first step that will be written. Over 1 the run that the folder names goes on, and Weights & Biases
    keeps the first values of steps that it has already.

    wandb's environment variables (WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY, WANDB_MODE, …) override these settings.
    """

    name = "Weights & Biases"
    advice = "; without a network WANDB_MODE=offline keeps them for `wandb sync`"

    def __init__(self, folder: Path, config: Mapping[str, Any], description: str = "", first_step: int = 1) -> None:
        self._folder, self._config, self._description = Path(folder), config, description
        self._resumed = first_step > 1
        #: The id of the run at Weights & Biases; "" until the thread knows it.
        self.run_id = ""
        super().__init__()

    def send(self, rows: Iterator[tuple[int, Mapping[str, float]]]) -> None:
        self.run_id = self._find_id()
        import wandb

        # Silent, it does not ask for a login on the terminal either.
        wandb.setup(settings=wandb.Settings(silent=True))
        # If wandb captured the console, each line of the log would wait for it on the thread that writes the line.
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
        run = wandb.init(id=self.run_id, config=dict(self._config), settings=settings, **ours)
        logger.info(f"{self.name}: {run.url or f'offline, in {run.dir}'}")
        for step, values in rows:
            run.log(values, step=step)
        run.finish(exit_code=int(self.failed))

    def _find_id(self) -> str:
        """Return the id of the run that goes on, or a new one, and keep it in the folder."""
        path = self._folder / ID_FILE
        run_id = os.environ.get("WANDB_RUN_ID")
        if run_id is None and self._resumed and path.exists():
            run_id = path.read_text().strip()
        run_id = run_id or secrets.token_hex(4)
        path.write_text(f"{run_id}\n")
        return run_id
