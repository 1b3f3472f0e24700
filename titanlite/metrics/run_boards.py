"""The boards of one run: TensorBoard, and the trackers that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from titanlite import doors
from titanlite.config.run_sections import Job, Metrics
from titanlite.config.toml import loads
from titanlite.metrics.boards import BackgroundWriter, TensorBoard, close_all, tags
from titanlite.metrics.tracker_base import TrackedRun, Tracker
from titanlite.utils import logger


class Boards:
    """Sends each row to all boards of this rank.

    toml: the resolved config, without secrets. step: the last one done. resumed: the run continues.
    """

    def __init__(
        self, metrics: Metrics, job: Job, toml: str, rank: int, step: int, resumed: bool
    ) -> None:
        self._metrics = metrics
        self._rank = rank
        self._tensorboard: TensorBoard | None = None
        self._trackers: list[Tracker] = []
        if rank == 0:
            folder = Path(job.dump_folder)
            run = TrackedRun(folder, loads(toml), job.description, resumed)
            for name in metrics.tracker_names:
                try:
                    tracker = doors.load(doors.place_of("trackers", name) or "")(run)
                    self._trackers.append(tracker)
                except Exception as error:
                    logger.warning(f"the tracker {name} is off: {type(error).__name__}: {error}")
        self.open_tensorboard(step if resumed else 0)

    def open_tensorboard(self, step: int) -> None:
        """Begin after `step`, in place of what is there."""
        if self._tensorboard:
            self._tensorboard.close()
        everywhere = not self._metrics.rank_0_only
        if self._metrics.enable_tensorboard and (self._rank == 0 or everywhere):
            folder = Path(self._metrics.save_tb_folder)
            if everywhere:
                folder /= f"rank_{self._rank}"
            self._tensorboard = TensorBoard(folder, purge_step=step + 1)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Send a row of metrics.jsonl."""
        for board in self._all:
            board.write(step, tags(row))

    def close(self, failed: bool) -> None:
        """Send the rest and end, within some seconds."""
        close_all(self._all, failed)

    def run_ids(self) -> dict[str, str]:
        """Return on rank 0 service → id of the run there."""
        return {tracker.key: tracker.run_id for tracker in self._trackers if tracker.run_id}

    @property
    def _all(self) -> list[BackgroundWriter]:
        boards: list[BackgroundWriter] = [*self._trackers]
        if self._tensorboard:
            boards.append(self._tensorboard)
        return boards
