"""Batches for one data-parallel rank, cut from the global order of sequences.

A training step takes sequences n … n + G - 1, G the global batch; rank r of D serves those with
i ≡ r (mod D). So the sequences of a step depend on n alone, and n is the whole state. Skipped
ranges are passed over: a step takes the next G sequences that are in none. Where phases change G,
the course tells it by n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from titanlite.data import DataError, EndOfData, skip_ranges
from titanlite.data.rows import Row, Rows, max_documents
from titanlite.data.skip_ranges import Range
from titanlite.data.state_checks import check_loader
from titanlite.data.step_sizes import Course, StepSize
from titanlite.dist.dist_env import gather_objects
from titanlite.utils import counted


class Batch(NamedTuple):
    """`tokens`: [batch, seq] int64; `labels`: [batch, seq] int64, shifted by one, -100 where there
    is no target.

    `documents`: [batch, whole sequence] int32, the number of each token's document in its row. It
    covers the whole sequence also where ranks share one. None: attention does not stop at
    documents.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a batch of what `function` makes of each tensor."""
        documents = None if self.documents is None else function(self.documents)
        return Batch(function(self.tokens), function(self.labels), documents)


class Fetched(NamedTuple):
    """The data of one step."""

    #: This rank's micro-batches, on its device.
    batches: list[Batch]
    #: The loader's state before and after they were fetched.
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def sequences(self) -> list[int]:
        first, end = self.before["next_sequence"], self.after["next_sequence"]
        left_out = skip_ranges.merged(self.after.get("left_out", ()))
        return skip_ranges.take(
            first, end - first - skip_ranges.count(first, end, left_out), left_out
        )


def to_device(batches: Iterable[Batch], device: torch.device) -> list[Batch]:
    """Copy the batches to `device`; without waiting for it if they are in page-locked memory (see
    `Prefetcher`).

    Raises DataError on GPUs if a row has more documents than their attention keeps apart.
    """
    found = list(batches)
    if device.type == "cuda":
        for batch in found:
            _check_documents(batch)
    return [batch.map(lambda t: t.to(device, non_blocking=True)) for batch in found]


def _check_documents(batch: Batch) -> None:
    if batch.documents is None or batch.documents.device.type != "cpu":
        return
    count = int(batch.documents.max()) + 1
    most = max_documents(batch.documents.size(1))
    if count > most:
        raise DataError(
            f"data.mask_documents: a sequence of {batch.documents.size(1)} tokens holds {count} "
            "documents, and on GPUs "
            f'attention keeps {most} apart at most. Set data.packing = "best-fit", which packs no '
            "more than that"
        )


class TrainLoader:
    """The micro-batches of one rank, step by step.

    Args:
        global_batch_size: sequences per step over all ranks.
        micro_batch_size: sequences per micro-batch and rank.
        rank: this process among the dp_degree ranks that read different data.
        dp_degree: times micro_batch_size it must divide the global batch.
        skip: ranges of sequences that are not served, see `titanlite.data.skip_ranges`.
    """

    def __init__(
        self,
        dataset: Rows,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        dp_degree: int = 1,
        skip: Iterable[Range] = (),
    ) -> None:
        check_rank(rank, dp_degree)
        self.dataset = dataset
        self.rank = rank
        self.dp_degree = dp_degree
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        steady = StepSize(global_batch_size, dataset.seq_len, global_batch_size)
        self.follow(Course.steady(steady))
        self.skip = skip_ranges.merged(skip)
        #: Global index of the sequence after the last one served; the next step begins there or
        #: after a range.
        self.position = 0
        #: The position that was loaded, and the ranges that were skipped before it.
        self._loaded = 0
        self._skipped_before: tuple[Range, ...] = ()

    def follow(self, course: Course) -> None:
        """Take steps of these sizes from now on. Without it all have the global batch."""
        at_once = self.micro_batch_size * self.dp_degree
        for _, size in course.legs:
            if size.sequences % at_once:
                raise DataError(
                    f"training.global_batch_size: {size.sequences} is not a multiple of "
                    f"micro-batch {self.micro_batch_size} x {self.dp_degree} data-parallel ranks"
                )
            if size.tokens % (self.dataset.seq_len * self.dp_degree):
                raise DataError(
                    f"data.phase: a step of {size.tokens} tokens is not a multiple of "
                    f"{self.dataset.seq_len} tokens x {self.dp_degree} data-parallel ranks"
                )
        self.course = course

    @property
    def steps_left(self) -> int | None:
        """Steps until EndOfData, the last one perhaps padded; None without an end."""
        total = self.dataset.total_sequences
        if total is None:
            return None
        steps = 0
        begin = self.position
        for leg in self.course.legs:
            border = leg.done.position
            if not begin < border < total:
                continue
            # Steps begin at the border, so these are whole steps.
            steps += self._rows_between(begin, border) // self.course.size_at(begin).rows
            begin = border
        left = self._rows_between(begin, total)
        return steps + max(0, -(-left // self.course.size_at(begin).rows))

    def _rows_between(self, first: int, end: int) -> int:
        return end - first - skip_ranges.count(first, end, self.skip)

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of [micro_batch_size, seq_len] each, on the CPU.

        In a phase of shorter sequences they are pieces of its rows, in order. Padding fills up the
        last step of finite data. After it all ranks raise EndOfData.
        """
        if self.steps_left == 0:
            raise EndOfData(
                f"the data end: {counted(self.dataset.total_sequences or 0, 'sequences')} are "
                "served"
            )
        here = self.course.size_at(self.position)
        step = skip_ranges.take(self.position, here.rows, self.skip)
        indexes = step[(self.rank - step[0]) % self.dp_degree :: self.dp_degree]
        pieces = self.dataset.seq_len // here.seq_len
        size = self.micro_batch_size
        if pieces > 1:
            cut = in_pieces(stack(self.dataset, indexes), pieces)
            parts = [slice(first, first + size) for first in range(0, len(cut.tokens), size)]
            batches = [cut.map(itemgetter(part)) for part in parts]
        else:
            firsts = range(0, len(indexes), size)
            batches = [stack(self.dataset, indexes[first : first + size]) for first in firsts]
        self.position = step[-1] + 1
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: sequences below `next_sequence` were served.

        `left_out` has the skipped ranges below it. `rows` is this rank's part, see `gather_state`;
        the rest is the same on every rank.
        """
        past = skip_ranges.before(self.position, self.skip)
        ours = skip_ranges.without(past, [(0, self._loaded)])
        skipped = skip_ranges.merged([*self._skipped_before, *ours])
        rows = self.dataset.state_dict()
        state: dict[str, Any] = {"next_sequence": self.position}
        if skipped:
            state["left_out"] = [list(one) for one in skipped]
        if rows:
            state["rows"] = rows
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, also of another number of ranks.

        Ranges before the position have no effect: see `skip_ranges.served_already`. `phases` in the
        state changes shares from here on, `course` the sizes of steps. Raises StateError if it is
        not a loader's state.
        """
        check_loader(state)
        position = state["next_sequence"]
        self.dataset.load_state_dict(state.get("rows", {}), position, state.get("phases"))
        self.position = self._loaded = position
        self.follow(state.get("course", self.course))
        self._skipped_before = skip_ranges.merged(state.get("left_out", ()))


