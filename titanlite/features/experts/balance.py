"""Balances the load of experts without a loss (Wang et al. 2024, arXiv:2408.15664).

Each expert has a bias that is added to its scores for the choice alone. After an update it rises by
a fixed step where the expert had fewer rows than the mean of its layer, and falls where it had
more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ExpertBalance:
    """Counts the rows of each expert in a step, over all ranks, and moves the biases.

    A step has one all-reduce of integers, and no wait of the host. Only the sign of a difference
    counts, so recomputed blocks and ranks with the same tokens may count rows several times.

    experts: their number by MoE layer of the whole model, the same in all. step: by which a bias
    moves.
    """

    def __init__(
        self, model: nn.Module, experts: Mapping[str, int], step: float, device: torch.device
    ) -> None:
        self.step = step
        (self._experts,) = set(experts.values())
        #: [MoE layers, experts]: rows of this step.
        self._loads = torch.zeros(len(experts), self._experts, dtype=torch.int64, device=device)
        #: MoE layers on this rank, by their row of `_loads`.
        self._layers: dict[int, Any] = {}
        modules = dict(model.named_modules())
        for row, name in enumerate(experts):
            if name in modules:
                self._layers[row] = modules[name]
                self._layers[row].load = self._loads[row]

    def begin(self) -> None:
        self._loads.zero_()

    @torch.no_grad()
    def update(self, ok: Tensor) -> None:
        """Move the biases by the rows of this step, if `ok` (0-dim bool on the device, the same on
        all ranks). All ranks call it together.
        """
        dist.all_reduce(self._loads)
        # Integers: no rounding decides whether a load equals the mean.
        missing = self._loads.sum(1, keepdim=True) - self._loads * self._experts
        moves = missing.sign().float()
        # A common shift changes no choice: without it biases stay near zero.
        moves = self.step * (moves - moves.mean(1, keepdim=True))
        moves = torch.where(ok, moves, 0.0)
        for row, layer in self._layers.items():
            layer.expert_bias += moves[row]
