"""An exponential moving average of the weights: in float32, sharded as they are.

    average = WeightAverage(model, gather(model), decay=0.999)
    with average.applied():      # the model has the averaged weights
        ...

A checkpoint holds the averages beside the weights, by the names of `average_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from titanlite.callbacks import Callback
from titanlite.checkpoint.loaded import average_of
from titanlite.dist.local_parts import local, parts_of
from titanlite.parallel.feature_linear import weights_replaced
from titanlite.parallel.fsdp import free_gathered

if TYPE_CHECKING:
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


class WeightAverage(Callback):
    """Moves the averages after each good step by (1 - decay) of their distance to the weights.

    weights: of `model`, as `titanlite.checkpoint.state_dict.gather` names them; averages begin with
    them. They take 4 bytes per parameter, and `applied` as many more as the weights.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, torch.Tensor], decay: float) -> None:
        self._model, self._decay = model, decay
        self._weights = dict(weights)
        #: Averages by name in a checkpoint; a tied weight has two names there.
        self.tensors: dict[str, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        for name, weight in self._weights.items():
            pointer = local(weight).data_ptr()
            if pointer not in made or not pointer:  # empty shards have none
                made[pointer] = weight.detach().to(torch.float32, copy=True)
            self.tensors[average_of(name)] = made[pointer]
        pairs = zip(self.tensors.values(), self._weights.values(), strict=True)
        #: Local parts of each average and its weight, tied ones once.
        self._pairs = list(
            {id(average): (local(average), local(weight)) for average, weight in pairs}.values()
        )

    @torch.no_grad()
    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Nothing waits for the device."""
        good = result.good.to(self._pairs[0][0].device)
        for average, weight in self._pairs:
            # Selected, since weights may be no numbers after a bad step.
            average.copy_(torch.where(good, average.lerp(weight.float(), 1 - self._decay), average))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averaged weights inside. All ranks enter it, between two steps."""
        own = [weight.clone() for _, weight in self._pairs]
        self._put([average for average, _ in self._pairs])
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for (_, weight), value in zip(self._pairs, values, strict=True):
            weight.copy_(value)
        weights_replaced(self._model)
        for part in parts_of(self._model):
            free_gathered(part)
