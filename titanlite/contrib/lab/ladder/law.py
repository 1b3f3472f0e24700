"""The scaling law L(N, D) = E + A / N^a + B / D^b, and the points that it is fitted to. No torch.

N: parameters, D: tokens (Hoffmann et al. 2022, arXiv:2203.15556, equation 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        by_size = self.size_factor * parameters**-self.size_exponent
        by_tokens = self.token_factor * tokens**-self.token_exponent
        return self.irreducible + by_size + by_tokens


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


def check_points(points: Sequence[Point]) -> None:
    """Raise LadderError for points that no law can be fitted to."""
    sizes = len(groups_of_sizes(points))
    if sizes < FEWEST_SIZES or len(points) < FEWEST_POINTS:
        raise LadderError(
            f"{len(points)} points of {sizes} sizes: a law needs {FEWEST_POINTS} points of "
            f"{FEWEST_SIZES} sizes at least. Add to ladder.sizes or ladder.tokens_per_parameter"
        )
    across, tokens, _ = columns(points)
    line = np.polyfit(across, tokens, 1)
    aside = np.std(tokens - np.polyval(line, across))
    if aside < _COLLINEAR * np.std(tokens):
        raise LadderError(
            "tokens follow from parameters almost exactly, so their parts of the loss cannot be "
            "told apart: spread ladder.tokens_per_parameter wider"
        )
