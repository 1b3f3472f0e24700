"""A bad step never reaches the weights: one whose loss or gradient is not finite, or whose loss jumps.

The decision is made on the device, from numbers that are equal on all ranks, and gates the update of that very step
there: no step waits for the host, and no collective is added. The host learns of it while the next step is under way.

    stop      nothing updates any more, and the run ends.
    skip      that step's update alone is left out: weights, moments and the optimizer's step count stay as they are.
    rollback  nothing updates any more, until whoever trains has gone back to a checkpoint and called `rewind`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite import exit_codes
from titanlite.config.plans import GuardPlan

#: Least standard deviation that counts, as a share of the mean: losses that hardly vary would make of rounding a spike.
_LEAST_DEVIATION = 1e-3
#: Losses that a limit takes.
_LEAST_LOSSES = 20
_FINE, _NOT_FINITE, _SPIKE = range(3)


class BadStepError(RuntimeError):
    """The guard found a step bad. Its update was not applied.

    step, loss, norm: of that step, over all ranks. ranks: where the loss was not finite. done: the last step whose
    update the weights hold.
    """

    exit_code = exit_codes.GUARD

    kind = "bad"

    def __init__(self, step: int, norm: float, loss: float, why: str, ranks: list[int] | None = None) -> None:
        self.step, self.norm, self.loss, self.ranks = step, norm, loss, ranks or []
        self.done = step - 1
        super().__init__(
            f"step {step}: loss {loss:.6g}, gradient norm {norm:.6g}: {why}. The update was not applied: the weights "
            f"are those after step {step - 1}"
        )

    def explain(self, finding: object) -> None:
        """Add to the message where it came from (see `titanlite.metrics.nan_finder`), or why the run ends."""
        self.args = (f"{self}. {finding}",)


class NonFiniteError(BadStepError):
    """A loss or gradient norm was not finite.

    losses: by rank, its share of the bad step's loss. Gradients are summed over ranks before anyone sees their norm, so
    only a loss can tell which rank it came from.
    """

    kind = "not finite"

    def __init__(self, step: int, norm: float, loss: float, losses: list[float]) -> None:
        ranks = [rank for rank, share in enumerate(losses) if not math.isfinite(share)]
        if ranks:
            where = f"the loss was not finite on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        else:
            where = "the loss was finite on every rank, so it arose in the backward pass"
        super().__init__(step, norm, loss, where, ranks)


class LossSpikeError(BadStepError):
    """The loss rose over `limit`, nats per token: see `LossWindow`."""

    kind = "spike"

    def __init__(self, step: int, norm: float, loss: float, mean: float, deviation: float, sigmas: float) -> None:
        self.limit = mean + sigmas * deviation
        super().__init__(
            step,
            norm,
            loss,
            f"the loss jumped over {self.limit:.6g} = {mean:.6g} + {sigmas:g} * {deviation:.3g}, mean and deviation of "
            "the good steps before it",
        )


class WeightsError(BadStepError):
    """The weights, or what the optimizer keeps for them, are not finite. No later step can mend them.

    step: where this was found. where: as `find_nonfinite` returns it.
    """

    kind = "weights not finite"

    def __init__(self, step: int, done: int, where: str, then: str) -> None:
        super().__init__(step, math.nan, math.nan, "")
        self.done = done
        self.args = (f"step {step}: {where} is not finite after step {done}. {then}",)


@torch.no_grad()
def find_nonfinite(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> str:
    """The first tensor that holds a NaN or an infinity, with the ranks that have one; "" when all are finite.

    All ranks of `group` call it together with their own parts, and get the same answer. Each device makes one pass
    over its tensors and is read once.
    """
    devices: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            devices.setdefault(part.device, {})[name] = part
    mine = ""
    for parts in devices.values():
        # A sum needs no memory and keeps every NaN and infinity. It may also overflow: then the tensor itself decides.
        sums = torch.stack([part.sum(dtype=torch.float32) for part in parts.values()])
        suspects = (part for part, fine in zip(parts.items(), sums.isfinite().tolist(), strict=True) if not fine)
        mine = mine or next((name for name, part in suspects if not part.isfinite().all()), "")
    found = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    ranks = [rank for rank, name in enumerate(found) if name]
    return f"{found[ranks[0]]} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


class LossWindow:
    """The last `size` losses of good steps, on the device, and how high the next one may be.

    The limit is mean + sigmas * s, s the sample standard deviation but at least a thousandth of the mean. It holds when
    half the window is filled, and twenty losses at least (of a shorter window all): a deviation of fewer means little.
    After OLMo-core's SkipStepOptimizer (128 losses, six sigmas), which looks at gradient norms and at falls as well.
    Here a loss over the limit does not enter the window, where it would raise the limit for the next.
    """

    def __init__(self, size: int, sigmas: float, device: torch.device) -> None:
        self.sigmas = sigmas
        #: Oldest first, at the end of the tensor: sums have the same order, and so the same bits, after a resume.
        self._losses = torch.zeros(size, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._age = torch.arange(size, 0, -1, device=device)
        self._least = min(size, max(_LEAST_LOSSES, size // 2))

    def judge(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Whether a loss is over the limit (0-dim bool), and the window's mean and deviation (0-dim float64)."""
        there = self._age <= self._count
        mean = torch.where(there, self._losses, 0.0).sum() / self._count.clamp(min=1)
        squares = torch.where(there, self._losses - mean, 0.0).square().sum()
        deviation = torch.maximum((squares / (self._count - 1).clamp(min=1)).sqrt(), _LEAST_DEVIATION * mean.abs())
        return (self._count >= self._least) & (loss.double() > mean + self.sigmas * deviation), mean, deviation

    def add(self, loss: torch.Tensor, good: torch.Tensor) -> None:
        """Take in the loss of a step where the flag `good` (0-dim bool) is set, else change nothing."""
        moved = torch.cat([self._losses[1:], loss.double().view(1)])
        self._losses = torch.where(good, moved, self._losses)  # selected: a NaN would outlive any product
        self._count = (self._count + good).clamp(max=len(self._losses))

    def values(self) -> list[float]:
        """The losses, oldest first. Waits for the device."""
        count = int(self._count)
        return self._losses[len(self._losses) - count :].tolist()

    def fill(self, losses: list[float]) -> None:
        """Begin with these, oldest first; of more than there is room for the newest."""
        size = len(self._losses)
        losses = losses[-size:]
        kept = torch.tensor([0.0] * (size - len(losses)) + losses, dtype=torch.float64)
        self._losses, self._count = kept.to(self._losses.device), self._count.new_tensor(len(losses))


