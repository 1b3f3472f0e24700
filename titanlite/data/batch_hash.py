"""Hashes of batches: the same for any number of ranks and any micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from titanlite.data import skip_ranges
from titanlite.data.loader import Batch, stack
from titanlite.data.rows import Rows
from titanlite.data.skip_ranges import Range

_HASH_BITS = 128


def batch_hash(batches: Iterable[Batch]) -> str:
    """Return the hex digest of the sequences in `batches`, in any order and any micro-batches.

    It is the sum of the rows' digests, so `add_hashes` joins those of all ranks.
    """
    total = 0
    for batch in batches:
        tensors = [batch.tokens, batch.labels] if batch.documents is None else batch
        rows = torch.stack([t.cpu() for t in tensors if t is not None], dim=1).numpy().astype("<i8")
        for row in rows:
            total += int.from_bytes(
                hashlib.blake2b(row.tobytes(), digest_size=_HASH_BITS // 8).digest(), "little"
            )
    return _hex(total)


def step_hash(
    dataset: Rows,
    first: int,
    size: int,
    rank: int = 0,
    dp_degree: int = 1,
    skip: Iterable[Range] = (),
) -> str | None:
    """Return a rank's share of the `batch_hash` of the next `size` sequences from `first`.

    It is None if the data end before. `add_hashes` joins shares.
    """
    total = dataset.total_sequences
    sequences = skip_ranges.take(first, size, skip_ranges.merged(skip))
    if total is not None and sequences[0] >= total:
        return None
    own = sequences[(rank - sequences[0]) % dp_degree :: dp_degree]
    return add_hashes(batch_hash([stack(dataset, [number])]) for number in own)


def add_hashes(hashes: Iterable[str]) -> str:
    """Return the `batch_hash` of several ranks' batches together."""
    return _hex(sum(int(value, 16) for value in hashes))


def _hex(value: int) -> str:
    return f"{value % (1 << _HASH_BITS):0{_HASH_BITS // 4}x}"
