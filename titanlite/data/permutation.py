"""A keyed order of n things that is computed place by place: no memory, and no work to resume.

Integer arithmetic alone decides it. A generator of numpy's may change between versions, and a run
resumed years later must still find its place.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
#: Rounds of the Feistel network. Four are pseudo-random for large counts (Luby and Rackoff 1988);
#: small ones take more.
_ROUNDS = 8


def mix_int(z: int) -> int:
    """Return the output function of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit
    integers.
    """
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of an epoch's order, 64 bits."""
    return mix_int(mix_int(seed & MASK) ^ mix_int((epoch + 1) * GAMMA & MASK))


class Permutation:
    """A permutation of 0 … count - 1, by place.

    It is the generalized Feistel network of Black and Rogaway ("Ciphers with arbitrary finite
    domains", CT-RSA 2002). An index is a pair (left, right) of [0, a) x [0, b) with a * b >= count.
    Each round adds a hash of one half to the other, modulo a or b. A result at or above `count`
    goes through the network again (their cycle walking). That is rare: a * b exceeds `count` by
    less than a, about its square root.
    """

    def __init__(self, count: int, key: int) -> None:
        self.count = count
        self._a = isqrt(max(count - 1, 0)) + 1
        self._b = -(-count // self._a)
        self._keys = [mix_int((key + (round + 1) * GAMMA) & MASK) for round in range(_ROUNDS)]

    def __call__(self, place: int) -> int:
        """Return the element at `place`, 0 … count - 1."""
        a, b, found = self._a, self._b, place
        while True:
            right, left = divmod(found, a)
            for n, key in enumerate(self._keys):
                if n % 2:
                    right = (right + mix_int((key + left * GAMMA) & MASK)) % b
                else:
                    left = (left + mix_int((key + right * GAMMA) & MASK)) % a
            found = right * a + left
            if found < self.count:
                return found


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the indexes [count] in the order of `epoch`; in file order without `shuffle`.

    Indexes are sorted by a hash of (seed, epoch, index). The hash is SplitMix64 (Steele, Lea and
    Flood 2014) in integer arithmetic. A generator of numpy's may change between versions, and a run
    resumed years later must still find its place. SplitMix64 is a bijection, so no two indexes of
    an epoch share a hash. The order does not depend on the sort.
    """
    index = np.arange(count, dtype=np.int64)
    if not shuffle:
        return index
    key = epoch_key(seed, epoch)
    with np.errstate(over="ignore"):
        hashes = _mix(np.uint64(key) + index.astype(np.uint64) * np.uint64(GAMMA))
    return np.argsort(hashes, kind="stable")


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
