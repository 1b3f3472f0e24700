"""Fits the scaling law to points, and says how sure it is. numpy alone.

The objective is that of Hoffmann et al. 2022 (arXiv:2203.15556, appendix D.2): a Huber loss, delta
0.001, of the differences of log losses. Its sum, not its mean, is minimised to the end.
Besiroglu et al. 2024 (arXiv:2404.10102) found that a mean had stopped early in the paper's own
fit. All starts run at once, as rows of arrays, by Levenberg and Marquardt's method: thousands
of fits of a bootstrap take seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titanlite.contrib.lab.ladder.law import Array, Law, Point, check_points, columns

#: Threshold of the Huber loss, in log loss.
DELTA = 1e-3
#: With fewer points the exponent of tokens is not fitted but that of Besiroglu et al. 2024.
POINTS_FOR_ALL = 9
KNOWN_TOKEN_EXPONENT = 0.37
#: Share of repetitions that the interval of a prediction holds.
CONFIDENCE = 0.9
REPLICATES = 500
#: Share of an error's variance that all horizons of a trunk have in common. One seed cannot tell
#: it. With a half, intervals of made-up ladders hold about what they say, whatever the share is
#: (docs/log.md).
TRUNK_SHARE = 0.5
#: Exponents lie between these.
_LEAST = 0.01
_MOST = 3.0
_ITERATIONS = 300
#: A row is at its end when a step gains less, as a share, or no step gains anything.
_GAIN = 1e-10
_MOST_DAMPING = 1e8
#: The grid of starts: exponents, shares of E in the mean loss, and of the part by size in the rest.
_EXPONENTS = (0.1, 0.3, 0.6, 1.0, 1.5)
_SHARES_LEFT = (0.2, 0.5, 0.8, 0.95)
_SHARES_OF_SIZE = (0.2, 0.5, 0.8)
#: Starts of each replicate, besides the fit of the points themselves.
_MORE_STARTS = 5

# Columns of an array of laws: log E; log A and log B at the centre of the points; the exponents.
_E, _A, _B, _SIZE, _TOKEN = range(5)


@dataclass(frozen=True)
class Problem:
    """Points as arrays. Their centre is subtracted, so that factors and exponents are hardly
    correlated.
    """

    sizes: Array
    tokens: Array
    centre: tuple[float, float]
    #: Columns that are fitted.
    free: Array
    #: Correlations of the errors of points [points, points].
    correlations: Array

    def law(self, row: Array) -> Law:
        e, a, b, alpha, beta = (float(value) for value in row)
        return Law(
            float(np.exp(e)),
            float(np.exp(a + alpha * self.centre[0])),
            alpha,
            float(np.exp(b + beta * self.centre[1])),
            beta,
        )

    def log_losses(self, rows: Array) -> tuple[Array, Array]:
        """Return log losses [rows, points], and their derivatives [rows, points, 5]."""
        by_size = rows[:, _A, None] - rows[:, _SIZE, None] * self.sizes
        by_tokens = rows[:, _B, None] - rows[:, _TOKEN, None] * self.tokens
        constant = np.broadcast_to(rows[:, _E, None], by_size.shape)
        terms = np.stack([constant, by_size, by_tokens], axis=-1)
        top = terms.max(axis=-1, keepdims=True)
        powers = np.exp(terms - top)
        total = powers.sum(axis=-1, keepdims=True)
        shares = powers / total
        derivatives = np.empty((*by_size.shape, 5))
        derivatives[..., :3] = shares
        derivatives[..., _SIZE] = -shares[..., 1] * self.sizes
        derivatives[..., _TOKEN] = -shares[..., 2] * self.tokens
        return (top + np.log(total))[..., 0], derivatives * self.free


@dataclass(frozen=True)
class Fit:
    """A law and what supports it."""

    points: tuple[Point, ...]
    law: Law
    #: log of measured over fitted loss, of each point.
    residuals: tuple[float, ...]
    #: Laws of the bootstrap.
    replicates: tuple[Law, ...]
    #: Relative errors that runs beside the law have, one for each replicate.
    noise: tuple[float, ...]
    #: Remarks about the fit, for readers.
    notes: tuple[str, ...]

    def interval(self, name: str) -> tuple[float, float]:
        return ends([getattr(law, name) for law in self.replicates])


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the interval that holds values with probability `CONFIDENCE`."""
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def fit(points: Sequence[Point], replicates: int = REPLICATES) -> Fit:
    """Fit the law, with a bootstrap of `replicates` refits; 0: there are no intervals. Raises
    LadderError.

    Errors are drawn around the fitted law, since a draw of the points of a small ladder often lacks
    a size. They are normal, with the spread of the residuals per number left over, itself drawn as
    Student's t has it, and correlated within a trunk. Residuals cannot be drawn: up to a third may
    be 0, as the fit passes through as many points as it has numbers.
    """
    check_points(points)
    problem, losses = _problem(points)
    found, objective = _minimise(problem, _starts(losses), losses[None])
    order = np.argsort(objective)
    best = found[order[0]]
    fitted, _ = problem.log_losses(best[None])
    residuals = losses - fitted[0]
    draws, noise = _draws(problem, best, residuals, replicates)
    rows = draws
    if replicates:
        places = np.unique(np.linspace(0, len(found) - 1, _MORE_STARTS + 1).astype(int))
        starts = np.stack([best, *found[order][places[1:]]])
        each = np.repeat(fitted[0] + draws, len(starts), axis=0)
        ends, reached = _minimise(problem, np.tile(starts, (replicates, 1)), each)
        chosen = reached.reshape(replicates, -1).argmin(axis=1)
        rows = ends.reshape(replicates, len(starts), 5)[np.arange(replicates), chosen]
    law = problem.law(best)
    return Fit(
        points=tuple(points),
        law=law,
        residuals=tuple(float(value) for value in residuals),
        replicates=tuple(problem.law(row) for row in rows),
        noise=tuple(float(value) for value in noise),
        notes=tuple(_notes(problem, law)),
    )


