"""An exponential moving average of the weights (EMA): `average.py`, which needs torch and is
imported where it is used.

The key is `optimizer.ema_decay`. What `begin` returns follows the weights as a callback, is applied
while held-out texts are measured, and its tensors are saved and loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.run.features import Feature

if TYPE_CHECKING:
    from torch import nn

    from titanlite.config.sections import Config
    from titanlite.features.ema.average import WeightAverage


class WeightAveraging(Feature):
    """The average of the weights in a run that keeps one."""

    key = "optimizer.ema_decay"
    #: Bytes in memory and in a checkpoint for each parameter, which is in float32.
    bytes_each = 4

    def __init__(self, config: Config) -> None:
        self.decay = config.optimizer.ema_decay

    # The model: `titanlite.assembly.build` and `titanlite eval` call it

    def begin(self, model: nn.Module) -> WeightAverage:
        from titanlite.checkpoint.state_dict import gather
        from titanlite.features.ema.average import WeightAverage

        return WeightAverage(model, gather(model), self.decay)
