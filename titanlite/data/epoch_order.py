"""The orders of documents and windows in an epoch, as a function of (seed, epoch).

Integer arithmetic alone decides them: a generator of numpy's may change between versions, and a run
resumed years later must still find its place.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
#: Rounds of the Feistel network. Four are pseudo-random for large counts (Luby and Rackoff 1988);
#: small ones take more.
_ROUNDS = 8


def mix(z: Any) -> Any:
    """Return SplitMix64's output (Steele, Lea and Flood 2014), a bijection of 64-bit integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of an epoch's order, 64 bits."""
    return mix(mix(seed & MASK) ^ mix((epoch + 1) * GAMMA & MASK))


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the indexes [count] in the order of `epoch`; in file order without `shuffle`.

    They are sorted by a hash of (seed, epoch, index), unique in an epoch, so the order does not
    depend on the sort.
    """
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    index = np.arange(count, dtype=np.uint64)
    return np.argsort(mix(index * GAMMA + epoch_key(seed, epoch)), kind="stable")


class Permutation:
    """A keyed order of 0 … count - 1 that is computed place by place.

    It is the generalized Feistel network of Black and Rogaway ("Ciphers with arbitrary finite
    domains", CT-RSA 2002). An index is a pair (left, right) of [0, a) x [0, b) with a * b >= count.
    Each round adds a hash of one half to the other, modulo a or b. A result at or above `count`
    goes through it again. That is rare: a * b exceeds `count` by about its square root.
    """

    def __init__(self, count: int, key: int) -> None:
        self.count = count
        self._a = isqrt(max(count - 1, 0)) + 1
        self._b = -(-count // self._a)
        self._keys = [mix((key + (round + 1) * GAMMA) & MASK) for round in range(_ROUNDS)]

    def __call__(self, place: int) -> int:
        a, b, found = self._a, self._b, place
        while True:
            right, left = divmod(found, a)
            for n, key in enumerate(self._keys):
                if n % 2:
                    right = (right + mix((key + left * GAMMA) & MASK)) % b
                else:
                    left = (left + mix((key + right * GAMMA) & MASK)) % a
            found = right * a + left
            if found < self.count:
                return found
