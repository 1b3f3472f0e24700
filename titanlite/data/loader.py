"""Batches for one data-parallel rank, cut from the global order of sequences.

A training step takes sequences n … n + G - 1, G the global batch; rank r of D serves those with
i ≡ r (mod D). Which sequences a step sees therefore depends on n alone, and n is all there is to save. Stretches that
are left out are passed over: a step takes the next G sequences that are in none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from titanlite.config.plans import BatchPlan
from titanlite.data import left_out as stretches
from titanlite.data.errors import DataError, EndOfData
from titanlite.data.packing import PackedDataset
from titanlite.utils import counted

_HASH_BITS = 128


class Batch(NamedTuple):
    """`tokens`: [batch, seq] int64; `labels`: [batch, seq] int64, shifted by one, -100 where there is no target."""

    tokens: torch.Tensor
    labels: torch.Tensor


def to_device(batches: Iterable[Batch], device: torch.device) -> list[Batch]:
    """Copy the batches to `device`; without waiting for it if they are in page-locked memory (see `Prefetcher`)."""
    return [Batch(b.tokens.to(device, non_blocking=True), b.labels.to(device, non_blocking=True)) for b in batches]


class TrainLoader:
    """The micro-batches of one rank, step by step.

    Args:
        dataset: sequences by global index.
        batch: micro-batch size, accumulation and global batch size.
        rank: this process among the ranks that read different data, 0 … dp_degree - 1.
        dp_degree: number of those ranks; it must divide the global batch.
        left_out: stretches of sequences that are not served, see `titanlite.data.left_out`.

    Raises:
        DataError: the sizes do not fit each other; the message names rank counts that do.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        batch: BatchPlan,
        rank: int = 0,
        dp_degree: int = 1,
        left_out: Iterable[stretches.Stretch] = (),
    ) -> None:
        _check_rank(rank, dp_degree)
        if batch.global_batch_size % dp_degree:
            fitting = ", ".join(
                str(d) for d in range(1, batch.global_batch_size + 1) if batch.global_batch_size % d == 0
            )
            raise DataError(
                f"training.global_batch_size: {batch.global_batch_size} sequences cannot be shared evenly by "
                f"{dp_degree} data-parallel ranks; rank counts that divide it: {fitting}"
            )
        if batch.micro_batch_size * batch.accumulation * dp_degree != batch.global_batch_size:
            raise DataError(
                f"training.global_batch_size: {batch.global_batch_size} is not micro-batch {batch.micro_batch_size} x "
                f"accumulation {batch.accumulation} x {dp_degree} data-parallel ranks"
            )
        if batch.seq_len != dataset.seq_len:
            raise DataError(f"training.seq_len: the batch expects {batch.seq_len}, the data set has {dataset.seq_len}")
        self.dataset = dataset
        self.batch = batch
        self.rank = rank
        self.dp_degree = dp_degree
        self.left_out = stretches.merged(left_out)
        self._position = 0
        #: The position that was loaded, and what was left out before it.
        self._loaded = 0
        self._left_out_before: tuple[stretches.Stretch, ...] = ()

    @property
    def position(self) -> int:
        """Global index of the sequence after the last one served; the next step begins there or behind a stretch."""
        return self._position

    @property
    def steps_left(self) -> int | None:
        """Steps until EndOfData, the last one perhaps padded; None without an end."""
        total = self.dataset.total_sequences
        if total is None:
            return None
        left = total - self._position - stretches.count(self._position, total, self.left_out)
        return max(0, -(-left // self.batch.global_batch_size))

    def next_step(self) -> list[Batch]:
        """`accumulation` micro-batches of [micro_batch_size, seq_len] each, on the CPU.

        Finite data fill up their last step with sequences without targets, alike on every number of ranks,
        and raise EndOfData after it, on all ranks at the same step.
        """
        if self.steps_left == 0:
            epochs = counted(self.dataset.epochs or 0, "epochs")
            raise EndOfData(f"the data end: {epochs} of {self.dataset.tokens_per_epoch:,} tokens are served")
        size = self.batch.micro_batch_size
        step = stretches.take(self._position, self.batch.global_batch_size, self.left_out)
        indexes = step[(self.rank - step[0]) % self.dp_degree :: self.dp_degree]
        batches = [_stack(self.dataset, indexes[m : m + size]) for m in range(0, len(indexes), size)]
        self._position = step[-1] + 1
        return batches

    def state_dict(self) -> dict[str, Any]:
        """All there is to resume from, the same on every rank: sequences below `next_sequence` have been served.

        `left_out`, where there is any: the stretches among them that have not.
        """
        ours = stretches.without(stretches.before(self._position, self.left_out), [(0, self._loaded)])
        passed = stretches.merged([*self._left_out_before, *ours])
        left_out = {"left_out": [list(stretch) for stretch in passed]} if passed else {}
        return {"next_sequence": self._position, **left_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, also one saved by another number of ranks. Raises DataError if it is not one.

        Stretches that this loader is to leave out and that lie before the position have no effect: see `late`.
        """
        position = state.get("next_sequence")
        if not isinstance(position, int) or position < 0:
            raise DataError(f"the data position in the checkpoint is not valid: next_sequence = {position!r}")
        self._position = self._loaded = position
        self._left_out_before = stretches.merged(state.get("left_out", ()))


def late(left_out: Iterable[stretches.Stretch], state: dict[str, Any]) -> tuple[stretches.Stretch, ...]:
    """What of these stretches was served already before a loader's `state`."""
    asked = stretches.before(state["next_sequence"], stretches.merged(left_out))
    return stretches.without(asked, stretches.merged(state.get("left_out", ())))


class ValidationLoader:
    """The same held-out batches every time it is iterated, as many on every rank.

    Batch j of rank r holds sequences j * batch_size * dp_degree + k * dp_degree + r, k = 0 … batch_size - 1;
    what lies beyond the end of the data has labels -100. With `steps=-1` that is one full pass whatever the
    number of ranks; with `steps > 0` it is the first steps * batch_size * dp_degree sequences, so numbers
    from different rank counts compare only if that product is the same. `steps` beyond a full pass end with it.
    """

    def __init__(
        self, dataset: PackedDataset, batch_size: int, steps: int = -1, rank: int = 0, dp_degree: int = 1
    ) -> None:
        _check_rank(rank, dp_degree)
        if dataset.total_sequences is None:
            raise DataError("validation needs finite data: build them with epochs=1")
        if batch_size < 1:
            raise DataError(f"validation.batch_size: {batch_size} must be at least 1")
        if steps != -1 and steps < 1:
            raise DataError(f"validation.steps: {steps} must be at least 1, or -1 for one full pass")
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.dp_degree = dp_degree
        full_pass = -(-dataset.total_sequences // (batch_size * dp_degree))
        self._batches = full_pass if steps == -1 else min(steps, full_pass)

    def __len__(self) -> int:
        """Batches per pass, the same on all ranks."""
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        stride = self.batch_size * self.dp_degree
        for start in range(0, self._batches * stride, stride):
            yield _stack(self.dataset, range(start + self.rank, start + stride, self.dp_degree))


def batch_hash(batches: Iterable[Batch]) -> str:
    """Hex digest of the sequences in `batches`, whatever their order or split into micro-batches.

    It is the sum of the rows' digests, so the digests of all ranks put together by `add_hashes` give that of
    the global batch, on any number of ranks.
    """
    total = 0
    for batch in batches:
        rows = torch.stack([batch.tokens.cpu(), batch.labels.cpu()], dim=1).numpy().astype("<i8")
        for row in rows:
            total += int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=_HASH_BITS // 8).digest(), "little")
    return _hex(total)


def step_hash(
    dataset: PackedDataset,
    first: int,
    size: int,
    part: int = 0,
    parts: int = 1,
    left_out: Iterable[stretches.Stretch] = (),
) -> str | None:
    """`batch_hash` of the step that takes the next `size` sequences from `first` on, or of one of `parts` shares of it.

    None where the data end before that step. Shares are put together by `add_hashes`.
    """
    total = dataset.total_sequences
    sequences = stretches.take(first, size, stretches.merged(left_out))
    if total is not None and sequences[0] >= total:
        return None
    return add_hashes(batch_hash([_stack(dataset, [i])]) for i in sequences[part::parts])


def add_hashes(hashes: Iterable[str]) -> str:
    """The `batch_hash` of several ranks' batches together."""
    return _hex(sum(int(value, 16) for value in hashes))


def _hex(value: int) -> str:
    return f"{value % (1 << _HASH_BITS):0{_HASH_BITS // 4}x}"


def _stack(dataset: PackedDataset, indexes: Iterable[int]) -> Batch:
    total = dataset.total_sequences
    rows = [dataset.sequence(i) if total is None or i < total else dataset.padding() for i in indexes]
    tokens, labels = (np.stack(column) for column in zip(*rows, strict=True))
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))


def _check_rank(rank: int, dp_degree: int) -> None:
    if not 0 <= rank < dp_degree:
        raise DataError(f"data-parallel rank {rank} is not one of {dp_degree}; ranks run from 0 to {dp_degree - 1}")
