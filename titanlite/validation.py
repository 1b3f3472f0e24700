"""Validation: the loss on each of the held-out texts, and over all their tokens.

texts = ValidationSet({"wiki": ValidationPrefetcher(loader), "code": ValidationPrefetcher(other)})
result = texts.measure(model, device, runner)
result.loss, result.sources["wiki"].perplexity
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from titanlite.step import ReplicationFactors, Runner, loss_sums

if TYPE_CHECKING:
    from titanlite.data.loader import Batch
    from titanlite.data.prefetch import ValidationPrefetcher


class HeldOutLoss(NamedTuple):
    """The loss on held-out text, over all ranks."""

    #: In nats, summed over the tokens.
    total: float
    tokens: int

    @property
    def loss(self) -> float:
        """The mean over tokens, in nats; NaN without tokens."""
        return self.total / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.4g}, over {self.tokens:,} tokens"


@dataclass(frozen=True)
class ValidationResult:
    """The losses of one validation, the same on all ranks."""

    #: By the name of the text; a single text without a name has "".
    sources: dict[str, HeldOutLoss]

    @property
    def all(self) -> HeldOutLoss:
        """The loss over the tokens of all texts: a text counts by its tokens."""
        found = self.sources.values()
        return HeldOutLoss(sum(one.total for one in found), sum(one.tokens for one in found))


@dataclass(frozen=True)
class ValidationSet:
    """The held-out texts of a run.

    loaders: by name, in the order in which they are read. freq: steps between validations. first: also before step 1.
    """

    loaders: Mapping[str, ValidationPrefetcher]
    freq: int = 1
    first: bool = False

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield all batches, each with the number of its text; as many on every rank."""
        for number, batches in enumerate(self.loaders.values()):
            for batch in batches:
                yield number, batch

    def measure(
        self,
        model: nn.Module,
        device: torch.device,
        runner: Runner,
        factors: ReplicationFactors = ReplicationFactors(),  # noqa: B008 (immutable)
        through: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    ) -> ValidationResult:
        """Read all texts and return their losses. All ranks call it together; it waits for the device.

        through: takes the batches and may leave out the rest of them (`StopSignal.interruptible`).
        """
        sums = loss_sums(model, through(self), len(self.loaders), device, runner, factors).tolist()
        losses = (HeldOutLoss(total, int(tokens)) for total, tokens in sums)
        return ValidationResult(dict(zip(self.loaders, losses, strict=True)))

    def close(self) -> None:
        """End the threads of the loaders; what cannot be closed does not keep the rest open."""
        with contextlib.ExitStack() as stack:
            for loader in self.loaders.values():
                stack.callback(loader.close)
