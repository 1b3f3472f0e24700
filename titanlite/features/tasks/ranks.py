"""A scorer on the ranks of a run: rank 0 asks, and all ranks run the model.

Rank 0 alone reads tasks and makes requests of them. It sends them to the other ranks, which wait in
`follow`. So an error in a task is an error of one rank, and no other waits for it in vain.

Batches are divided over the ranks that read different data. All ranks make as many passes: one that
has no batch left runs a row of one token. Sums are float64, and each row is summed by one rank. So
they are the same to the last bit on any number of such ranks. Ranks that share sequences each sum
their own part.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titanlite.data.loader import Batch
from titanlite.dist.signals import StopSignal
from titanlite.features.tasks.scoring import Row, Scorer, Subject
from titanlite.parallel.target_logs import evaluating
from titanlite.step import Runner, do_nothing
from titanlite.utils import note_progress

#: Passes of each rank between two messages, after which ranks may stop.
_PASSES = 16
#: Seconds of work on rank 0 after which other ranks hear that it goes on.
_ALIVE_SECONDS = 10.0
#: Input of a rank without a batch: one token.
_IDLE = [Row([0, 0], 1)]


class InterruptedTasksError(BaseException):
    """A rank was asked to stop; all ranks raise it together.

    No `Exception`: a task must not take it for an error.
    """


@dataclass(frozen=True)
class Place:
    """Place of this rank among the others."""

    #: Its place among the ranks that run different batches, and their number.
    rank: int
    ranks: int
    #: Its sums count: other tensor-parallel ranks have the same.
    counts: bool
    leads: bool


class RankScorer(Scorer):
    """Scores requests on all ranks of a run. divide: returns this rank's part of a batch."""

    def __init__(
        self,
        subject: Subject,
        runner: Runner,
        sizes: tuple[int, int],
        place: Place,
        divide: Callable[[Batch], Batch],
    ) -> None:
        """sizes: rows of a batch, and what padded rows have a multiple of."""
        super().__init__(subject, runner, *sizes, divide)
        self.place = place
        #: Tells that the run is to stop.
        self.stop = StopSignal()
        #: Is called on all ranks when rank 0 has sent something.
        self.tick: Callable[[], object] = do_nothing
        self._sent = 0.0
        #: The model or a collective failed here: no error of a task.
        self.failed = False

    # Rank 0

    def _scored(self, batches: Sequence[Sequence[Row]]) -> list[list[float]]:
        found: list[list[float]] = []
        at_once = _PASSES * self.place.ranks
        for begin in range(0, len(batches), at_once):
            work = []
            for batch in batches[begin : begin + at_once]:
                # As arrays, which are small to send.
                rows = [Row(np.asarray(row.ids, dtype=np.int32), row.asked) for row in batch]
                work.append(rows)
            self._send("score", work)
            found += self._score(work)
        return found

    def waiting(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items; tell the other ranks from time to time, whose collective would time out."""
        for item in items:
            if time.monotonic() > self._sent + _ALIVE_SECONDS:
                self._send("wait", None)
            yield item

    def end(self) -> None:
        self._send("end", None)

    # The other ranks

    def follow(self) -> None:
        """Do what rank 0 asks for, until it ends."""
        while True:
            kind, work = self._send("", None)
            if kind == "score":
                self._score(work)
            elif kind == "end":
                return

    # All ranks together

    def _send(self, kind: str, work: Any) -> tuple[str, Any]:
        message = [(kind, work)]
        with self._noted():
            dist.broadcast_object_list(message, 0)
        self._sent = time.monotonic()
        self.tick()
        return message[0]

    def _score(self, batches: Sequence[Sequence[Row]]) -> list[list[float]]:
        counts = [len(batch) for batch in batches]
        device = self.subject.device
        sums = torch.zeros(sum(counts), 2, dtype=torch.float64, device=device)
        with self._noted(), evaluating(self.subject.model):
            for first in range(0, len(batches), self.place.ranks):
                number = first + self.place.rank
                if number >= len(batches):
                    self._pass(_IDLE)
                    continue
                found = self._pass(batches[number])
                note_progress("evaluate")
                if self.place.counts:
                    begin = sum(counts[:number])
                    sums[begin : begin + counts[number]] = found
            dist.all_reduce(sums)
        with self._noted():
            asked = self.stop.requested_anywhere()
        if asked:
            raise InterruptedTasksError
        return sums.tolist()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Note errors that are none of a task: other ranks may wait for this one."""
        try:
            yield
        except Exception:
            self.failed = True
            raise
