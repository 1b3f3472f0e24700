"""The log-probability of each target, on every layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titanlite.data.rows import IGNORE
from titanlite.parallel.fsdp import free_gathered

#: Tokens whose logits are in float32 at a time.
_AT_ONCE = 1024


class TargetLogs:
    """Stands in for a loss function: keeps the log-probability of each target, in float32.

    A model with its loss in chunks calls it for each, in the order of the tokens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: One entry a call: log-probabilities, and whether a target is not the most
        #: probable token; [tokens] float64, 0 where there is no target.
        self.logs: list[Tensor] = []
        self._misses: list[Tensor] = []

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits: [rows, seq, vocab], perhaps a DTensor; labels: [rows, seq]. Returns zero."""
        targets = labels.flatten()
        places = (targets != IGNORE).nonzero().squeeze(1)
        logs = torch.zeros(len(targets), dtype=torch.float64, device=self._device)
        misses = torch.zeros_like(logs)
        for part in places.split(_AT_ONCE):
            chosen = _whole_rows(logits, part).float()
            wanted = targets[part]
            likely = chosen.gather(1, wanted.unsqueeze(1)).squeeze(1) - chosen.logsumexp(1)
            logs[part] = likely.double()
            misses[part] = (chosen.argmax(1) != wanted).double()
        self.logs.append(logs)
        self._misses.append(misses)
        return torch.zeros((), device=self._device)

    def sums(self, rows: int) -> Tensor:
        """Return the sums over rows, [rows, 2] float64; zeros where this rank has no logits."""
        if not self.logs:
            return torch.zeros(rows, 2, dtype=torch.float64, device=self._device)
        kept = (torch.cat(self.logs), torch.cat(self._misses))
        return torch.stack([one.view(rows, -1).sum(1) for one in kept], 1)


def _whole_rows(logits: Tensor, places: Tensor) -> Tensor:
    # [places, vocab] at `places` of [rows * seq], whole on every rank.
    if not isinstance(logits, DTensor):
        return logits.flatten(0, -2)[places]
    (placement,) = logits.placements
    if not placement.is_shard(logits.ndim - 1):
        return logits.full_tensor().flatten(0, -2)[places]
    local = logits.to_local().flatten(0, -2)[places]
    return DTensor.from_local(local, logits.device_mesh, [Shard(1)], run_check=False).full_tensor()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let a model evaluate inside, without gradients and uncompiled."""
    training = model.training
    model.eval()
    try:
        # Other shapes than in training would be compiled again.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        free_gathered(model)
        model.train(training)
