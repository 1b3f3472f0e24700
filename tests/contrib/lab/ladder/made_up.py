"""Made-up ladders: points of a known law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from titanlite.contrib.lab.ladder.law import Law, Point

#: About that of Besiroglu et al. 2024.
TRUE = Law(1.8, 480.0, 0.35, 2100.0, 0.37)
SIZES = tuple(10_000_000 * 2**step for step in range(5))
HORIZONS = (5.0, 10.0, 20.0)


def made_up(
    sizes: Sequence[float] = SIZES,
    horizons: Sequence[float] = HORIZONS,
    noise: float = 0.0,
    generator: np.random.Generator | None = None,
    luck: float = 0.0,
) -> list[Point]:
    """Points of the law.

    noise: standard deviation of their log losses. luck: share of its variance that all horizons of
    a size have in common; 0: they are no trunks.
    """
    points = []
    for size in sizes:
        shared = 0.0 if generator is None or not luck else float(generator.standard_normal())
        for horizon in horizons:
            error = 0.0
            if generator is not None:
                own = float(generator.standard_normal())
                error = noise * (luck**0.5 * shared + (1 - luck) ** 0.5 * own)
            loss = TRUE.loss(size, horizon * size) * float(np.exp(error))
            name = f"n{size:.0f}-t{horizon:g}"
            trunk = f"n{size:.0f}" if luck else ""
            points.append(Point(size, horizon * size, loss, name, trunk))
    return points
