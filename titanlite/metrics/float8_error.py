"""The error that float8 adds to the loss: one micro-batch, with the same weights, in float8 and in high precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from titanlite.config.sections.model import Float8
from titanlite.loss import cross_entropy_sum
from titanlite.parallel.float8 import high_precision, uncompiled
from titanlite.step import Duplicates, validate

if TYPE_CHECKING:
    from titanlite.build import Parts
    from titanlite.data.loader import Batch
    from titanlite.parallel.compile import LossFunction
    from titanlite.parallel.pipeline import Pipeline


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
    loss_function: LossFunction = cross_entropy_sum,
    duplicates: Duplicates = Duplicates(),  # noqa: B008 (immutable)
    pipeline: Pipeline | None = None,
) -> Float8Error:
    """Run two forward passes over these batches, without gradients and uncompiled. All ranks call it together.

    dtype: of the matrix products in high precision. The other arguments are those of `validate`.
    """
    batches = list(batches)
    with uncompiled():
        low, _ = validate(model, batches, device, loss_function, duplicates, pipeline)
    with high_precision(model, dtype):
        high, _ = validate(model, batches, device, loss_function, duplicates, pipeline)
    return Float8Error(*torch.stack([low, high]).tolist())


class Float8ErrorCheck:
    """Calls `measure_float8_error` for a run, every `config.drift_check` steps; never without float8."""

    def __init__(
        self, config: Float8, dtype: torch.dtype, parts: Parts, device: torch.device, duplicates: Duplicates
    ) -> None:
        self._every = config.drift_check if config.enable_float8_linear else 0
        self._dtype = dtype
        self._parts, self._device, self._duplicates = parts, device, duplicates

    def due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def measure(self, batches: Iterable[Batch]) -> Float8Error:
        """Measure on these batches of this rank. All ranks call it together."""
        parts = self._parts
        return measure_float8_error(
            parts.model, batches, self._device, self._dtype, parts.loss, self._duplicates, parts.pipeline
        )
