"""The callback that checks a resumed run."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.callbacks import Callback, RunEnd
from titanlite.checkpoint.loaded import RESUME, LoadedState
from titanlite.checkpoint.resume_check import ResumeCheck
from titanlite.config.toml import TOMLDecodeError, loads
from titanlite.data.course import Course
from titanlite.data.hashes import add_hashes, step_hash
from titanlite.data.skip_ranges import Range, ranges_of_steps, take
from titanlite.dist.dist_env import gather_objects
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


class VerifyResume(Callback):
    """Checks that a resumed run continues as the attempt before did: the next batch, and the next
    step's figures.

    course: of an undisturbed run. skip: ranges of sequences that this run skips. share:
    data-parallel rank and degree.
    """

    def __init__(
        self, check: ResumeCheck, course: Course, skip: tuple[Range, ...], share: tuple[int, int]
    ) -> None:
        self._check = check
        self._course = course
        self._skip = skip
        self._share = share

    def on_start(self, trainer: Trainer) -> None:
        loaded = trainer.loaded
        if loaded is not None and loaded.origin == "resume":
            loaded = self._with_other_skips(loaded, trainer)
            next_batch = self._next_batch(trainer)
            is_other = next_batch != loaded.train.get(RESUME, {}).get("next_batch")
            # A resume may give the sources of a mixture other shares.
            if is_other and trainer.parts.datasets.train.changed:
                changes = (*loaded.changes, "data.source and data.phase")
                loaded = replace(loaded, changes=changes)
            self._check.resumed(loaded, next_batch)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if (
            found := self._check.after_step(trainer.step, result.loss, result.grad_norm)
        ) is not None:
            logger.log(logging.INFO if found.verified else logging.WARNING, found.text)

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        if end.state in ("done", "preempted"):
            self._check.flush()

    def on_rollback(self, trainer: Trainer) -> None:
        self._check.forget()

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return self._check.at_save(trainer.step, self._next_batch(trainer))

    def _next_batch(self, trainer: Trainer) -> str | None:
        """Return the hash of the next global batch, the same on any number of ranks; None where the
        data end.

        All ranks call it together, each hashes its own sequences.
        """
        parts = trainer.parts
        rank, degree = self._share
        first = parts.loader.state_dict()["next_sequence"]
        rows = parts.course.size(trainer.step + 1).rows
        part: str | None = None
        try:
            part = step_hash(parts.datasets.train, first, rows, rank, degree, self._skip)
        except (
            Exception
        ) as error:  # the step itself raises it again; a save is complete without the hash
            logger.warning(
                f"the next batch cannot be hashed, so a resume will not compare it: {error}"
            )
        found = gather_objects((rank, part))
        whole = [part for part in dict(found).values() if part is not None]
        return add_hashes(whole) if len(whole) == degree else None

    def _with_other_skips(self, loaded: LoadedState, trainer: Trainer) -> LoadedState:
        """Return it with `data.skip_steps` among its changes if the next batch is another one for
        that.

        That key may be changed for a resume.
        """
        size = trainer.parts.course.size(loaded.step + 1).rows
        try:
            before = ranges_of_steps(
                loads(loaded.config["toml"])["data"].get("skip_steps", []), self._course
            )
        except (TOMLDecodeError, KeyError, ValueError):
            return loaded
        first = loaded.train["data"]["next_sequence"]
        same = take(first, size, before) == take(first, size, self._skip)
        return loaded if same else replace(loaded, changes=(*loaded.changes, "data.skip_steps"))
