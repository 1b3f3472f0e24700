"""Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

from titanlite.metrics.tracker_base import PROJECT, Tracker
from titanlite.utils import logger

#: Limits of wandb itself to begin and to end a run. The end of the process waits for either.
_INIT_SECONDS, _FINISH_SECONDS = 30.0, 8.0


class WandbTracker(Tracker):
    """Weights & Biases keeps the first values of steps that it has already.

    wandb's environment variables (WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY, WANDB_MODE, …) override
    these settings.
    """

    name = "Weights & Biases"
    advice = "; without a network WANDB_MODE=offline keeps them for `wandb sync`"
    key = "wandb"

    def send(self, rows: Iterator[tuple[int, dict[str, Any]]]) -> None:
        self.keep_id(self.known_id() or secrets.token_hex(4))
        import wandb

        # Silent, it does not ask for a login on the terminal either.
        wandb.setup(settings=wandb.Settings(silent=True))
        settings = wandb.Settings()
        # `wandb.setup` reads the environment once per process; a later run may have another one.
        settings.update_from_env_vars(dict(os.environ))
        settings.silent = True
        # If wandb captured the console, the thread that writes a line of the log would wait for it.
        settings.console = "off"
        settings.finish_timeout = _FINISH_SECONDS
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings.init_timeout = _INIT_SECONDS
        run = wandb.init(
            id=self.run_id, config=dict(self.run.config), settings=settings, **self._ours()
        )
        logger.info(f"{self.name}: {run.url or f'offline, in {run.dir}'}")
        for step, values in rows:
            run.log(dict(values), step=step)
        run.finish(exit_code=int(self.failed))

    def _ours(self) -> dict[str, Any]:
        given = {
            "WANDB_PROJECT": ("project", PROJECT),
            "WANDB_NAME": ("name", self.run.name),
            "WANDB_NOTES": ("notes", self.run.description),
            "WANDB_DIR": ("dir", str(self.run.folder)),
        }
        if self.run.resumed:
            given["WANDB_RESUME"] = ("resume", "allow")
        return {
            name: value for variable, (name, value) in given.items() if variable not in os.environ
        }
