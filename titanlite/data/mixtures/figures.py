"""Share and loss of each source of a mixture, over all ranks.

A row is of one source, so the losses of rows are all that is needed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titanlite.callbacks import Callback, RunEnd
from titanlite.data.rows import IGNORE
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.data.rows import Rows
    from titanlite.loss import LossFunction
    from titanlite.step import ReplicationFactors
    from titanlite.trainer import Trainer


class RowLosses:
    """A loss function that also keeps the loss of each row of a training step, on the device.

    Rows go through it one by one, with the same bits of gradients. Calls come in row order, with
    whole rows or chunks. `loss` is summed over tokens; `seq_len` counts a row's tokens on this
    rank.
    """

    def __init__(self, loss: LossFunction, seq_len: int) -> None:
        self.loss, self.seq_len = loss, seq_len
        self.rows: list[Tensor] = []
        #: Tokens of the last row so far.
        self._tokens = seq_len

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # validation
            return self.loss(logits, labels)
        parts = []
        for row, targets in zip(logits.split(1), labels.split(1), strict=True):
            first = (
                self.seq_len - self._tokens or self.seq_len
            )  # tokens that the row under way still has
            borders = [0, *range(first, targets.size(1), self.seq_len), targets.size(1)]
            sizes = [end - begin for begin, end in pairwise(borders)]
            for x, y in zip(row.split(sizes, 1), targets.split(sizes, 1), strict=True):
                part = self.loss(x, y)
                parts.append(part)
                if self._tokens == self.seq_len:
                    self.rows.append(part.detach())
                    self._tokens = 0
                else:
                    self.rows[-1] = self.rows[-1] + part.detach()
                self._tokens += y.size(1)
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def clear(self) -> None:
        self.rows, self._tokens = [], self.seq_len

    def resize(self, accumulation: int, seq_len: int) -> None:
        self.seq_len = seq_len
        self.clear()


class SourceFigures(Callback):
    """Logs the shares of a mixture's sources so far, and their losses since the last log.

    It must run before the log. `share` is data-parallel rank and degree; `factors` count ranks that
    contribute the same to a sum.
    """

    def __init__(
        self,
        rows: Rows,
        loss: LossFunction,
        share: tuple[int, int],
        factors: ReplicationFactors,
    ) -> None:
        assert isinstance(loss, RowLosses), "the loss of a run with data.source keeps rows"
        self._mixture = rows
        self._numbers = {name: number for number, name in enumerate(rows.texts())}
        self._losses = loss
        self._share = share
        self._factors = factors
        #: This rank's rows since the last log: their sources, and their losses and targets
        #: [rows, 2].
        self._sources: list[int] = []
        self._sums: list[Tensor] = []

    def on_start(self, trainer: Trainer) -> None:
        self._losses.clear()

    def on_rollback(self, trainer: Trainer) -> None:
        self._losses.clear()
        self._sources, self._sums = [], []

    def on_step_end(self, trainer: Trainer, result: object) -> None:
        """Nothing waits for the device."""
        fetched = trainer.recent[trainer.step]
        rank, degree = self._share
        sequences = fetched.sequences
        total = self._mixture.total_sequences
        own = sequences[(rank - sequences[0]) % degree :: degree]
        tokens = torch.cat([(batch.labels != IGNORE).sum(1) for batch in fetched.batches]).double()
        # A phase of shorter sequences cuts each of them into pieces.
        pieces = len(tokens) // len(own)
        for index in own:
            # Padding has no targets: any source will do.
            source = 0
            if total is None or index < total:
                source = self._numbers[self._mixture.text_at(index)[0]]
            self._sources += [source] * pieces
        # In a pipeline, only the last stage has losses.
        losses = torch.zeros_like(tokens)
        if self._losses.rows:
            losses = torch.stack(self._losses.rows).double()
        self._sums.append(torch.stack([losses, tokens], dim=1))
        self._losses.clear()

    def sums(self) -> Tensor:
        """Return this rank's loss and targets by source since the last call: [2 * sources]
        float64.
        """
        rows = torch.cat(self._sums)
        sources = torch.tensor(self._sources, device=rows.device)
        found = rows.new_zeros(len(self._numbers), 2).index_add_(0, sources, rows)
        self._sources = []
        self._sums = []
        counted_times = found.new_tensor([self._factors.loss, self._factors.tokens])
        return (found / counted_times).flatten()

    def figures(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        """Return `share/NAME` of each source, and `loss/NAME` of each served, from sums over all
        ranks.
        """
        losses = zip(self._numbers, sums[::2], sums[1::2], strict=True)
        return {
            **self._shares(trainer),
            **{f"loss/{name}": loss / n for name, loss, n in losses if n},
        }

    def _shares(self, trainer: Trainer) -> dict[str, float]:
        served = self.state_dict(trainer)["served"]
        total = sum(served.values()) or 1
        return {f"share/{name}": count / total for name, count in served.items()}

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        state, served = trainer.parts.loader.state_dict(), self._mixture.served
        counts = served(state["next_sequence"])
        for first, end in state.get("left_out", ()):  # skipped, so no sequences of the run
            before, after = served(first), served(end)
            counts = {name: count - after[name] + before[name] for name, count in counts.items()}
        return {"served": counts}

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        shares = (
            f"{name.partition('/')[2]} {share:.1%}" for name, share in self._shares(trainer).items()
        )
        logger.info(f"sequences by source: {', '.join(shares)}")
