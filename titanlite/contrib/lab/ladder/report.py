"""A ladder as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from titanlite.contrib.lab.ladder.fit import CONFIDENCE, Fit
from titanlite.contrib.lab.ladder.predict import LeftOut, Prediction
from titanlite.contrib.lab.ladder.rungs import computed, rungs
from titanlite.contrib.lab.ladder.target import Target
from titanlite.runs.text_tables import Table, render
from titanlite.utils import human_count


def report_text(
    found: Fit, left_out: Sequence[LeftOut], prediction: Prediction, notes: Sequence[str]
) -> str:
    """Return the points, the law, its check on the largest model and what it predicts."""
    rows = []
    for point, residual in zip(found.points, found.residuals, strict=True):
        row = [
            point.name,
            human_count(point.parameters),
            human_count(point.tokens),
            f"{point.tokens / point.parameters:.1f}",
            f"{point.loss:.4f}",
            f"{100 * math.expm1(residual):+.2f}",
        ]
        rows.append(row)
    columns = ["run", "N", "tokens", "tokens/N", "loss", "difference to the law %"]
    law = found.law
    lines = [
        render(Table(columns, rows)),
        "",
        f"L(N, D) = {law.irreducible:.4g} + {law.size_factor:.4g} / N^{law.size_exponent:.3f} "
        f"+ {law.token_factor:.4g} / D^{law.token_exponent:.3f}",
    ]
    names = {"E": "irreducible", "a": "size_exponent", "b": "token_exponent"}
    ends = (f"{name} %.3g to %.3g" % found.interval(key) for name, key in names.items())
    lines += [f"{CONFIDENCE:.0%} intervals: {', '.join(ends)}", ""]
    for one in left_out:
        lines.append(
            f"check: without the largest model its loss in {one.point.name} is predicted as "
            f"{one.predicted:.4f}, measured {one.point.loss:.4f}: {100 * one.error:+.2f} %"
        )
    lines += [f"note: {note}" for note in (*found.notes, *notes)]
    return "\n".join([*lines, "", prediction_line(prediction)])


def prediction_line(found: Prediction) -> str:
    """Return the predicted loss as one line."""
    # Two digits of the error.
    digits = 4
    if found.error > 0:
        digits = min(max(1 - math.floor(math.log10(found.error)), 2), 5)
    return (
        f"this file: N {human_count(found.parameters)}, {human_count(found.tokens)} tokens, "
        f"loss {found.loss:.{digits}f} ± {found.error:.{digits}f} ({CONFIDENCE:.0%})"
    )


def list_text(target: Target) -> str:
    """Return the runs of a ladder before they are made, with their FLOPs."""
    found = rungs(target)
    rows = []
    for rung in found:
        row = [
            rung.name,
            human_count(rung.parameters),
            human_count(rung.tokens),
            f"{rung.steps:,}",
            f"{rung.sequences:,}",
            f"{rung.rate:.3g}",
            f"continues {rung.trunk} at step {rung.begins:,}" if rung.trunk else "trunk",
        ]
        rows.append(row)
    columns = ("run", "N", "tokens", "steps", "batch", "lr", "")
    share = 100 * computed(found) / (6.0 * target.parameters * target.tokens)
    last = (
        f"this file: N {human_count(target.parameters)}, {human_count(target.tokens)} tokens. All "
        f"runs together take {share:.2g} % of its FLOPs (6 N D)"
    )
    return "\n".join([render(Table(columns, rows, left=(0, 6))), "", last])
