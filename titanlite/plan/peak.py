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
    """Logs the measured peak beside the planned one, once, after the second step of a process.

    It runs before the metrics, whose logs begin a new peak. The first step is logged, and has no
    optimizer state before its end. So the peak of the second is that of every later step.

    read_peak: bytes of this rank's tensors at their peak since the latest log. A CPU has no such
    counter, and the resident memory of its process is mostly not tensors. So nothing is compared
    there.
    """

    def __init__(self, run: RunConfig, read_peak: Callable[[], int], device: str = "cuda") -> None:
        self._run, self._read_peak, self._device = run, read_peak, device
        #: The peak since the latest log is one of training steps only; it was compared.
        self._fresh = self._done = False

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        if phase in OTHER_PHASES:
            self._fresh = False

    def on_log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        self._fresh = True

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if not self._fresh or self._done:
            return
        self._done = True
        import torch
        import torch.distributed as dist

        world = trainer.parts.world
        sizes = torch.zeros(world.size, 2, dtype=torch.float64)
        try:
            here = self._run.steady_at(trainer.step)
            planned = estimate(here, world.rank, self._device).peak.total
        except Exception:  # the start report has said so
            planned = 0
        sizes[world.rank] = torch.tensor([self._read_peak(), planned])
        sizes = sizes.to(world.device)
        dist.all_reduce(sizes)
        sizes = sizes.cpu()
        if not sizes[:, 1].all():
            return
        shares = sizes[:, 0] / sizes[:, 1] - 1
        wrong = shares if self._run.training.compile else shares.abs()
        rank = int(wrong.argmax())
        peak, plan = sizes[rank].tolist()
        where = f" on rank {rank}" if world.size > 1 else ""
        text = (
            f"memory of step {trainer.step}: measured {peak / GIB:,.2f} GiB at the peak{where}, "
            f"{planned_word(self._run)} {plan / GIB:,.2f} GiB ({shares[rank]:+.1%})"
        )
        far = wrong[rank] > APART and abs(peak - plan) > APART_BYTES
        if not far or world.rank:  # the console shows a warning once
            logger.info(text)
            return
        logger.warning(
            f"{text}: more than {APART:.0%} apart, so the plan is wrong. Please report it with "
            f"config.toml and logs/rank_{rank}.log of {self._run.job.dump_folder}"
        )
