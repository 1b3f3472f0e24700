"""Services that track runs: one adapter a file, each around the service's own client.

    wandb.py   mlflow.py   comet.py   trackio.py

`metrics.trackers` names them. A client is imported in the adapter's thread, when its run begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.metrics.trackers.tracker import TrackedRun, Tracker


def open_trackers(names: Iterable[str], run: TrackedRun) -> list[Tracker]:
    """Begin or continue a run at each service. Call it on rank 0 only.

    names: of `metrics.trackers`.
    """
    return [_class_of(name)(run) for name in names]


def _class_of(name: str) -> type[Tracker]:
    if name == "wandb":
        from titanlite.metrics.trackers.wandb import WandbTracker

        return WandbTracker
    if name == "mlflow":
        from titanlite.metrics.trackers.mlflow import MlflowTracker

        return MlflowTracker
    if name == "comet":
        from titanlite.metrics.trackers.comet import CometTracker

        return CometTracker
    from titanlite.metrics.trackers.trackio import TrackioTracker

    return TrackioTracker