def _problem(points: Sequence[Point]) -> tuple[Problem, Array]:
    sizes, tokens, losses = columns(points)
    centre = (float(sizes.mean()), float(tokens.mean()))
    free = np.ones(5)
    if len(points) < POINTS_FOR_ALL:
        free[_TOKEN] = 0.0
    trunks = np.array([point.trunk or f"alone {place}" for place, point in enumerate(points)])
    together = (trunks[:, None] == trunks[None]).astype(float)
    shared = (1 - TRUNK_SHARE) * np.eye(len(points)) + TRUNK_SHARE * together
    return Problem(sizes - centre[0], tokens - centre[1], centre, free, shared), losses


def _notes(problem: Problem, law: Law) -> list[str]:
    notes = []
    if not problem.free[_TOKEN]:
        notes.append(
            f"fewer than {POINTS_FOR_ALL} points: the exponent of tokens is not fitted but "
            f"{KNOWN_TOKEN_EXPONENT}, that of arXiv:2404.10102"
        )
    for name, value in {"a": law.size_exponent, "b": law.token_exponent}.items():
        if not _LEAST * 1.01 < value < _MOST * 0.99:
            notes.append(
                f"the exponent {name} is at its limit {value:g}: these points leave it open"
            )
    return notes


def _starts(losses: Array) -> Array:
    """Return [rows, 5]: all combinations of exponents, and of shares of the mean loss."""
    middle = float(losses.mean())
    rows: list[list[float]] = []
    for alpha, beta, left, of_size in itertools.product(
        _EXPONENTS, _EXPONENTS, _SHARES_LEFT, _SHARES_OF_SIZE
    ):
        shares = np.log([left, (1 - left) * of_size, (1 - left) * (1 - of_size)])
        rows.append([*(middle + shares), alpha, beta])
    return np.array(rows)


