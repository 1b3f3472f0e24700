"""A non-finite loss or gradient never reaches the weights.

The flag lives on the device and gates the update there, so no step waits for the host. It is sticky: once a
step was bad nothing updates any more. The host reads the flag of a step while the next one is under way.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist


class NonFiniteError(RuntimeError):
    """The guard stopped the run: a loss or gradient norm was not finite. The weights are those of the step before.

    losses: by rank, its share of the bad step's loss. Gradients are summed over ranks before anyone sees their norm, so
    only a loss can tell which rank it came from.
    """

    def __init__(self, step: int, norm: float, loss: float, losses: list[float]) -> None:
        self.step, self.norm, self.loss = step, norm, loss
        self.ranks = [rank for rank, share in enumerate(losses) if not math.isfinite(share)]
        if self.ranks:
            where = f"the loss was not finite on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        else:
            where = "the loss was finite on every rank, so it arose in the backward pass"
        super().__init__(
            f"step {step}: loss {loss:.6g}, gradient norm {norm:.6g}: {where}. The update was not applied: the weights "
            f"are those after step {step - 1}"
        )

    def explain(self, finding: object) -> None:
        """Add to the message where it came from (see `titanlite.observe.diagnose`)."""
        self.args = (f"{self}. {finding}",)


class FiniteGuard:
    """Watches each step's loss and gradient norm on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tripped = torch.zeros((), dtype=torch.bool, device=device)
        # Step, global norm and loss, this rank's share of the loss, as they were when the flag was set.
        self._record = torch.zeros(4, dtype=torch.float64, device=device)
        #: Whether there is anything to read: the flag, or a wish to stop in the latest step.
        self._news = self._tripped
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def gate(
        self,
        step: int,
        norm: torch.Tensor,
        loss: torch.Tensor,
        share: torch.Tensor,
        stop: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """May this step update the weights? A 0-dim bool on the device, equal on all ranks.

        norm, loss: reduced over ranks; share: this rank's part of the loss (0-dim tensors on the device).
        stop: 0-dim bool, equal on all ranks: one was asked to stop. It changes nothing here; `watch` tells.
        """
        ok = torch.isfinite(norm) & torch.isfinite(loss) & ~self._tripped
        now = torch.stack([t.double() for t in (torch.full_like(norm, step), norm, loss, share)])
        self._record = torch.where(ok | self._tripped, self._record, now)
        self._tripped = self._tripped | ~ok
        self._news = self._tripped if stop is None else self._tripped | stop
        return ok

    def watch(self) -> bool:
        """Raise NonFiniteError, on all ranks together, if the step before the latest `gate` was bad.

        Returns whether a rank was asked to stop then: the same on all ranks, which stop after the latest step.
        Call it once a step, after the step's work was issued: the flag copied here is read at the next call.
        On a CPU there is nothing to overlap, so the latest flag is read at once.
        """
        if self._device.type != "cuda":
            news = bool(self._news)
        else:
            news = False
            if self._pending is not None:
                flag, event = self._pending
                event.synchronize()
                news = bool(flag)
            flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            flag.copy_(self._news, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (flag, event)
        if news:
            self.check()  # what is none of it is a wish to stop
        return news

    def check(self) -> None:
        """Raise NonFiniteError if any step so far was bad; waits for the device. Before a save, and at the end."""
        self._raise_if(bool(self._tripped))

    def _raise_if(self, tripped: bool) -> None:
        if not tripped:
            return
        step, norm, loss, share = self._record.tolist()
        losses: list[float] = [share] * dist.get_world_size()
        dist.all_gather_object(losses, share)
        raise NonFiniteError(int(step), norm, loss, losses)
