"""Log-likelihoods of tokens: how requests become batches, and what a pass over a batch gives.

scorer = Scorer(subject, PlainRunner(model), batch_size=8)
scorer.likelihoods([(ids_before, ids)])     # [(-12.3, False)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.data.loader import Batch, to_device
from titanlite.data.rows import IGNORE
from titanlite.parallel.target_logs import TargetLogs, evaluating
from titanlite.step import Runner

if TYPE_CHECKING:
    from titanlite.data.tokenizer import Tokenizer

#: The ids before, at least one, and the ids whose likelihood is asked for.
Request = tuple[Sequence[int], Sequence[int]]
#: Log-likelihood of the ids in nats, and whether greedy decoding gives them.
Likelihood = tuple[float, bool]


@dataclass(frozen=True)
class Subject:
    """The model that is evaluated."""

    model: nn.Module
    tokenizer: Tokenizer
    #: The longest sequence in tokens.
    limit: int
    device: torch.device


class Row(NamedTuple):
    """One request as the model takes it: its last `asked` ids are targets."""

    #: Or an array of them.
    ids: Any
    asked: int


class Scorer:
    """Scores requests on one device.

    Requests of like length share a batch, the longest first, so that a lack of memory shows at
    once. Requests that are too long lose tokens on the left, as in the harness's `HFLM`.

    multiple: of the width of padded rows. divide: returns this rank's part of a batch. progress:
    takes the batches and may show how many are done.
    """

    def __init__(
        self,
        subject: Subject,
        runner: Runner,
        batch_size: int,
        multiple: int = 1,
        divide: Callable[[Batch], Batch] = lambda batch: batch,
        progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    ) -> None:
        self.subject = subject
        self.size = batch_size
        self._runner = runner
        self._multiple = multiple
        self._divide = divide
        self.progress = progress

    def likelihoods(self, requests: Sequence[Request]) -> list[Likelihood]:
        rows = []
        for before, ids in requests:
            kept = [*before, *ids][-self.subject.limit - 1 :]
            rows.append(Row(kept, min(len(ids), len(kept) - 1)))
        asked = [number for number, row in enumerate(rows) if row.asked]
        asked.sort(key=lambda number: -len(rows[number].ids))
        ordered = [rows[number] for number in asked]
        batches = [ordered[begin : begin + self.size] for begin in range(0, len(asked), self.size)]
        found: list[Likelihood] = [(0.0, True)] * len(rows)
        for number, (likely, misses) in zip(asked, self._scored(batches), strict=True):
            found[number] = (likely, misses == 0)
        return found

    def _scored(self, batches: Sequence[Sequence[Row]]) -> list[list[float]]:
        """Return each row's log-likelihood and the number of targets that greedy decoding
        misses.
        """
        with evaluating(self.subject.model):
            parts = [self._pass(batch) for batch in self.progress(batches)]
        return torch.cat(parts).tolist() if parts else []

    def _pass(self, rows: Sequence[Row]) -> Tensor:
        """Return [rows, 2] float64, this rank's part of the sums."""
        batch = self._divide(padded(rows, self._multiple))
        (batch,) = to_device([batch], self.subject.device)
        record = TargetLogs(self.subject.device)
        self._runner.loss_sum(batch, record)
        return record.sums(len(rows))


def padded(rows: Sequence[Row], multiple: int = 1) -> Batch:
    """Return rows as one batch on the CPU, its width a multiple of `multiple`; only targets
    count.
    """
    longest = max(len(row.ids) for row in rows) - 1
    width = -(-longest // multiple) * multiple
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    for place, row in enumerate(rows):
        ids = torch.as_tensor(row.ids, dtype=torch.int64)
        length = len(ids) - 1
        tokens[place, :length] = ids[:-1]
        labels[place, length - row.asked : length] = ids[len(ids) - row.asked :]
    return Batch(tokens, labels, None)
