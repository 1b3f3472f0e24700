"""The prediction for a run before its start: prediction.json in its folder. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec

from titanlite.runs import PREDICTION
from titanlite.runs.symlink_checks import read_own
from titanlite.utils import atomic_write, logger, parse_json

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class _Point(TypedDict):
    step: int
    loss: float
    low: float
    high: float


class _Curve(TypedDict):
    curve: list[_Point]


class _Plan(TypedDict):
    step_seconds: float
    tokens_per_second: _Positive
    tokens_per_second_range: tuple[_Positive, _Positive]
    peak_gib: float
    needed_gib: float


# {"plan": {…what `titanlite plan --json` prints…},
#  "loss": {"model": …, "tokens_per_step": …, "steps": …,
#           "curve": [{"step": 100, "loss": 4.1, "low": 4.05, "high": 4.16}, …]}}
class Prediction(TypedDict, total=False):
    """The file. Each part also names the run that it is for."""

    plan: _Plan
    loss: _Curve


class Compared(NamedTuple):
    """A measured figure, its prediction, and the interval of the prediction."""

    measured: float
    predicted: float
    low: float
    high: float

    def text(self, name: str) -> str:
        label, form = FIGURES[name]
        measured, predicted, low, high = (format(value, form) for value in self)
        return f"{measured} {label}, predicted {predicted} ({low} to {high})"


#: Name of a figure → unit, and form of its values.
FIGURES = {
    "tps": ("tokens/s per device", ",.0f"),
    "memory_gib": ("GiB at the peak", ".2f"),
    "hours_left": ("hours left", ",.2f"),
    "validation_loss": ("nats of held-out loss", ".4f"),
}


def keep(folder: Path, **parts: Any) -> Path:
    """Write `plan` or `loss`, beside what is there. Return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PREDICTION
    atomic_write(path, json.dumps({**read(folder), **parts}, indent=1, allow_nan=False) + "\n")
    return path


def read(folder: Path) -> Prediction:
    """Return the prediction in a folder; a damaged one counts as none, with a warning."""
    path = folder / PREDICTION
    try:
        found: Any = parse_json(read_own(path))
        known = msgspec.convert(found, Prediction)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning(f"{path} is passed over: {error}")
        return {}
    # With all names of a plan.
    kept: Any = {name: found[name] for name in known}
    return kept


def compare(found: Prediction, figures: Mapping[str, float], step: int) -> dict[str, Compared]:
    """Return those of the figures of which something was predicted.

    figures: of metrics.jsonl, and `hours_left`. step: that of the validation loss.
    """
    expected: dict[str, Sequence[float]] = {}
    if plan := found.get("plan"):
        rate = plan["tokens_per_second"]
        low, high = plan["tokens_per_second_range"]
        expected["tps"] = rate, low, high
        # On a CPU memory is that of the process.
        if "reserved_gib" in figures:
            expected["memory_gib"] = plan["peak_gib"], 0.0, plan["needed_gib"]
        if "hours_left" in figures:
            hours = figures["hours_left"] * plan["step_seconds"] / figures["seconds_per_step"]
            expected["hours_left"] = hours, hours * rate / high, hours * rate / low
    curve = found["loss"]["curve"] if "loss" in found else []
    if curve and curve[0]["step"] <= step <= curve[-1]["step"]:
        import numpy as np

        steps = [point["step"] for point in curve]
        columns = ([point[name] for point in curve] for name in ("loss", "low", "high"))
        expected["validation_loss"] = [float(np.interp(step, steps, one)) for one in columns]
    return {name: Compared(figures[name], *expected[name]) for name in expected if name in figures}
