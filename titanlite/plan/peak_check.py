"""The check of the plan in a run: its measured peak beside the planned one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from titanlite.callbacks import SLOW_PHASES, Callback
from titanlite.plan.memory import estimate
from titanlite.plan.parts import GIB
from titanlite.plan.start_rows import planned_word
from titanlite.run.config import RunConfig
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer

#: Measured and planned peaks that are further apart than this share, and these bytes, are reported.
#: Work spaces of CUDA's libraries are not planned.
APART, APART_BYTES = 0.15, 2**28
#: Phases in which a peak is none of a training step.
OTHER_PHASES = SLOW_PHASES - {"profile", "end"}


class PeakCheck(Callback):
    """Logs this rank's measured peak beside the planned one, after a process's second step.

    It runs before the metrics, whose logs begin a new peak. The first step has optimizer state only
    at its end, so the second's peak is that of later ones. read_peak: bytes of this rank's tensors
    since the latest log.
    """

    def __init__(self, run: RunConfig, read_peak: Callable[[], int]) -> None:
        self._run = run
        self._read_peak = read_peak
        #: The peak since the latest log is one of training steps only.
        self._fresh = False
        self._done = False

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        if phase in OTHER_PHASES:
            self._fresh = False

    def on_log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        self._fresh = True

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if not self._fresh or self._done:
            return
        self._done = True
        rank = trainer.parts.world.rank
        try:
            plan = estimate(self._run.steady_at(trainer.step), rank).peak.total
        except Exception:  # the start report has said so
            return
        peak = self._read_peak()
        share = peak / plan - 1
        text = (
            f"memory of step {trainer.step}: measured {peak / GIB:,.2f} GiB at the peak of rank "
            f"{rank}, {planned_word(self._run)} {plan / GIB:,.2f} GiB ({share:+.1%})"
        )
        wrong = share if self._run.training.compile else abs(share)
        if wrong <= APART or abs(peak - plan) <= APART_BYTES:
            logger.info(text)
            return
        # The console shows warnings of all ranks, and those of a pipeline stage are alike.
        ranks_of_stage = self._run.mesh.world_size // self._run.mesh.pipeline
        log = logger.info if rank % ranks_of_stage else logger.warning
        log(
            f"{text}: more than {APART:.0%} apart, so the plan is wrong. Please report it with "
            f"config.toml and logs/rank_{rank}.log of {self._run.job.dump_folder}"
        )
