"""What an error offers instead: names that exist, numbers that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable

from titanlite.config.errors import nearest
from titanlite.utils import counted


def choices(word: str, known: Iterable[str]) -> str:
    """The names there are, those nearest to `word` first."""
    names = list(known)
    close = nearest(word, names, 3)
    lead = f"nearest: {', '.join(close)}; " if close else ""
    return f"{lead}there are {', '.join(names)}"


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    return [n for n in range(1, number + 1) if number % n == 0]


def batch_advice(wanted: int, micro: int, ranks: int) -> str:
    """What would make the batch divisible, changing one number at a time."""
    at_once = micro * ranks
    below_it, above_it = wanted // at_once * at_once, math.ceil(wanted / at_once) * at_once
    options = [f"global_batch_size = {' or '.join(str(n) for n in (below_it, above_it) if n)}"]
    if wanted % ranks == 0:
        options.append(f"batch_size = {some(divisors(wanted // ranks))} on {counted(ranks, 'ranks')}")
    if wanted % micro == 0:
        options.append(f"{some(divisors(wanted // micro))} data-parallel ranks with batch_size {micro}")
    return "these work: " + "; ".join(options)


def some(numbers: list[int]) -> str:
    """The largest eight of a rising list, as `1, 2 or 4`."""
    shown = [str(n) for n in numbers[-8:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
