"""The picture of a ladder, as SVG: points, the law's lines, and the prediction."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.cli.pictures import Chart, Curve, draw
from titanlite.contrib.lab.ladder.fit import Fit
from titanlite.contrib.lab.ladder.law import groups_of_sizes
from titanlite.contrib.lab.ladder.predict import Prediction
from titanlite.contrib.lab.ladder.report import decimals
from titanlite.utils import human_count

#: Points of a line, less one.
_PIECES = 60


def picture(found: Fit, prediction: Prediction | None) -> str:
    """Return losses over FLOPs; prediction: of the target, if there is one."""
    law = found.law
    curves = []
    points = [(point.compute, point.loss) for point in found.points]
    if prediction is not None:
        digits = decimals(prediction.error)
        loss = f"{prediction.loss:.{digits}f} ± {prediction.error:.{digits}f}"
        label = f"{human_count(prediction.parameters)}, predicted: {loss}"
        compute = 6 * prediction.parameters * prediction.tokens
        ends = [(compute, loss) for loss in (prediction.low, prediction.loss, prediction.high)]
        curves.append(Curve(label, ends, color=0, mark="cross"))
        points += ends
    for color, group in enumerate(groups_of_sizes(found.points), 1):
        size = group[0].parameters
        label = f"{human_count(size)} parameters"
        made = [(point.compute, point.loss) for point in group]
        curves.append(Curve(label, made, color, "none", "dot"))
        line = []
        for tokens in _between(group[0].tokens / 1.3, group[-1].tokens * 1.3):
            line.append((6 * size * tokens, law.loss(size, tokens)))
        curves.append(Curve("", line, color))
    low = min(loss for _, loss in points)
    high = max(loss for _, loss in points)
    best = []
    for compute in _between(min(x for x, _ in points), max(x for x, _ in points)):
        size = law.best_size(compute)
        least = law.loss(size, compute / 6 / size)
        if low <= least <= high:
            best.append((compute, least))
    curves.append(Curve("least loss for its FLOPs", best, color=0, line="dotted"))
    title = "Loss of each run of a ladder against its FLOPs, with the fitted law"
    across = "FLOPs of the training, 6 · parameters · tokens"
    return draw([Chart(title, across, "nats per token", curves, log_across=True)], title)


def _between(first: float, last: float) -> Sequence[float]:
    """Return numbers at equal ratios."""
    return [first * (last / first) ** (number / _PIECES) for number in range(_PIECES + 1)]
