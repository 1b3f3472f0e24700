"""Trackio: a local database, a server of one's own, or a Space of Hugging Face."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

from titanlite.metrics.tracker_base import PROJECT, Tracker


class TrackioTracker(Tracker):
    """Trackio finds a run by its name, so each run's name ends with a unique id.

    Its variables (TRACKIO_DIR, TRACKIO_SERVER_URL, TRACKIO_SPACE_ID, …) say where it writes.
    """

    name = "Trackio"
    key = "trackio"

    def send(self, rows: Iterator[tuple[int, dict[str, Any]]]) -> None:
        known = self.known_id()
        self.keep_id(known or f"{self.run.name}-{secrets.token_hex(4)}")
        import trackio

        run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.run_id,
            config={"description": self.run.description, **self.run.config},
            resume="allow" if known else "never",
            embed=False,
            # This process's load is in metrics.jsonl.
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        for step, values in rows:
            run.log(dict(values), step=step)
        run.finish()
