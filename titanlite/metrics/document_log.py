"""The callback that writes which documents each step trains on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.callbacks import Callback
from titanlite.data.documents import documents_of
from titanlite.data.rows import Rows
from titanlite.runs.jsonl import MetricsLog

if TYPE_CHECKING:
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


class DocumentLog(Callback):
    """Writes the documents of each step's batch to a file of JSON lines. Needs no collective.

    path: None on a rank that writes none. source: name of text that is no mixture. share:
    data-parallel rank and degree of a rank that writes its part; None: all of the batch.
    """

    def __init__(
        self,
        path: Path | None,
        dataset: Rows,
        source: str,
        share: tuple[int, int] | None,
    ) -> None:
        self._log = None if path is None else MetricsLog(path)
        self._dataset = dataset
        self._source = source
        self._share = share or (0, 1)

    def on_start(self, trainer: Trainer) -> None:
        """Continue after the checkpoint's last step, or begin anew: rank 0 for all."""
        if self._log is not None:
            folder = self._log.path.parent
            folder.mkdir(parents=True, exist_ok=True)
            others = folder.glob("documents-rank_*.jsonl") if trainer.parts.world.rank == 0 else ()
            for path in (self._log.path, *others):
                MetricsLog(path).truncate_after(trainer.step)

    def on_rollback(self, trainer: Trainer) -> None:
        self.on_start(trainer)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._log is None:
            return
        sequences = trainer.recent[trainer.step].sequences
        rank, degree = self._share
        total = self._dataset.total_sequences
        found = {}
        for index in sequences[(rank - sequences[0]) % degree :: degree]:
            if total is None or index < total:
                documents = documents_of(self._dataset, index, self._source)
                found[str(index)] = [document._asdict() for document in documents]
        self._log.write({"step": trainer.step, "sequences": found})
