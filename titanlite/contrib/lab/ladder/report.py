"""A ladder as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titanlite.contrib.lab.ladder.fit import CONFIDENCE, Fit
from titanlite.contrib.lab.ladder.predict import LeftOut, Prediction
from titanlite.contrib.lab.ladder.rungs import computed, rungs
from titanlite.contrib.lab.ladder.target import Target
from titanlite.utils import Style, Table, human_count, render

#: Name of a number in text → field of `Law`.
_NUMBERS = {
    "E": "irreducible",
    "A": "size_factor",
    "a": "size_exponent",
    "B": "token_factor",
    "b": "token_exponent",
}


@dataclass(frozen=True)
class Report:
    """All that a ladder found."""

    fit: Fit
    #: Points of the largest model, predicted from the smaller ones.
    left_out: Sequence[LeftOut]
    prediction: Prediction | None = None
    #: Parameters of the target with its embedding; None: the target is two numbers.
    whole: int | None = None
    #: Runs that gave no point, with the reason.
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON has it; docs/ladder.md explains the names."""
        intervals = {name: self.fit.interval(key) for name, key in _NUMBERS.items()}
        left = [
            {**asdict(one.point), "predicted": one.predicted, "relative_error": one.error}
            for one in self.left_out
        ]
        return {
            "format": 1,
            "points": [asdict(point) for point in self.fit.points],
            "law": self.fit.law.as_json(),
            "intervals": {name: list(ends) for name, ends in intervals.items()},
            "confidence": CONFIDENCE,
            "residuals": list(self.fit.residuals),
            "largest_left_out": left,
            "prediction": self.prediction and self.prediction.as_json(),
            "target_parameters": self.whole,
            "missing": list(self.missing),
            "notes": [*self.fit.notes, *self.notes],
        }


def report_text(report: Report, style: Style) -> str:
    """Return the report for a terminal."""
    lines = [_points_table(report.fit, style), "", *_law_lines(report.fit), ""]
    lines += _check_lines(report.left_out)
    for line in report.missing:
        lines.append(style.warn(f"missing: {line}"))
    for note in (*report.fit.notes, *report.notes):
        lines.append(style.dim(f"note: {note}"))
    if report.prediction is not None:
        lines += ["", style.bold(prediction_line(report, report.prediction))]
    return "\n".join(lines)


def prediction_line(report: Report, found: Prediction) -> str:
    """Return one line: what the run learns."""
    digits = decimals(found.error)
    subject = f"that run: {human_count(found.parameters)} parameters without embedding"
    if report.whole is not None:
        subject = f"this file: {human_count(report.whole)} parameters"
    return (
        f"{subject}, {human_count(found.tokens)} tokens, "
        f"loss {found.loss:.{digits}f} ± {found.error:.{digits}f} ({CONFIDENCE:.0%})"
    )


def decimals(error: float) -> int:
    """Return the digits behind the point that show two of an error."""
    if error <= 0:
        return 4
    return min(max(1 - math.floor(math.log10(error)), 2), 5)


def _points_table(found: Fit, style: Style) -> str:
    rows = []
    for point, residual in zip(found.points, found.residuals, strict=True):
        fitted = point.loss / math.exp(residual)
        row = [
            point.name,
            human_count(point.parameters),
            human_count(point.tokens),
            f"{point.tokens / point.parameters:.1f}",
            f"{point.loss:.4f}",
            f"{fitted:.4f}",
            f"{100 * math.expm1(residual):+.2f}",
        ]
        rows.append(row)
    columns = ["run", "N", "tokens", "tokens/N", "loss", "law", "difference %"]
    return render(Table(columns, rows), style.color)


def _law_lines(found: Fit) -> Iterator[str]:
    law = found.law
    yield (
        f"L(N, D) = {law.irreducible:.4g} + {law.size_factor:.4g} / N^{law.size_exponent:.3f} "
        f"+ {law.token_factor:.4g} / D^{law.token_exponent:.3f}"
    )
    texts = []
    for name in ("E", "a", "b"):
        low, high = found.interval(_NUMBERS[name])
        texts.append(f"{name} {low:.3g} to {high:.3g}")
    yield f"{CONFIDENCE:.0%} intervals: {', '.join(texts)}"


def _check_lines(left_out: Sequence[LeftOut]) -> Iterator[str]:
    if not left_out:
        yield "no check by leaving the largest model out: too few points would be left"
        return
    longest = left_out[-1]
    worst = max(left_out, key=lambda one: abs(one.error))
    yield (
        f"check: without its runs, the loss of the largest model ({longest.point.name}) is "
        f"predicted as {longest.predicted:.4f}, measured {longest.point.loss:.4f}: "
        f"{100 * longest.error:+.2f} %; the worst of its horizons {100 * worst.error:+.2f} %"
    )


def list_text(target: Target, style: Style) -> str:
    """Return the runs of a ladder before they are made, and what they take in FLOPs."""
    found = rungs(target)
    rows = []
    for rung in found:
        part = f"continues {rung.trunk} at step {rung.begins:,}" if rung.trunk else "trunk"
        rows.append(
            (
                rung.name,
                human_count(rung.parameters),
                f"{rung.horizon:g}",
                human_count(rung.tokens),
                f"{rung.steps:,}",
                f"{rung.sequences:,}",
                f"{rung.rate:.3g}",
                part,
            )
        )
    columns = ("run", "N", "tokens/N", "tokens", "steps", "batch", "lr", "")
    table = render(Table(columns, rows, left=(0, 7)), style.color)
    whole = 6.0 * target.parameters * target.tokens
    share = 100 * computed(found) / whole
    size = human_count(target.parameters)
    last = (
        f"this file: N {size}, {human_count(target.tokens)} tokens. All runs together take "
        f"{share:.2g} % of its FLOPs (6 N D)"
    )
    return "\n".join([table, "", last])
