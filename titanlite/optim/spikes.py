"""Loss spikes: the limit for a step's loss, from the losses before it."""

from __future__ import annotations

import math

import torch

#: Least standard deviation, as a share of the mean: where losses hardly vary, rounding would look
#: like a spike.
_LEAST_DEVIATION = 1e-3
#: Losses that a limit needs.
_LEAST_LOSSES = 20


class LossWindow:
    """The last `size` losses of good steps, on the device, and the limit for the next one.

    The limit is mean + sigmas * s, s the sample standard deviation but at least a thousandth of the
    mean. It applies when half the window is filled, with at least twenty losses (of a shorter
    window all). A loss over it does not enter. After OLMo-core's SkipStepOptimizer.
    """

    def __init__(self, size: int, sigmas: float, device: torch.device) -> None:
        self.sigmas = sigmas
        #: Oldest first, behind NaN for those to come. Sums have the same order, and so the same
        #: bits, after a resume.
        self._losses = torch.full((size,), math.nan, dtype=torch.float64, device=device)
        self._least = min(size, max(_LEAST_LOSSES, size // 2))

    def judge(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return whether a loss is over the limit (0-dim bool), and mean and deviation (0-dim
        float64).
        """
        there = self._losses.isfinite()
        count = there.sum()
        mean = torch.where(there, self._losses, 0.0).sum() / count.clamp(min=1)
        squares = torch.where(there, self._losses - mean, 0.0).square().sum()
        deviation = torch.maximum(
            (squares / (count - 1).clamp(min=1)).sqrt(), _LEAST_DEVIATION * mean.abs()
        )
        return (
            (count >= self._least) & (loss.double() > mean + self.sigmas * deviation),
            mean,
            deviation,
        )

    def add(self, loss: torch.Tensor, good: torch.Tensor) -> None:
        """Add the loss of a step if the flag `good` (0-dim bool) is set, else change nothing."""
        moved = torch.cat([self._losses[1:], loss.double().view(1)])
        self._losses = torch.where(
            good, moved, self._losses
        )  # selected: a NaN would outlive any product

    def values(self) -> list[float]:
        """Return the losses, oldest first. Waits for the device."""
        return self._losses[self._losses.isfinite()].tolist()

    def fill(self, losses: list[float]) -> None:
        """Start with these losses, oldest first; of more than fit, with the newest."""
        size = len(self._losses)
        kept = torch.tensor([math.nan] * size + losses, dtype=torch.float64)[-size:]
        self._losses = kept.to(self._losses.device)
