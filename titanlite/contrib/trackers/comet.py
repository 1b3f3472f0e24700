"""Comet."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from typing import Any

from titanlite.metrics.tracker_base import PROJECT, Tracker, flat
from titanlite.utils import logger

#: Without these, Comet changes torch while it is imported, and reports errors of this process.
_QUIET = {"COMET_DISABLE_AUTO_LOGGING": "1", "COMET_ERROR_TRACKING_ENABLE": "false"}


class CometTracker(Tracker):
    """Without a key (COMET_API_KEY) it writes archives below the run's folder."""

    name = "Comet"
    advice = "; COMET_START_ONLINE=0 keeps them for `comet upload`"
    key = "comet"
    #: It packs an archive at its end. The other ranks of a failed run leave after three seconds.
    failed_seconds = 1.8

    def send(self, rows: Iterator[tuple[int, dict[str, Any]]]) -> None:
        known = self.known_id()
        self.keep_id(known or secrets.token_hex(16))
        for variable, value in _QUIET.items():
            os.environ.setdefault(variable, value)
        hook = sys.excepthook
        import comet_ml

        sys.excepthook = hook  # titanlite's own reports the error of a run
        experiment = comet_ml.start(
            experiment_key=self.run_id,
            mode="get_or_create" if known else "create",
            # It would ask for a key on the terminal.
            online=None if comet_ml.get_api_key(None, comet_ml.get_config()) else False,
            project_name=os.environ.get("COMET_PROJECT_NAME", PROJECT),
            experiment_config=comet_ml.ExperimentConfig(
                # Record only what is sent here.
                log_code=False,
                log_git_metadata=False,
                log_git_patch=False,
                log_env_details=False,
                parse_args=False,
                auto_output_logging=False,
                auto_log_co2=False,
                display_summary_level=0,
                offline_directory=os.environ.get("COMET_OFFLINE_DIRECTORY", str(self.run.folder)),
                name=self.run.name,
            ),
        )
        logger.info(f"{self.name}: {experiment.url or f'offline, below {self.run.folder}'}")
        if not self.run.resumed:
            experiment.log_parameters(flat(self.run.config))
            experiment.log_other("description", self.run.description)
        for step, values in rows:
            experiment.log_metrics(values, step=step)
        experiment.log_other("state", "failed" if self.failed else "done")
        experiment.end()
