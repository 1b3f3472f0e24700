"""A non-finite loss or gradient never reaches the weights.

The flag lives on the device and gates the update there, so no step waits for the host. It is sticky: once a
step was bad nothing updates any more. The host reads the flag of a step while the next one is under way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class BadRank:
    """What one rank saw in the bad step, before reduction over ranks."""

    rank: int
    loss: float
    norm: float

    @property
    def is_bad(self) -> bool:
        return not all(map(_finite, (self.loss, self.norm)))


def _finite(value: float) -> bool:
    return value - value == 0.0


class NonFiniteError(RuntimeError):
    """The guard stopped the run: a loss or gradient norm was not finite. The weights are those of the step before."""

    def __init__(self, step: int, norm: float, loss: float, ranks: list[BadRank]) -> None:
        self.step, self.norm, self.loss, self.ranks = step, norm, loss, ranks
        seen = "; ".join(f"rank {r.rank}: loss {r.loss:.6g}, gradient norm {r.norm:.6g}" for r in ranks)
        super().__init__(
            f"step {step}: loss {loss:.6g}, gradient norm {norm:.6g} is not finite. First seen on {seen}. "
            f"The update was not applied: the weights are those after step {step - 1}"
        )


class FiniteGuard:
    """Watches each step's loss and gradient norm on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tripped = torch.zeros((), dtype=torch.bool, device=device)
        # Step, global norm and loss, this rank's norm and loss, as they were when the flag was set.
        self._record = torch.zeros(5, dtype=torch.float64, device=device)
        self._pending: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def gate(
        self, step: int, norm: torch.Tensor, loss: torch.Tensor, local_norm: torch.Tensor, local_loss: torch.Tensor
    ) -> torch.Tensor:
        """May this step update the weights? A 0-dim bool on the device, equal on all ranks.

        norm, loss: reduced over ranks; local_norm, local_loss: this rank's share (0-dim tensors on the device).
        """
        ok = torch.isfinite(norm) & torch.isfinite(loss) & ~self._tripped
        now = torch.stack([t.double() for t in (torch.full_like(norm, step), norm, loss, local_norm, local_loss)])
        self._record = torch.where(ok | self._tripped, self._record, now)
        self._tripped = self._tripped | ~ok
        return ok

    def watch(self) -> None:
        """Raise NonFiniteError, on all ranks together, if the step before the latest `gate` was bad.

        Call it once a step, after the step's work was issued: the flag copied here is read at the next call.
        On a CPU there is nothing to overlap, so the latest flag is read at once.
        """
        if self._device.type != "cuda":
            self._raise_if(bool(self._tripped))
            return
        if self._pending is not None:
            flag, event = self._pending
            assert event is not None
            event.synchronize()
            self._raise_if(bool(flag))
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(self._tripped, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (flag, event)

    def check(self) -> None:
        """Raise NonFiniteError if any step so far was bad; waits for the device. Before a save, and at the end."""
        self._raise_if(bool(self._tripped))

    def _raise_if(self, tripped: bool) -> None:
        if not tripped:
            return
        step, norm, loss, local_norm, local_loss = self._record.tolist()
        mine = BadRank(dist.get_rank(), local_loss, local_norm)
        everyone: list[BadRank] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        raise NonFiniteError(int(step), norm, loss, [r for r in everyone if r.is_bad] or everyone)
