"""The error of float8 in the loss: the same micro-batch and weights, in float8 and in high
precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from titanlite.callbacks import Callback
from titanlite.features.float8.exact import high_precision, uncompiled
from titanlite.step import ReplicationFactors, Runner
from titanlite.utils import logger
from titanlite.validation import validate

if TYPE_CHECKING:
    from titanlite.data.loader import Batch
    from titanlite.trainer import Trainer


class Float8Error(NamedTuple):
    """Mean losses in nats per token over all ranks."""

    float8: float
    exact: float

    @property
    def difference(self) -> float:
        return self.float8 - self.exact

    @property
    def relative(self) -> float:
        return self.difference / self.exact if self.exact else 0.0


def measure_float8_error(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    dtype: torch.dtype,
    runner: Runner,
    factors: ReplicationFactors = ReplicationFactors(),  # noqa: B008 (immutable)
) -> Float8Error:
    """Run two forward passes over these batches without gradients, uncompiled; all ranks call it
    together.

    dtype: of the products in high precision. The other arguments are those of `validate`.
    """
    batches = list(batches)
    with uncompiled():
        low, _ = validate(model, batches, device, runner, factors)
    with high_precision(model, dtype):
        high, _ = validate(model, batches, device, runner, factors)
    return Float8Error(*torch.stack([low, high]).tolist())


class Float8ErrorCheck(Callback):
    """Measures the error every `every` steps, on this rank's first micro-batch and the weights
    before the update.

    write: takes a step and a row for metrics.jsonl.
    """

    def __init__(
        self, every: int, dtype: torch.dtype, write: Callable[[int, Mapping[str, float]], None]
    ) -> None:
        self._every = every
        self._dtype = dtype
        self._write = write

    def before_update(self, trainer: Trainer) -> None:
        step, parts = trainer.step, trainer.parts
        if step % self._every:
            return
        if parts.world.device.type == "cuda":
            # The step's own work must not count as a part of this pause.
            torch.cuda.synchronize()
        trainer.phase("validate")
        error = measure_float8_error(
            parts.model,
            trainer.recent[step].batches[:1],
            parts.world.device,
            self._dtype,
            parts.train_step.runner,
            parts.train_step.factors,
        )
        trainer.phase("optimizer")
        logger.info(
            f"float8 drift at {step}: loss {error.float8:.5f}, in high precision "
            f"{error.exact:.5f}: {error.difference:+.1e} ({error.relative:+.2%})"
        )
        row = {
            "float8_loss": error.float8,
            "float8_exact_loss": error.exact,
            "float8_drift": error.difference,
            "float8_drift_relative": error.relative,
        }
        self._write(step, row)