def gather_state(state: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """Return a loader's state with what all ranks know. All ranks call it together."""
    if "rows" not in state:
        return state
    return {**state, "rows": rows.merge_states(gather_objects(state["rows"]))}


def stack(dataset: Rows, indexes: Iterable[int]) -> Batch:
    """Return the batch of these sequences; those past the end are padding."""
    total = dataset.total_sequences
    rows: list[Row] = []
    for index in indexes:
        is_past = total is not None and index >= total
        rows.append(dataset.padding() if is_past else dataset.sequence(index))
    documents = [row.documents for row in rows if row.documents is not None]
    return Batch(
        torch.from_numpy(np.stack([row.tokens for row in rows])),
        torch.from_numpy(np.stack([row.labels for row in rows])),
        torch.from_numpy(np.stack(documents)) if documents else None,
    )


def in_pieces(rows: Batch, pieces: int) -> Batch:
    """Return rows, each cut into this many shorter sequences, in order."""
    cut = rows.map(lambda tensor: tensor.reshape(tensor.size(0) * pieces, -1))
    if cut.documents is None:
        return cut
    # They are numbered within each sequence.
    return cut._replace(documents=cut.documents - cut.documents[:, :1])


def check_rank(rank: int, dp_degree: int) -> None:
    """Raise DataError for a rank that is none of `dp_degree`."""
    if not 0 <= rank < dp_degree:
        raise DataError(
            f"data-parallel rank {rank} is not one of {dp_degree}; ranks run from 0 to "
            f"{dp_degree - 1}"
        )
