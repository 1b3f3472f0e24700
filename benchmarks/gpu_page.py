"""The page of benchmarks/gpu.py: its tables, and a line for each target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_ladder import SETTINGS

COMMAND = "benchmarks/gpu.sh"


@dataclass(frozen=True)
class Target:
    """A figure of one level that is to be reached."""

    about: str
    piece: str
    level: str
    figure: str
    bound: float
    #: Whether the figure is to be at least the bound, or at most.
    least: bool = True


TARGETS = (
    Target("bf16 with compile: at least 50 % MFU", "ladder-8b", "compile", "mfu", 50),
    *(
        Target(
            f"{level}: at least 1.30 x the speed of compiled bf16",
            "ladder-8b",
            level,
            "ratio_to_compile",
            1.3,
        )
        for level in ("float8", "float8-all-gather")
    ),
    Target(
        "float8-all-gather: loss after 500 steps within 0.02 of compiled bf16's",
        *("loss-8b", "float8-all-gather", "final_loss_difference"),
        bound=0.02,
        least=False,
    ),
    *(
        Target(
            f"{level}: the nearest rival's published 10,471 tokens/s",
            "rival-7b",
            level,
            "tokens_per_second",
            10471,
        )
        for level in ("compile", "float8-all-gather")
    ),
)


def judge(target: Target, done: Mapping[str, Mapping[str, Any]]) -> str:
    """`met`, `missed` or `not measured`, with the figure."""
    rows = [
        row for row in done.get(target.piece, {}).get("rows", []) if row["what"] == target.level
    ]
    figure = rows[0].get(target.figure) if rows else None
    if figure is None:
        return "not measured"
    value = float(figure)
    met = value >= target.bound if target.least else value <= target.bound
    pattern = ",.0f" if target.bound > 1000 else ".4f" if target.bound < 1 else ".2f"
    return f"{'met' if met and math.isfinite(value) else 'missed'} ({value:{pattern}})"


def targets(done: Mapping[str, Mapping[str, Any]], short: bool) -> list[dict[str, Any]]:
    """A row per target. Tiny shapes and few steps measure nothing."""
    return [
        {
            "target": one.about,
            "piece": one.piece,
            "level": one.level,
            "figure": one.figure,
            "bound": one.bound,
            "verdict": "not measured" if short else judge(one, done),
        }
        for one in TARGETS
    ]


def page(
    done: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any], command: str, short: bool
) -> str:
    """gpu.md."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    driver = (
        f", driver and power limit {about['driver and power limit']}"
        if about["driver and power limit"]
        else ""
    )
    lines = [
        "# On one GPU",
        "",
        f"{about['device']}{driver}; CUDA {about['cuda']}; {versions}.  ",
        f"`{command}`",
        "",
    ]
    if short:
        lines += [
            "`--toy` or `--dry-run`: that the pieces work; nothing here is a measurement.",
            "",
        ]
    lines += [
        f"- {one['target']} ({one['piece']}): {one['verdict']}" for one in targets(done, short)
    ]
    for name, result in done.items():
        lines += ["", f"## {name}", ""]
        if "reason" in result:
            lines += [f"{'Failed' if result['failed'] else 'Not measured'}: {result['reason']}", ""]
        if not result.get("rows"):
            lines.pop()
        elif name in SETTINGS:
            lines += ladder_table(result["rows"], SETTINGS[name].layers is not None)
        else:
            lines += _plain_rows(result["rows"])
    return "\n".join(lines) + "\n"


def _plain_rows(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if "lines" in row:
            lines += row["lines"]
            continue
        value = row["value"]
        shown = "unknown" if value is None else value if isinstance(value, str) else f"{value:,.1f}"
        lines.append(f"- {row['what']}: {shown} {row.get('unit', '')}".rstrip())
        lines += [f"  - {failed}" for failed in row.get("failed", [])]
    return lines


#: Heading, key of the row, format.
COLUMNS = (
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("ratio", "ratio", ".2f"),
    ("ratio to compile", "ratio_to_compile", ".2f"),
    ("TFLOP/s", "tflops", ".1f"),
    ("MFU % of bf16's peak", "mfu", ".1f"),
    ("memory GiB", "memory_gib", ".1f"),
    ("loss", "loss", ".4f"),
    ("largest loss difference", "loss_difference", ".2g"),
    ("final loss difference to compile", "final_loss_difference", ".2g"),
)


def ladder_table(rows: list[dict[str, Any]], pinned: bool) -> list[str]:
    """Markdown: what the figures hold for, and a line per level."""
    first = rows[0]
    recipes = {row["float8_recipe"] for row in rows if row["float8_recipe"]}
    lines = [
        f"{first['parameters']:,} parameters ({first['layers']} blocks, "
        f"{'a fixed number: the losses are what is compared' if pinned else 'as many as fit'}), "
        f"{first['sequences']} sequences of {first['seq_len']} tokens, {first['steps']} steps, "
        f"activation checkpointing {first['activation_checkpoint']}, "
        f"loss in {first['loss_chunks']} {'pieces' if first['loss_chunks'] > 1 else 'piece'}, "
        f"{first['state_bytes_per_parameter']} bytes of state per parameter"
        + (f", float8 {', '.join(sorted(recipes))}" if recipes else "")
        + f"; {first['mfu_formula']}.",
        "",
        f"| level | {' | '.join(heading for heading, _, _ in COLUMNS)} |",
        f"| --- |{' ---: |' * len(COLUMNS)}",
    ]
    for row in rows:
        cells = [
            _shown(row[key][0] if key == "ratio" and row[key] else row[key], form)
            for _, key, form in COLUMNS
        ]
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return lines


def _shown(value: Any, pattern: str) -> str:
    return "–" if value is None else value if isinstance(value, str) else format(value, pattern)
