"""A keyed order of n things that is computed place by place: no memory, and no work to resume.

Integer arithmetic alone decides it: a generator of numpy's may change between versions, and a run resumed years later
must still find its place.
"""

from __future__ import annotations

from math import isqrt

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
#: Rounds of the Feistel network. Four are pseudo-random for large counts (Luby and Rackoff 1988); small ones take more.
_ROUNDS = 8


def mix_int(z: int) -> int:
    """Return the output function of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of an epoch's order, 64 bits."""
    return mix_int(mix_int(seed & MASK) ^ mix_int((epoch + 1) * GAMMA & MASK))


class Permutation:
    """A permutation of 0 … count - 1, by place.

    It is the generalized Feistel network of Black and Rogaway ("Ciphers with arbitrary finite domains", CT-RSA 2002):
    an index is a pair (left, right) of [0, a) x [0, b) with a * b >= count, and each round adds a hash of one half to
    the other, modulo a or b. A result at or above `count` goes through the network again (their cycle walking), which
    is rare: a * b exceeds `count` by less than a, about its square root.
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
