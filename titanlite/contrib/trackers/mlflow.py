"""MLflow: a server, a database or Databricks, by its own MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from titanlite.metrics.tracker_base import PROJECT, Tracker, flat
from titanlite.utils import logger

#: Most characters of a parameter (a limit of MLflow's API).
_CHARACTERS = 6_000


class MlflowTracker(Tracker):
    """MLflow keeps every value that it gets: a step that a resumed run repeats is there twice."""

    name = "MLflow"
    advice = "; MLFLOW_TRACKING_URI names the server"
    key = "mlflow"

    def send(self, rows: Iterator[tuple[int, dict[str, Any]]]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        client = MlflowClient()
        known = self.known_id()
        if known:
            client.update_run(known, status="RUNNING")
        self.keep_id(known or self._begin(client))
        logger.info(f"{self.name}: run {self.run_id} at {client.tracking_uri}")
        for step, values in rows:
            now = int(1000 * time.time())
            metrics = [Metric(metric_name(tag), value, now, step) for tag, value in values.items()]
            client.log_batch(self.run_id, metrics=metrics)
        client.set_terminated(self.run_id, "FAILED" if self.failed else "FINISHED")

    def _begin(self, client: Any) -> str:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if not experiment:
            project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            # It may be there; what else is wrong, the next line tells.
            with suppress(MlflowException):
                client.create_experiment(project)
            experiment = client.get_experiment_by_name(project).experiment_id
        tags = {"mlflow.note.content": self.run.description}
        name = os.environ.get("MLFLOW_RUN_NAME", self.run.name)
        run_id: str = client.create_run(experiment, run_name=name, tags=tags).info.run_id
        texts = flat(self.run.config).items()
        params = [Param(key, str(value)[:_CHARACTERS]) for key, value in texts]
        client.log_batch(run_id, params=params)
        return run_id


def metric_name(tag: str) -> str:
    """Return a tag in the characters that MLflow allows: mfu(%) becomes mfu_percent."""
    return re.sub(r"[^\w\-. :/]+", "_", tag.replace("%", "percent")).strip("_")
