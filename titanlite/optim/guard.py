"""A bad step never reaches the weights: its loss or gradient is not finite, or its loss jumps.

With `optimizer.early_step_in_backward` it does, and the run ends or goes back; it is never saved.

The decision is made on the device, from numbers that are equal on all ranks. It gates the update of
that very step: no step waits for the host, and no collective is added. The host reads the decision
while the next step runs.

    stop      nothing updates any more, and the run ends.
    skip      that step's update alone is skipped: weights, moments and the optimizer's step count
              do not change.
    rollback  nothing updates any more, until the loop has loaded a checkpoint and called
              `load_state_dict`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import torch

from titanlite.dist.dist_env import gather_objects
from titanlite.optim.bad_step_errors import BadStepError, not_finite_reason, spike_reason

if TYPE_CHECKING:
    from titanlite.optim.spikes import LossWindow

_FINE, _NOT_FINITE, _SPIKE = range(3)


class FiniteGuard:
    """Checks each step's loss and gradient norm on the device, and does what `policy` says.

    Call `check` in the step (`TrainStep` does) and `poll` after each.

    Args:
        max_skips: bad steps within the last `window` steps that do not end the run; one more does.
        spike_sigmas: limit of a loss in standard deviations above the mean of the last `window`
            good losses; 0: none.
    """

    def __init__(
        self,
        device: torch.device,
        policy: Literal["stop", "skip", "rollback"] = "stop",
        max_skips: int = 10,
        spike_sigmas: float = 0.0,
        window: int = 100,
    ) -> None:
        #: Updates are in the weights before the guard decides (`titanlite.optim.in_backward`).
        self.applied = False
        self.policy = policy
        self.max_skips = max_skips
        self.spike_sigmas = spike_sigmas
        self.window = window
        #: `poll` reports the step before the latest: where the host runs ahead of the device.
        self.late = device.type == "cuda"
        #: Nothing updates any more. Never set where bad steps are skipped.
        self._tripped = torch.zeros((), dtype=torch.bool, device=device)
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._losses: LossWindow | None = None
        if spike_sigmas:
            from titanlite.optim.spikes import LossWindow

            self._losses = LossWindow(window, spike_sigmas, device)
        #: Figures of the latest step, in the order of `_read`; once tripped, of the step that did
        #: it.
        self._record = torch.zeros(8, dtype=torch.float64, device=device)
        #: Copies on the host that are not read yet, and the events after which they are there
        #: (CUDA).
        self._copies: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque(maxlen=2)
        self._stop = False
        #: Bad steps that count against the budget, and skipped steps that `skipped` has not
        #: returned yet.
        self._spent: list[int] = []
        self._skipped: list[BadStepError] = []

    def check(
        self,
        step: int,
        norm: torch.Tensor,
        loss: torch.Tensor,
        share: torch.Tensor,
        stop: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return whether this step may update the weights: a 0-dim bool on the device, equal on all
        ranks.

        norm, loss: reduced over ranks; share: this rank's part of the loss (0-dim tensors on the
        device).
        stop: 0-dim bool, equal on all ranks: one was asked to stop. It changes nothing here; `poll`
        returns it.
        """
        good = torch.stack([norm, loss]).isfinite().all()
        kind = (~good).double() * _NOT_FINITE
        mean = deviation = self._zero
        if self._losses is not None:
            spike, mean, deviation = self._losses.judge(loss)
            spike = spike & good
            kind = kind + spike.double() * _SPIKE
            good = good & ~spike
        ok = good & ~self._tripped
        if self._losses is not None:
            self._losses.add(loss, ok)
        if stop is None:
            stop = torch.zeros_like(ok)
        number = torch.full_like(self._zero, step)
        figures = [number, norm, loss, share, kind, stop, mean, deviation]
        now = torch.stack([figure.double() for figure in figures])
        self._record = torch.where(self._tripped, self._record, now)
        if self.policy != "skip":
            self._tripped = self._tripped | ~good
        self._copy()
        return ok

    def poll(self) -> bool:
        """Read the latest step; on a GPU, where the host runs ahead, the step before it.

        Return whether a rank was asked to stop then, the same on all ranks: they stop after the
        latest step.
        Raises BadStepError, on all ranks together, if the step was bad and the policy or the budget
        ends the run. Call it once a step, after the step's work was issued.
        """
        self._read(unread=int(self.late))
        stop = self._stop
        self._stop = False
        return stop

    def sync(self) -> None:
        """Read all steps so far; waits for the device. Raises BadStepError as `poll` does."""
        self._read(unread=0)

    def skipped(self) -> list[BadStepError]:
        """Return the steps skipped since the last call, as errors that were not raised; equal on
        all ranks.
        """
        skipped = self._skipped
        self._skipped = []
        return skipped

    def consume_budget(self, bad: BadStepError) -> None:
        """Count a bad step that does not end the run. Raises it when the budget is used up."""
        self._spent = [step for step in self._spent if step > bad.step - self.window] + [bad.step]
        if len(self._spent) > self.max_skips:
            steps = ", ".join(map(str, self._spent))
            bad.explain(
                f'guard.policy = "{self.policy}", but guard.max_skips = {self.max_skips} within '
                f"{self.window} steps (guard.window) is used up; bad were the steps {steps}"
            )
            raise bad

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics for a resumed run, which then decides the same.

        JSON keeps them exactly.

        Waits for the device.
        """
        state: dict[str, Any] = {}
        losses = [] if self._losses is None else self._losses.values()
        if losses:
            state["losses"] = losses
        if self._spent:
            state["bad_steps"] = list(self._spent)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the weights and the statistics of a checkpoint: updates are on again.

        Of a longer window the newest losses are kept. A budget that this process has used stays
        used.
        """
        self._tripped = torch.zeros_like(self._tripped)
        self._copies.clear()
        self._stop = False
        self._spent = self._spent or [int(step) for step in state.get("bad_steps", [])]
        if self._losses is not None:
            self._losses.fill([float(loss) for loss in state.get("losses", [])])

    def _copy(self) -> None:
        if self._record.device.type != "cuda":
            self._copies.append((self._record, None))
            return
        copy = torch.empty(len(self._record), dtype=torch.float64, pin_memory=True)
        event = torch.cuda.Event()
        copy.copy_(self._record, non_blocking=True)
        event.record()
        self._copies.append((copy, event))

    def _read(self, unread: int) -> None:
        while len(self._copies) > unread:
            record, event = self._copies.popleft()
            if event is not None:
                event.synchronize()
            step, norm, loss, share, kind, stop, mean, deviation = record.tolist()
            self._stop = self._stop or bool(stop)
            if kind == _FINE:
                continue
            ranks: list[int] = []
            if kind == _SPIKE:
                name = "spike"
                why = spike_reason(mean, self.spike_sigmas, deviation)
            else:
                name = "not finite"
                # Gradients are summed over ranks before their norm is known, so only a loss can
                # show the rank.
                shares = gather_objects(share)
                ranks = [rank for rank, one in enumerate(shares) if not math.isfinite(one)]
                why = not_finite_reason(ranks)
            # The last step before whose update was not skipped.
            updated = int(step) - 1
            while self.policy == "skip" and updated in self._spent:
                updated -= 1
            bad = BadStepError(int(step), norm, loss, why, name, ranks, self.applied, updated)
            if self.policy != "skip":
                raise bad
            self.consume_budget(bad)
            self._skipped.append(bad)
