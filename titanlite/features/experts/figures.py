"""Load of the experts, and losses of the routers, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titanlite.callbacks import Figures

if TYPE_CHECKING:
    from titanlite.trainer import Trainer


class ExpertFigures(Figures):
    """Tells how even the load of experts has been since the last log.

    experts: of each MoE layer in the whole model, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        experts: Mapping[str, int],
        device: torch.device,
        has_losses: bool = True,
    ) -> None:
        self._has_losses = has_losses
        modules: dict[str, Any] = dict(model.named_modules())
        self._experts = dict(experts)
        self._records = {
            name: torch.zeros(number + 3, dtype=torch.float64, device=device)
            for name, number in experts.items()
        }
        for name in experts.keys() & modules.keys():
            modules[name].record = self._records[name]

    def on_start(self, trainer: Trainer) -> None:
        self.sums(trainer)

    def on_rollback(self, trainer: Trainer) -> None:
        self.sums(trainer)

    def sums(self, trainer: Trainer) -> Tensor:
        sums = torch.cat(list(self._records.values()))
        torch._foreach_zero_(list(self._records.values()))
        return sums

    def figures(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        shares, entropies, losses = {}, [], []
        for name, experts in self._experts.items():
            rows = sums[:experts]
            tokens, balance, z = sums[experts : experts + 3]
            sums = sums[experts + 3 :]
            total = sum(rows) or 1.0
            parts = [count / total for count in rows]
            shares[f"experts/max_share/{name.removesuffix('.feed_forward')}"] = max(parts)
            entropies.append(
                -sum(part * math.log(part) for part in parts if part) / math.log(max(experts, 2))
            )
            losses.append((balance / (tokens or 1.0), z / (tokens or 1.0)))
        layers = len(shares)
        found = {
            "experts/max_share": max(shares.values()),
            "experts/entropy": sum(entropies) / layers,
        }
        if self._has_losses:
            found["experts/aux_loss"] = sum(balance for balance, _ in losses) / layers
            found["experts/z_loss"] = sum(z for _, z in losses) / layers
        return found | shares
