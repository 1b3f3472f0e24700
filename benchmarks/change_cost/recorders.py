"""Callbacks of the checks' runs: they save whole tensors, however these are sharded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from titanlite import Callback


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor; all ranks call it."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def save(record: Any) -> None:
    rank = os.environ.get("RANK", "0")
    torch.save(record, Path(os.environ["RECORDS"]) / f"rank_{rank}.pt")


class Updates(Callback):
    """Gradients and weights of each update, and the sizes of weights and state on this rank."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []

    def before_update(self, trainer: Any) -> None:
        named = dict(trainer.parts.model.named_parameters())
        before = {name: whole(weight) for name, weight in named.items()}
        gradients = {name: whole(weight.grad) for name, weight in named.items()}
        self.updates.append({"before": before, "gradients": gradients})

    def on_step_end(self, trainer: Any, result: Any) -> None:
        named = trainer.parts.model.named_parameters()
        self.updates[-1]["after"] = {name: whole(weight) for name, weight in named}
        weights = sum(local(weight).numel() for weight in trainer.parts.model.parameters())
        moments = 0
        for state in trainer.parts.optimizer.state.values():
            tensors = [local(one) for one in state.values() if isinstance(one, torch.Tensor)]
            moments += sum(one.numel() for one in tensors if one.dim())
        save({"updates": self.updates, "weights": weights, "moments": moments})


class Weights(Callback):
    """Squared norm of each weight of this rank's modules, at each log."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def on_log(self, trainer: Any, figures: Any) -> None:
        named = trainer.parts.model.named_parameters()
        squares = {name: whole(one).double().square().sum().item() for name, one in named}
        self.steps[trainer.step] = squares
        save(self.steps)


class Scaled(Callback):
    """Makes matrices of blocks 8 times larger before the first step, so that each part counts.

    Saves one rank's weights, and its logits of fixed tokens.
    """

    def on_start(self, trainer: Any) -> None:
        model = trainer.parts.model
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 2 and "layers." in name:
                    weight.mul_(8)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            return
        weights = {name: whole(weight) for name, weight in model.named_parameters()}
        tokens = torch.arange(96).reshape(2, 48) * 13 % 2000
        with torch.no_grad():
            logits = model(tokens)
        save({"weights": weights, "tokens": tokens, "logits": logits})
