"""`titanlite lr`: the learning rate of every step of a config, drawn and as numbers."""

from __future__ import annotations

import argparse
import json

from titanlite import exit_codes
from titanlite.config.errors import unfit
from titanlite.optim.schedule import LearningRate
from titanlite.start.fit import check_config
from titanlite.start.run_text import phases_of
from titanlite.tools.parser import FLAGS, Commands, add_files, files_of, new_command

_WIDTH = 72
_HEIGHT = 10
_BARS = " ▁▂▃▄▅▆▇█"


def add_command(commands: Commands) -> None:
    """Add `titanlite lr` to argparse."""
    parser = new_command(
        commands,
        _run,
        "lr",
        "draw the learning rate of a config over its steps",
        (f"Draw the learning rate over the steps of a run, and print it for some of them. {FLAGS}"),
    )
    add_files(parser)
    parser.add("--json", "print the learning rate of every step as a JSON list")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    run = check_config([*files_of(arguments), *arguments.flags], training=False)[1]
    if run.steps is None:
        message = "the length in steps follows from the length of the text"
        raise unfit("training.epochs", message, "give --training.steps N for this command")
    phases = phases_of(run)
    rate = LearningRate(run.schedule, run.optimizer.peak_lr, course=run.course)
    if phases is not None:
        rate.phases = phases.rates()
        rate.peaks = phases.peaks()
    rates = [rate(step) for step in range(1, run.steps + 1)]
    return (
        json.dumps(rates) if arguments.json else "\n".join([*draw(rates), "", *table(rates)])
    ), exit_codes.DONE


def draw(rates: list[float]) -> list[str]:
    """Return lines with a column of eighths per `_WIDTH`-th part of the steps, the last rate of
    each.
    """
    columns = min(_WIDTH, len(rates))
    picked = [rates[(i + 1) * len(rates) // columns - 1] for i in range(columns)]
    top = max(rates) or 1.0
    heights = [round(rate / top * _HEIGHT * 8) for rate in picked]
    rows = [
        "".join(_BARS[min(max(h - 8 * row, 0), 8)] for h in heights)
        for row in reversed(range(_HEIGHT))
    ]
    labels = [f"{top:.3g}", *[""] * (_HEIGHT - 2), "0"]
    left = max(map(len, labels))
    lines = [f"{label:>{left}} │{row}".rstrip() for label, row in zip(labels, rows, strict=True)]
    return [
        *lines,
        f"{'':{left}} └{'─' * columns}",
        f"{'':{left}}  1{f'step {len(rates):,}':>{columns - 1}}",
    ]


def table(rates: list[float]) -> list[str]:
    """Return lines with the rates of some steps.

    They are the ends, the quarters, the first and the last at the highest rate.
    """
    last = len(rates) - 1
    top = max(rates)
    steps = sorted(
        {*(last * k // 4 for k in range(5)), rates.index(top), last - rates[::-1].index(top)}
    )
    width = max(len(f"{last + 1:,}"), 4)
    return [
        f"{'step':>{width}}  learning rate",
        *(f"{i + 1:>{width},}  {rates[i]:.4g}" for i in steps),
    ]