def _minimise(problem: Problem, starts: Array, losses: Array) -> tuple[Array, Array]:
    """Return the laws that starts lead to, and their objectives. losses: log losses [rows or 1,
    points].
    """
    rows = starts.copy()
    if not problem.free[_TOKEN]:
        rows[:, _TOKEN] = KNOWN_TOKEN_EXPONENT
    wanted = np.broadcast_to(losses, (len(rows), losses.shape[1]))
    damping = np.full(len(rows), 1e-2)
    values, derivatives = problem.log_losses(rows)
    differences = values - wanted
    objective = _huber(differences)
    live = np.arange(len(rows))
    for _ in range(_ITERATIONS):
        steps = _steps(differences[live], derivatives[live], damping[live])
        tried = rows[live] + steps
        tried[:, _SIZE:] = np.clip(tried[:, _SIZE:], _LEAST, _MOST)
        values, slopes = problem.log_losses(tried)
        changed = values - wanted[live]
        after = _huber(changed)
        better = after < objective[live]
        gained = objective[live] - after
        damping[live] = np.where(better, damping[live] / 3, damping[live] * 4)
        is_done = better & (gained <= _GAIN * after + 1e-18)
        is_done |= damping[live] > _MOST_DAMPING
        place = live[better]
        rows[place] = tried[better]
        differences[place] = changed[better]
        derivatives[place] = slopes[better]
        objective[place] = after[better]
        live = live[~is_done]
        if not len(live):
            break
    return rows, objective


def _huber(differences: Array) -> Array:
    sizes = np.abs(differences)
    each = np.where(sizes <= DELTA, 0.5 * sizes**2, DELTA * (sizes - 0.5 * DELTA))
    total: Array = each.sum(axis=-1)
    return total


def _steps(differences: Array, derivatives: Array, damping: Array) -> Array:
    """Return the step [rows, 5] of each row.

    Far differences get the weight at which squares have the slope of the Huber loss.
    """
    weights = DELTA / np.maximum(np.abs(differences), DELTA)
    weighted = derivatives * weights[..., None]
    curvature = np.swapaxes(weighted, 1, 2) @ derivatives
    slope = (weighted * differences[..., None]).sum(axis=1)
    diagonal = np.einsum("rii->ri", curvature)
    # A column that is not fitted, or has no effect, has no curvature: it must not make it singular.
    diagonal += damping[:, None] * (diagonal + 1e-9) + 1e-12
    found: Array = -np.linalg.solve(curvature, slope[..., None])[..., 0]
    return np.clip(found, -2.0, 2.0)


def _draws(problem: Problem, best: Array, residuals: Array, count: int) -> tuple[Array, Array]:
    """Return errors [count, points] for the bootstrap, and one further error for each draw.

    A fit takes what is common to a trunk for a part of the law, so residuals underestimate errors
    by more than the numbers of the law.
    """
    generator = np.random.default_rng(0)
    _, derivatives = problem.log_losses(best[None])
    slopes = derivatives[0][:, problem.free > 0]
    kept = np.eye(len(residuals)) - slopes @ np.linalg.pinv(slopes)
    left = kept @ problem.correlations
    # Mean and degrees of freedom of a sum of squares of correlated errors (Satterthwaite 1946).
    mean = max(float(np.trace(left)), 1e-3)
    spare = max(mean**2 / float(np.trace(left @ left)), 1.0)
    scale = np.sqrt((residuals**2).sum() / mean)
    scales = scale * np.sqrt(spare / generator.chisquare(spare, size=(count, 1)))
    normal = generator.standard_normal((count, len(residuals) + 1))
    common = np.linalg.cholesky(problem.correlations)
    return scales * (normal[:, :-1] @ common.T), (scales * normal[:, -1:])[:, 0]