class FiniteGuard:
    """Watches each step's loss and gradient norm on the device, and does what `plan.policy` says.

    Call `gate` in the step (`train_step` does) and `watch` after each. The budget `plan.max_skips` is of bad steps
    within the last `plan.window` steps; over it the run ends whatever the policy.
    """

    def __init__(self, device: torch.device, plan: GuardPlan | None = None) -> None:
        self.plan = plan or GuardPlan()
        self._device = device
        #: Nothing updates any more. Never set where bad steps are skipped.
        self._tripped = torch.zeros((), dtype=torch.bool, device=device)
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._window: LossWindow | None = None
        if self.plan.spike_sigmas:
            self._window = LossWindow(self.plan.window, self.plan.spike_sigmas, device)
        #: What the latest `gate` saw, in the order of `_read`; of a sticky flag, what set it.
        self._record = torch.zeros(9, dtype=torch.float64, device=device)
        #: Whether there is anything to read in it: a bad step, or a wish to stop.
        self._news = self._tripped
        self._unread = False
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._wish = False
        #: Nothing updates any more: a rank had no data for a step.
        self._void = self._tripped
        #: The first such step, once it is known.
        self.void_step: int | None = None
        #: Bad steps that count against the budget, and those of them that nobody has asked for.
        self._spent: list[int] = []
        self._skipped: list[BadStepError] = []

    def gate(
        self,
        step: int,
        norm: torch.Tensor,
        loss: torch.Tensor,
        share: torch.Tensor,
        stop: torch.Tensor | None = None,
        void: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """May this step update the weights? A 0-dim bool on the device, equal on all ranks.

        norm, loss: reduced over ranks; share: this rank's part of the loss (0-dim tensors on the device).
        stop: 0-dim bool, equal on all ranks: one was asked to stop. It changes nothing here; `watch` tells.
        void: 0-dim bool, equal on all ranks: one had no data for this step. It and all after it change nothing, and are
        not judged; `watch` tells, and `void_step` is then the first.
        """
        if void is not None:
            self._void = self._void | void
        good = (torch.isfinite(norm) & torch.isfinite(loss)) | self._void
        kind = (~good).double() * _NOT_FINITE
        mean = deviation = self._zero
        if self._window is not None:
            spike, mean, deviation = self._window.judge(loss)
            spike = spike & good & ~self._void
            kind, good = kind + spike.double() * _SPIKE, good & ~spike
        ok = good & ~self._tripped & ~self._void
        if self._window is not None:
            self._window.add(loss, ok)
        wish = self._zero if stop is None else stop
        number = torch.full_like(self._zero, step)
        now = torch.stack([t.double() for t in (number, norm, loss, share, kind, wish, mean, deviation, self._void)])
        self._record = torch.where(self._tripped, self._record, now)
        if self.plan.policy != "skip":
            self._tripped = self._tripped | ~good
        self._news = ~ok if stop is None else ~ok | stop
        self._unread = True
        return ok

    def watch(self) -> bool:
        """Learn of the step before the latest `gate`; on a CPU, where nothing is to overlap, of the latest.

        Raises BadStepError, on all ranks together, if it was bad and the policy or the budget ends the run for it.
        Returns whether a rank was asked to stop then: the same on all ranks, which stop after the latest step.
        Call it once a step, after the step's work was issued: the record copied here is read at the next call.
        """
        unread, self._unread = self._unread, False
        if self._device.type != "cuda":
            if unread and bool(self._news):
                self._read(self._record)
        else:
            pending, self._pending = self._pending, self._copy() if unread else None
            self._read_copy(pending)
        wish, self._wish = self._wish, False
        return wish

    def check(self) -> None:
        """Learn of all steps so far; waits for the device. Before a save, and at the end.

        Raises BadStepError as `watch` does.
        """
        pending, self._pending = self._pending, None
        unread, self._unread = self._unread, False
        self._read_copy(pending)
        if unread:
            self._read(self._record)

    def skipped(self) -> list[BadStepError]:
        """The steps that were left out and not yet asked for, as errors that nobody raised; equal on all ranks."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def spend(self, bad: BadStepError) -> None:
        """Count a bad step that does not end the run. Raises it when the budget is used up."""
        plan = self.plan
        self._spent = [step for step in self._spent if step > bad.step - plan.window] + [bad.step]
        if len(self._spent) > plan.max_skips:
            steps = ", ".join(map(str, self._spent))
            bad.explain(
                f'guard.policy = "{plan.policy}", but guard.max_skips = {plan.max_skips} within {plan.window} steps '
                f"(guard.window) is used up; bad were the steps {steps}"
            )
            raise bad

    def rewind(self, state: dict[str, Any] | None) -> None:
        """The weights are those of a checkpoint again: updates go on, with the statistics saved there.

        What was spent of the budget stays spent.
        """
        spent = self._spent
        self._tripped = torch.zeros_like(self._tripped)
        self._void, self.void_step = self._tripped, None
        self._pending, self._unread, self._wish = None, False, False
        if self._window is not None:
            self._window.fill([])
        self.load_state_dict(state or {})
        self._spent = spent

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to decide alike, for JSON, whose floats are exact. Waits for the device."""
        losses = [] if self._window is None else self._window.values()
        return {**({"losses": losses} if losses else {}), **({"bad_steps": list(self._spent)} if self._spent else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the statistics of `state`; of a longer window's the newest losses."""
        self._spent = [int(step) for step in state.get("bad_steps", [])]
        if self._window is not None:
            self._window.fill([float(loss) for loss in state.get("losses", [])])

    def _copy(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The record on its way to the host."""
        record = torch.empty(len(self._record), dtype=torch.float64, pin_memory=True)
        record.copy_(self._record, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return record, event

    def _read_copy(self, pending: tuple[torch.Tensor, torch.cuda.Event] | None) -> None:
        if pending is not None:
            record, event = pending
            event.synchronize()
            self._read(record)

    def _read(self, record: torch.Tensor) -> None:
        step, norm, loss, share, kind, wish, mean, deviation, void = record.tolist()
        self._wish = self._wish or bool(wish)
        if void and self.void_step is None:
            self.void_step = int(step)
        if kind == _FINE:
            return
        bad: BadStepError
        if kind == _SPIKE:
            bad = LossSpikeError(int(step), norm, loss, mean, deviation, self.plan.spike_sigmas)
        else:
            losses: list[float] = [share] * dist.get_world_size()
            dist.all_gather_object(losses, share)
            bad = NonFiniteError(int(step), norm, loss, losses)
        if self.plan.policy != "skip":
            raise bad
        self.spend(bad)
        self._skipped.append(bad)
