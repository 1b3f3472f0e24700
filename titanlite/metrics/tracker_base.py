"""Services that track runs, and what they share: the run's names and its id."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.metrics.boards import BackgroundWriter
from titanlite.runs.symlink_checks import read_own
from titanlite.utils import atomic_write

#: Project, or experiment, of the runs where the environment names none.
PROJECT = "titanlite"
#: Tracker -> the variable that names one run there.
RUN_IDS = {"wandb": "WANDB_RUN_ID", "mlflow": "MLFLOW_RUN_ID", "comet": "COMET_EXPERIMENT_KEY"}


@dataclass(frozen=True)
class TrackedRun:
    """A run as services show it.

    folder: of the run. config: nested tables, without secrets. resumed: a service continues the
    same tracked run.
    """

    folder: Path
    config: Mapping[str, Any]
    description: str = ""
    resumed: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Tracker(BackgroundWriter):
    """Base class: a run at a service. `send` of a subclass runs in a separate thread."""

    #: Its name in `metrics.trackers`.
    key = ""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        #: The id of the run at the service; "" until the thread knows it.
        self.run_id = ""
        super().__init__()

    @property
    def id_file(self) -> Path:
        """The file that keeps the run's id for a resume."""
        return Path(self.run.folder) / f"{self.key}-run-id"

    def known_id(self) -> str:
        """Return the id from the environment, else of the resumed run; "" for a new run."""
        given = os.environ.get(RUN_IDS.get(self.key, ""))
        if given:
            return given
        if self.run.resumed and self.id_file.exists():
            return read_own(self.id_file).decode().strip()
        return ""

    def keep_id(self, run_id: str) -> None:
        self.run_id = run_id
        atomic_write(self.id_file, f"{run_id}\n")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
