"""The scaling law L(N, D) = E + A / N^a + B / D^b, and the points that it is fitted to. No torch.

N: parameters, D: tokens (Hoffmann et al. 2022, arXiv:2203.15556, equation 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite import exit_codes

Array = NDArray[np.float64]

#: Fewest sizes of models, and fewest points, that a law is fitted to.
FEWEST_SIZES = 3
FEWEST_POINTS = 6
#: Two sizes, or two horizons of a size, that differ by less count as one.
_SAME = 1.02
#: N and D that lie this close to a line have one exponent between them: a share of D's spread.
_COLLINEAR = 0.02


class LadderError(ValueError):
    """A ladder cannot be fitted, predicted or run; the text gives the reason and the remedy."""

    exit_code = exit_codes.CONFIG


@dataclass(frozen=True)
class Point:
    """The loss of one run."""

    #: N.
    parameters: float
    #: D.
    tokens: float
    #: Nats per token.
    loss: float
    name: str = ""
    #: The trunk that it is a part of, its own name for the trunk itself; "": it is a run alone.
    trunk: str = ""

    @property
    def compute(self) -> float:
        """FLOPs of the training by the rule of the paper, 6 N D."""
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class Law:
    """A fitted law. a and b are the exponents of the paper's alpha and beta."""

    irreducible: float
    size_factor: float
    size_exponent: float
    token_factor: float
    token_exponent: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model of N parameters after D tokens."""
        by_size = self.size_factor * parameters**-self.size_exponent
        by_tokens = self.token_factor * tokens**-self.token_exponent
        return self.irreducible + by_size + by_tokens

    def best_size(self, compute: float) -> float:
        """Return the N of the least loss for 6 N D = compute (the paper's equation 4)."""
        alpha = self.size_exponent
        beta = self.token_exponent
        ratio = alpha * self.size_factor / (beta * self.token_factor)
        return float(ratio ** (1 / (alpha + beta)) * (compute / 6) ** (beta / (alpha + beta)))

    def as_json(self) -> dict[str, Any]:
        """Return the law under the paper's names."""
        return {
            "E": self.irreducible,
            "A": self.size_factor,
            "a": self.size_exponent,
            "B": self.token_factor,
            "b": self.token_exponent,
        }


def columns(points: Sequence[Point]) -> tuple[Array, Array, Array]:
    """Return the logarithms of N, of D and of the losses."""
    sizes = np.log([point.parameters for point in points])
    tokens = np.log([point.tokens for point in points])
    losses = np.log([point.loss for point in points])
    return sizes, tokens, losses


def groups_of_sizes(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points by size, the smallest first; sizes within 2 % count as one."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda point: (point.parameters, point.tokens)):
        if groups and point.parameters < groups[-1][0].parameters * _SAME:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _has_horizons(group: Sequence[Point]) -> bool:
    tokens = [point.tokens for point in group]
    return max(tokens) >= min(tokens) * _SAME


def check_points(points: Sequence[Point]) -> None:
    """Raise LadderError for points that no law can be fitted to."""
    for point in points:
        for name in ("parameters", "tokens", "loss"):
            value = getattr(point, name)
            if not 0 < value < math.inf:
                where = f" of {point.name}" if point.name else ""
                raise LadderError(f"{name}{where} is {value:g}: expected a positive number")
    groups = groups_of_sizes(points)
    if len(groups) < FEWEST_SIZES:
        raise LadderError(
            f"{len(groups)} sizes of models: a law needs {FEWEST_SIZES} at least. Add sizes to "
            "ladder.sizes, or rows to the file"
        )
    several = [group for group in groups if _has_horizons(group)]
    if len(several) < 2:
        raise LadderError(
            "the models have one horizon each: what more parameters bring cannot be told from what "
            "more tokens bring. At least two sizes need two lengths: add one to "
            "ladder.tokens_per_parameter"
        )
    if len(points) < FEWEST_POINTS:
        raise LadderError(
            f"{len(points)} points: a law needs {FEWEST_POINTS} at least. Add sizes or horizons"
        )
    sizes, tokens, _ = columns(points)
    line = np.polyfit(sizes, tokens, 1)
    aside = np.std(tokens - np.polyval(line, sizes))
    if aside < _COLLINEAR * np.std(tokens):
        raise LadderError(
            "tokens follow from parameters almost exactly, so their parts of the loss cannot be "
            "told apart: spread ladder.tokens_per_parameter wider"
        )
