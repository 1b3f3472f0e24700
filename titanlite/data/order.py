"""The order in which an epoch visits documents: a permutation computed from (seed, epoch) alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Document indexes [count] in the order of `epoch`; file order without `shuffle`.

    Documents are sorted by a hash of (seed, epoch, index). The hash is SplitMix64 (Steele, Lea and Flood
    2014) in integer arithmetic rather than a generator of numpy's, whose `permutation` may change between
    versions: a run resumed years later must still find its place. SplitMix64 is a bijection, so no two
    documents of an epoch share a hash and the order does not depend on the sort.
    """
    index = np.arange(count, dtype=np.int64)
    if not shuffle:
        return index
    key = _mix_int(_mix_int(seed & _MASK) ^ _mix_int((epoch + 1) * _GAMMA & _MASK))
    with np.errstate(over="ignore"):
        hashes = _mix(np.uint64(key) + index.astype(np.uint64) * np.uint64(_GAMMA))
    return np.argsort(hashes, kind="stable")


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix_int(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
