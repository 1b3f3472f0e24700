"""Building blocks of config checks: tables of rules between two keys, and numbers for hints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.config.errors import Problem
from titanlite.config.toml import quote

if TYPE_CHECKING:
    from titanlite.config.loaded import LoadedConfig


class Rule(NamedTuple):
    """What one value of a key says about another key.

    A function in place of a value matches the values for which it is true. `bool` matches all but
    none, 0, false and what is empty.
    """

    key: str
    value: Any
    other: str
    #: The value that the other key needs then, or the one that it must not have.
    wanted: Any
    #: The reason, or what to do.
    why: str = ""


def broken_rules(
    config: LoadedConfig, needs: Iterable[Rule] = (), excludes: Iterable[Rule] = ()
) -> Iterator[Problem]:
    """Return the rules that a config breaks.

    needs: a value of a key needs one of another. excludes: it excludes one.
    """
    for rule in needs:
        value = config.value(rule.key)
        if matches(value, rule.value) and not matches(config.value(rule.other), rule.wanted):
            shown = "" if callable(rule.wanted) else _equals(rule.wanted)
            message = f"is {quote(value)} and needs {rule.other}{shown}"
            yield Problem("needs", rule.key, message, rule.why)
    for rule in excludes:
        value = config.value(rule.key)
        there = config.value(rule.other)
        if matches(value, rule.value) and matches(there, rule.wanted):
            message = f"is {quote(value)}, which excludes {rule.other}{_equals(there)}"
            yield Problem("conflict", rule.key, message, rule.why)


def is_set(value: Any) -> bool:
    """Match every value but None."""
    return value is not None


def contains(item: str) -> Callable[[list[str]], bool]:
    """Return a function that matches lists with an item."""
    return lambda items: item in items


def several(degree: int) -> bool:
    """Match degrees above 1."""
    return degree > 1


def matches(value: Any, pattern: Any) -> bool:
    """Return whether a value is the one of a rule, or its function is true for it."""
    if callable(pattern):
        return bool(pattern(value))
    return bool(value == pattern)


def _equals(value: Any) -> str:
    if value is None or isinstance(value, list):
        return ""
    return f" = {quote(value)}"


# Numbers of a hint


def around(number: int, factor: int) -> str:
    """Return the multiples of `factor` on both sides of a number."""
    below = number // factor * factor
    above = -(-number // factor) * factor
    return " or ".join(str(multiple) for multiple in (below, above) if multiple)


def divisors(number: int) -> list[int]:
    """Return all divisors, rising."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return small + large
