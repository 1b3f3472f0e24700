"""An exponential moving average of the weights (EMA): what titanlite knows of it, moment by moment.

    average.py   the averages of a model, a callback of the run

The key is `optimizer.ema_decay`. `validation.ema` and `checkpoint.export_ema` need it: those rules
hold where it is off, so `titanlite.config.checks` has them. average.py needs torch and is imported
where it is used.

What `begin` returns is handed on: `titanlite.assembly.callbacks` lets it follow the weights,
`titanlite.assembly.loaders` applies it while held-out texts are measured, and
`titanlite.checkpoint` saves and loads its tensors.
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
    #: Of memory and of a checkpoint, for each parameter, for `titanlite.plan`. They are in float32.
    bytes_each = 4

    def __init__(self, config: Config) -> None:
        self.decay = config.optimizer.ema_decay

    # The model: `titanlite.assembly.build` and `titanlite eval` call it

    def begin(self, model: nn.Module) -> WeightAverage:
        """Return averages that begin with the weights of a model, as a callback."""
        from titanlite.checkpoint.storage import gather
        from titanlite.features.ema.average import WeightAverage

        return WeightAverage(model, gather(model), self.decay)
