"""The callback that checks that a resumed run continues with the batch that was to come."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.callbacks import Callback
from titanlite.checkpoint.loaded import RESUME, LoadedState
from titanlite.data.batch_hash import add_hashes, step_hash
from titanlite.data.skip_ranges import Range
from titanlite.dist.dist_env import gather_objects
from titanlite.runs import ATTEMPTS
from titanlite.runs.config_changes import config_changes
from titanlite.utils import append_line, logger

if TYPE_CHECKING:
    from titanlite.trainer import Trainer


class VerifyResume(Callback):
    """Saves a hash of the next global batch, and compares it when a run resumes.

    config: of this run, as a TOML text. skip: ranges of sequences. share: data-parallel rank and
    degree.
    """

    def __init__(self, config: object, skip: tuple[Range, ...], share: tuple[int, int]) -> None:
        self._config = config
        self._skip = skip
        self._share = share

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return {RESUME: {"next_batch": self._next_batch(trainer)}}

    def on_start(self, trainer: Trainer) -> None:
        loaded = trainer.loaded
        if loaded is None or loaded.origin != "resume":
            return
        now = self._next_batch(trainer)
        before = (loaded.train.get(RESUME) or {}).get("next_batch")
        files = "the files have their lengths (hashes were not compared)"
        if loaded.verified:
            files = "every file is as it was written"
        allowed = ", ".join(self._allowed(loaded, trainer))
        level = logging.INFO
        lead = "resume verified"
        if before is None or now is None:
            batch = "which batch was to come was not recorded"
        elif before == now:
            batch = "the next batch is the one that was to come"
        elif allowed:
            batch = f"the next batch is another one, as allowed: {allowed}"
        else:
            batch = "the next batch is not the one that was to come then"
            level = logging.WARNING
            lead = "RESUME NOT VERIFIED"
        if trainer.parts.world.rank == 0:
            logger.log(level, f"{lead} at step {loaded.step}: {files}; {batch}")
            verdict = {"event": "resume", "step": loaded.step, "verified": level == logging.INFO}
            with contextlib.suppress(OSError):
                append_line(
                    Path(trainer.parts.run.job.dump_folder) / ATTEMPTS,
                    {**verdict, "next_batch": before},
                )

    def _allowed(self, loaded: LoadedState, trainer: Trainer) -> Iterator[str]:
        yield from loaded.changes
        if "dataloader" in loaded.left_out:
            yield "dataloader"
        if trainer.parts.datasets.train.changed:
            yield "data.source and data.phase"
        if "data.skip_steps" in config_changes(loaded.config.get("toml"), self._config):
            yield "data.skip_steps"

    def _next_batch(self, trainer: Trainer) -> str | None:
        """Return the hash of the next global batch, on any number of ranks; None where the data
        end.

        All ranks call it together, each hashes its own sequences.
        """
        parts = trainer.parts
        rank, degree = self._share
        first = parts.loader.state_dict()["next_sequence"]
        rows = parts.course.size(trainer.step + 1).rows
        part: str | None = None
        try:
            part = step_hash(parts.datasets.train, first, rows, rank, degree, self._skip)
        except Exception as error:
            # The step itself raises it again; a save is complete without the hash.
            logger.warning(
                f"the next batch cannot be hashed, so a resume will not compare it: {error}"
            )
        found = gather_objects((rank, part))
        whole = [part for part in dict(found).values() if part is not None]
        return add_hashes(whole) if len(whole) == degree else None
