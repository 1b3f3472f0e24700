"""What a ladder leaves: a table for the terminal, ladder.md, ladder.json and two pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titanlite.ladder.figures import LevelFigures, Measured
from titanlite.observe.metrics import json_value
from titanlite.runs.list import NONE, number
from titanlite.runs.plots import COLORS, PlotsMissing, charts, draw_png
from titanlite.runs.read import Run
from titanlite.runs.table import Table, render

STATE = "ladder.json"
PAGE = "ladder.md"
LOSSES = "losses.png"
SPEEDS = "throughput.png"
FORMAT = 1


@dataclass(frozen=True)
class Report:
    """All that is known of a ladder, finished or not."""

    title: str
    #: The command line that began or continued it.
    command: Sequence[str]
    #: What the figures depend on; a ladder is only continued with the same.
    inputs: Mapping[str, Any]
    #: Device, ranks, cores.
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    steps: int
    warmup: int
    repeats: int
    figures: Sequence[LevelFigures]
    measured: Sequence[Measured]
    notes: Sequence[str] = ()
    #: What each level is, by name.
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def head(self) -> list[str]:
        """Where and how it was measured, in lines."""
        hardware = ", ".join(
            [f"{self.hardware['ranks']} x {self.hardware['device']}", f"{self.hardware['cores']} processor cores"]
        )
        versions = ", ".join(f"{name} {self.versions[name]}" for name in ("titanlite", "torch", "python"))
        return [
            f"{hardware}; {versions}",
            f"{self.steps} steps a run, the first {self.warmup} not counted; medians of {self.repeats} repeats in turn",
        ]


def table(report: Report) -> Table:
    """One row per level."""
    columns = (
        *("level", "tokens/s", "ratio (min–max)", "MFU %", "memory GiB"),
        *(f"loss at step {report.steps:,}", "largest loss difference", "runs"),
    )
    rows = []
    for i, line in enumerate(report.figures):
        difference = "baseline" if i == 0 else number(line.loss_difference, ".2g")
        rows.append(
            (
                line.level,
                number(line.tokens_per_second, ",.0f"),
                NONE if line.ratio is None else "{:.2f} ({:.2f}–{:.2f})".format(*line.ratio) if i else "1",
                number(line.mfu, ".2f"),
                number(line.memory_gib, ".2f"),
                number(line.loss, ".4f"),
                difference,
                f"{line.repeats} of {report.repeats}",
            )
        )
    return Table(columns, rows)


def text(report: Report, terminal: bool) -> str:
    """For the terminal."""
    notes = [f"note: {note}" for note in report.notes]
    return "\n".join([*report.head, "", render(table(report), terminal), *(["", *notes] if notes else [])])


def markdown(report: Report, pictures: Sequence[str]) -> str:
    """ladder.md."""
    found = table(report)
    rules = ["---" if i in found.left else "---:" for i in range(len(found.columns))]
    lines = [f"| {' | '.join(row)} |" for row in (found.columns, rules, *found.rows)]
    about = [f"- {name}: {words}" for name, words in report.about.items()]
    parts = [
        f"# Ladder: {report.title}",
        "\n".join(f"{line}.  " for line in report.head).rstrip(),
        f"`{' '.join(report.command)}`",
        "\n".join(lines),
        "\n".join(about),
        "\n".join(f"- {note}" for note in report.notes),
        "\n".join(f"![{Path(name).stem}]({name})" for name in pictures),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_json(report: Report) -> dict[str, Any]:
    """ladder.json. Numbers that are not finite are strings, as in metrics.jsonl."""
    return {
        "format": FORMAT,
        "title": report.title,
        "command": list(report.command),
        "hardware": dict(report.hardware),
        "versions": dict(report.versions),
        "steps": report.steps,
        "warmup": report.warmup,
        "repeats": report.repeats,
        "levels": [_plain({**asdict(line), "about": report.about.get(line.level, "")}) for line in report.figures],
        "runs": [_plain(asdict(one)) for one in report.measured],
        "notes": list(report.notes),
        "inputs": report.inputs,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return json_value(value)


def save_state(report: Report, folder: Path) -> None:
    """Write ladder.json, whole or not at all."""
    _replace(folder / STATE, json.dumps(as_json(report), indent=1, allow_nan=False) + "\n")


def save_pages(report: Report, runs: Mapping[str, Run], folder: Path) -> tuple[list[Path], str]:
    """Write ladder.md and, where anything was measured, the pictures. What was written, and why a picture is missing.

    runs: a finished run of each level, for the curves.
    """
    written, why = [], ""
    if runs:
        try:
            draw(report, runs, folder)
            written = [LOSSES, SPEEDS]
        except PlotsMissing as error:
            why = f"{LOSSES} and {SPEEDS} are not drawn: {error}"
    _replace(folder / PAGE, markdown(report, written))
    return [folder / name for name in (PAGE, STATE, *written)], why


def draw(report: Report, runs: Mapping[str, Run], folder: Path) -> None:
    """The loss curves of one run of each level, and a bar for the speed of each. Raises PlotsMissing, OSError."""
    draw_png(charts(list(runs.values()), list(runs))[:1], folder / LOSSES)
    from matplotlib.figure import Figure

    lines = [line for line in report.figures if line.tokens_per_second is not None]
    figure = Figure(figsize=(10, 1.2 + 0.6 * len(lines)), dpi=110, layout="constrained")
    axis = figure.subplots()
    for place, line in enumerate(lines):
        assert line.tokens_per_second is not None
        color = COLORS[place % len(COLORS)]
        axis.barh(place, line.tokens_per_second, color=color, height=0.6)
        speeds = [one.tokens_per_second for one in report.measured if one.level == line.level]
        axis.plot(speeds, [place] * len(speeds), "|", color="black", markersize=12)
        ratio = "" if line.ratio is None or not place else f"  ({line.ratio[0]:.2f}×)"
        axis.text(max(speeds), place, f"  {line.tokens_per_second:,.0f}{ratio}", va="center")
    axis.set_yticks(range(len(lines)), [line.level for line in lines])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.2 * max(one.tokens_per_second for one in report.measured))
    axis.set(title="Speed: medians, and each repeat as a mark", xlabel="tokens/s, all devices")
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.grid(alpha=0.25, axis="x")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / SPEEDS)


def _replace(path: Path, content: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(content, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
