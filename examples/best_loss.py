"""A callback of your own: keeps the lowest logged loss, also over a resume, and stops the run when
it is low enough.

[job]
callbacks = ["./best_loss.py:BestLoss"]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from titanlite import Callback, Trainer

TARGET = 0.5  # nats per token


class BestLoss(Callback):
    best = math.inf

    def on_start(self, trainer: Trainer) -> None:
        if trainer.loaded is not None:
            self.best = trainer.loaded.train.get("best_loss", math.inf)

    def on_log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        self.best = min(self.best, figures["loss"])
        if self.best < TARGET:
            trainer.stop.request(f"the loss is below {TARGET}")

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return {"best_loss": self.best}
