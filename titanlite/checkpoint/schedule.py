"""When a run saves: after so many steps or seconds, at milestones, and when validation was never better."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import cast

from titanlite.checkpoint.manifest import CheckpointError, parse_manifest, step_folder, steps_in
from titanlite.checkpoint.place import place
from titanlite.checkpoint.retention import is_milestone
from titanlite.parallel.dist_env import DistEnv

#: How often in an interval the ranks meet to hear what the clock says.
_MEETINGS = 16


class SaveSchedule:
    """Says after which steps to save; the same answer on all ranks, which make one together and ask alike.

        schedule = SaveSchedule(plan, world)
        for step in range(1, steps + 1):
            train(step)
            if schedule.due(step):
                schedule.begin(step)
                checkpointer.save(step, …)

    In steps nothing is communicated. In seconds the clock of rank 0 decides: the ranks meet at a step that they agreed
    on when they met before, a sixteenth of the interval or whatever is left of it ahead by the pace so far, and rank 0
    tells whether the time has come. That is a small broadcast between the hosts now and then, none in the steps
    between, and no device is waited for. If steps become slower meanwhile a save comes later, by a sixteenth of the
    interval's steps at most. The first interval begins with the first question.

    fingerprints: of the run; validation losses of its checkpoints in `plan.folder` are those to beat. clock: seconds,
    for tests.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        world: DistEnv,
        fingerprints: dict[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._world = world
        self._clock = clock
        #: When the interval began; None before the first question.
        self._begun: float | None = None
        #: The step that was last asked about; that of the latest meeting and its time; that of the next one.
        self._asked = 0
        self._paced = (0, 0.0)
        self._meeting = 0
        self._fingerprints = fingerprints
        #: By step, the validation losses of checkpoints that were looked at; on rank 0, which decides.
        self._losses: dict[int, float | None] = {}

    def due(self, step: int, validation_loss: float | None = None) -> bool:
        """Whether to save after `step`. validation_loss: of these weights, where it was just measured."""
        plan = self.plan
        if self._begun is None:
            self.begin(step)
        elif step <= self._asked:  # the run was taken back to an earlier step
            self._paced, self._meeting = (step, self._clock()), step + 1
            self._losses.clear()  # one of them may have been left behind, and its step will be saved anew
        self._asked = step
        if is_milestone(step, plan.milestones) or (plan.first_step and step == 1):
            return True
        if plan.interval_type == "steps" and step % plan.interval == 0:
            return True
        judged = plan.keep_best > 0 and validation_loss is not None
        meets = plan.interval_type == "seconds" and step >= self._meeting
        if not (judged or meets):
            return False
        answer = False, step + 1
        if self._world.rank == 0:
            try:
                answer = self._decide(step, validation_loss if judged else None)
            except OSError:
                answer = True, step + 1  # the folder cannot be read: the save will say why
        due, meeting = cast("tuple[bool, int]", self._world.broadcast(answer))
        if meets:
            self._meeting = meeting
        return due

    def begin(self, step: int) -> None:
        """A save of `step` begins now: the next interval counts from here, whatever becomes of it."""
        self._begun = self._clock()
        self._paced = (step, self._begun)
        self._meeting = step + 1

    def _decide(self, step: int, validation_loss: float | None) -> tuple[bool, int]:
        """On rank 0: whether to save, and the step of the next meeting."""
        better = validation_loss is not None and math.isfinite(validation_loss) and self._is_among_best(validation_loss)
        if self.plan.interval_type == "steps":
            return better, step
        assert self._begun is not None
        now = self._clock()
        before, then = self._paced
        self._paced = (step, now)
        left = self.plan.interval - (now - self._begun)
        pace = (now - then) / max(step - before, 1)
        ahead = int(min(left, self.plan.interval / _MEETINGS) / pace) if pace > 0 else 1
        return better or left <= 0, step + max(ahead, 1)

    def _is_among_best(self, loss: float) -> bool:
        """Whether fewer than `plan.keep_best` checkpoints of this run have a loss that is as low."""
        root = place(self.plan.folder)
        lower = 0
        for step in steps_in(root):
            if step not in self._losses:
                try:
                    manifest = parse_manifest(step_folder(root, step))
                except CheckpointError:
                    continue
                ours = self._fingerprints is None or manifest.fingerprints == self._fingerprints
                self._losses[step] = manifest.validation_loss if ours and not manifest.weights_only else None
            known = self._losses[step]
            lower += known is not None and known <= loss
        return lower < self.plan.keep_best
