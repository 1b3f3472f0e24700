"""Validation: the loss on each of the held-out texts, and over all their tokens.

texts = ValidationSet({"wiki": loader, "code": other})
result = texts.measure(model, device, runner)
result.loss, result.sources["wiki"].perplexity
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titanlite.data.loader import Batch, to_device
from titanlite.loss import count_valid
from titanlite.parallel.fsdp import free_gathered
from titanlite.step import ReplicationFactors, Runner
from titanlite.utils import counted, logger, note_progress, progress_text

if TYPE_CHECKING:
    from titanlite.data.validation_loader import PassLoader


def validate(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    runner: Runner,
    factors: ReplicationFactors = ReplicationFactors(),  # noqa: B008 (immutable)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss in nats per token over all ranks' `batches`, and the number of tokens
    (0-dim float64).

    Every rank must bring the same number of batches; every token has the same weight. runner: of
    `model`.
    """
    loss, tokens = _loss_sums(model, ((0, batch) for batch in batches), 1, device, runner, factors)[
        0
    ]
    return loss / tokens, tokens


@torch.no_grad()
def _loss_sums(
    model: nn.Module,
    batches: Iterable[tuple[int, Batch]],
    texts: int,
    device: torch.device,
    runner: Runner,
    factors: ReplicationFactors,
) -> torch.Tensor:
    """Return the summed loss in nats and the number of tokens of each text, over all ranks: [texts,
    2] float64.

    batches: each with the number of its text, from 0; as many on every rank. Issues one collective
    besides FSDP's.
    """
    sums = torch.zeros(texts, 2, dtype=torch.float64, device=device)
    model.eval()
    for text, on_cpu in batches:
        (batch,) = to_device([on_cpu], device)
        sums[text, 0] += runner.loss_sum(batch)
        sums[text, 1] += count_valid(batch.labels)
    free_gathered(model)
    model.train()
    dist.all_reduce(sums)
    return sums / sums.new_tensor([factors.loss, factors.tokens])


#: Seconds of a validation after which it says how long it takes, and between two further lines.
_FIRST_SECONDS, _REPORT_SECONDS = 2.0, 10.0


def _reported(batches: ValidationSet) -> Iterator[tuple[int, Batch]]:
    """Yield the batches; log how long they will take when some are done, and then how many are."""
    total, began = len(batches), time.monotonic()
    due = began + _FIRST_SECONDS
    for done, batch in enumerate(batches):
        if done and (now := time.monotonic()) >= due:
            due = now + _REPORT_SECONDS
            logger.info(
                f"validating: {done:,} of {counted(total, 'batches')}, "
                f"{progress_text(done, total, now - began)}"
            )
        note_progress("validate")
        yield batch


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
        return math.exp(self.loss) if not self.loss > 709 else math.inf  # where a float64 ends

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}, perplexity {self.perplexity:.4g}, over {self.tokens:,} tokens"
        )


@dataclass(frozen=True)
class ValidationResult:
    """The losses of one validation, the same on all ranks."""

    #: Results by the name of the text; a single text without a name has "".
    sources: dict[str, HeldOutLoss]

    @property
    def all(self) -> HeldOutLoss:
        """The loss over the tokens of all texts: a text counts by its tokens."""
        losses = self.sources.values()
        return HeldOutLoss(sum(one.total for one in losses), sum(one.tokens for one in losses))


@dataclass(frozen=True)
class ValidationSet:
    """The held-out texts of a run.

    loaders: by name, in the order in which they are read. freq: steps between validations. first:
    also before step 1.
    """

    loaders: Mapping[str, PassLoader]
    freq: int = 1
    first: bool = False
    #: Entered while the model is run, as `WeightAverage.applied`.
    weights: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield all batches, each with the number of its text; as many on every rank."""
        for number, batches in enumerate(self.loaders.values()):
            for batch in batches:
                yield number, batch

    def __len__(self) -> int:
        """Batches of all texts, the same on all ranks."""
        return sum(map(len, self.loaders.values()))

    def measure(
        self,
        model: nn.Module,
        device: torch.device,
        runner: Runner,
        factors: ReplicationFactors = ReplicationFactors(),  # noqa: B008 (immutable)
        through: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    ) -> ValidationResult:
        """Read all texts and return their losses.

        All ranks call it together; it waits for the device.

        through: takes the batches and may leave out the rest of them (`StopSignal.interruptible`).
        """
        with self.weights():
            batches = through(_reported(self))
            sums = _loss_sums(model, batches, len(self.loaders), device, runner, factors).tolist()
        sources = {}
        for name, (total, tokens) in zip(self.loaders, sums, strict=True):
            sources[name] = HeldOutLoss(total, int(tokens))
        return ValidationResult(sources)
