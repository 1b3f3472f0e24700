"""Write an evidence card: a page of measurements of one config on one device.

    python benchmarks/card.py '1 rank=RUN_FOLDER' 'compiled' --out docs/cards/NAME.md

A cell is a name and the folder of its run; a name alone is a cell that is not run. NAME.json keeps
what the page shows: later calls add cells, and one without cells writes the page again. --gradients
reads what benchmarks/gpu_gradients.py printed. A run for a card logs every step
(metrics.log_freq = 1). benchmarks/gpu.py writes the cards of its rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from msgspec import to_builtins  # noqa: E402

from benchmarks.gpu_targets import shown  # noqa: E402
from titanlite.config.load import read  # noqa: E402
from titanlite.plan.hardware import peak_flops  # noqa: E402
from titanlite.plan.memory import with_vocabulary  # noqa: E402
from titanlite.resolve.load import check_config  # noqa: E402
from titanlite.runs.read import Run, read_run  # noqa: E402
from titanlite.utils import atomic_write  # noqa: E402

#: Steps before those whose speed counts.
WARMUP = 4
#: Steps whose loss is kept, besides the last.
LOSSES = (1, 2, 5, 10, 20, 50, 100, 200, 500)
#: Keys that say where a run is and what it is called, not what it does.
_NAMES = {("job", key) for key in ("dump_folder", "description", "config_file", "extends")}
#: Rows of the table, with a figure of `figures` each.
_ROWS = {
    "ranks": "ranks",
    "tokens in a step": "tokens a step",
    "steps": "steps",
    "warm-up steps, left out of speeds": "warm-up",
    "tokens/s and device: median": "tokens/s",
    "lower quartile": "lower quartile",
    "upper quartile": "upper quartile",
    "slowest step": "slowest",
    "fastest step": "fastest",
    "MFU, %": "MFU %",
    "peak memory of a rank, GiB": "memory GiB",
    "reserved by the allocator, GiB": "reserved GiB",
}
_FORMULA = """MFU = tokens/s and device × FLOPs of a token / peak of the device. A token takes 6
FLOPs for each weight that is multiplied, and 12 × layers × heads × head_dim × seq_len for
attention.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", metavar="CELL[=RUN_FOLDER]")
    parser.add_argument("--out", type=Path, required=True, metavar="NAME.md")
    parser.add_argument("--gradients", type=Path, metavar="FILE", help="of gpu_gradients.py")
    parser.add_argument("--title", help="(default: NAME)")
    parser.add_argument("--note", help="what a reader must know about all cells")
    asked = parser.parse_args()
    named = (cell.partition("=")[::2] for cell in asked.cells)
    cells = {name: figures(Path(folder)) if folder else {} for name, folder in named}
    facts = {"title": asked.title, "note": asked.note}
    if asked.gradients:
        facts["gradients"] = [line_of(row) for row in json.loads(asked.gradients.read_text())]
    print(write(asked.out, cells, facts))


def write(page: Path, cells: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Add cells and facts to a card and return its page. Those that are not given stay."""
    store = page.with_suffix(".json")
    card = json.loads(store.read_text()) if store.exists() else {"title": page.stem, "cells": {}}
    card |= {name: value for name, value in facts.items() if value}
    for name, cell in cells.items():
        card["cells"][name] = cell or card["cells"].get(name, {})
    page.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(store, json.dumps(card, indent=1) + "\n")
    text = text_of(card)
    atomic_write(page, text)
    return text


def figures(folder: Path) -> dict[str, Any]:
    """Return the measurements of a run's steps. Raises RunError for a folder that is no run."""
    run = read_run(folder)
    rows = [row for row in run.training if "tps" in row]
    speeds = [row["tps"] for row in rows[WARMUP:]]
    if len(speeds) < 2:
        return {"steps": len(rows)}
    low, middle, high = quantiles(speeds, n=4, method="inclusive")
    mfu = [row["mfu"] for row in rows[WARMUP:] if "mfu" in row]
    return {
        "steps": len(rows),
        "warm-up": WARMUP,
        "tokens/s": middle,
        "lower quartile": low,
        "upper quartile": high,
        "slowest": min(speeds),
        "fastest": max(speeds),
        "MFU %": median(mfu) if mfu else None,
        "memory GiB": max(row.get("memory_gib", 0) for row in rows),
        "reserved GiB": max(row.get("reserved_gib", 0) for row in rows),
        "loss": rows[-1]["loss"],
        "losses": {f"{row['step']:.0f}": row["loss"] for row in rows if row["step"] in LOSSES},
        **(origin(run) if run.attempts else {}),
    }


def origin(run: Run) -> dict[str, Any]:
    """Return a run's device, versions and config, and the FLOPs of a token."""
    began = run.attempts[-1]
    file = run.folder / "config.toml"
    config = check_config([f"--job.config_file={file}"], began["ranks"], training=False)[1]
    args = with_vocabulary(config).model_args()
    weights, seq_len = config.flops_per_token(args, 0), config.batch.seq_len
    command = [word for word in began["command"] if not word.startswith("--job.dump_folder")]
    tflops = config.metrics.peak_tflops
    return {
        "date": began["time"][:10],
        "device": began["device"],
        "ranks": began["ranks"],
        "command": " ".join(command).replace(f"{ROOT}/", ""),
        "commit": commit_of(began["git"]),
        "versions": began["versions"],
        "config": config_hash(file),
        "tokens a step": config.batch.tokens_per_step,
        "FLOPs of weights": weights,
        "FLOPs of attention": config.flops_per_token(args, seq_len) - weights,
        "peak": tflops * 1e12 if tflops else peak_flops(began["device"]),
    }


def commit_of(git: Mapping[str, Any] | None) -> str:
    if not git or "unknown" in git:
        return "unknown"
    return f"{git['commit'][:12]}{' with local changes' * bool(git['dirty'])}"


def config_hash(file: Path) -> str:
    """Return the hash of a config's values: without names, and without defaults, so that new keys
    of a later version do not change it.
    """
    own, default = (
        to_builtins(read(flags)[0].sections) for flags in ([f"--job.config_file={file}"], [])
    )
    values = [
        (section, key, value)
        for section, keys in own.items()
        for key, value in keys.items()
        if (section, key) not in _NAMES and value != default[section].get(key)
    ]
    return hashlib.sha256(json.dumps(sorted(values, key=str)).encode()).hexdigest()[:16]


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row of gpu_gradients.py or gpu_probe.py as text."""
    return f"{row['what']}: {shown(row['value'])} {row['unit']}"


def text_of(card: Mapping[str, Any]) -> str:
    """Return the page of a card."""
    cells: dict[str, dict[str, Any]] = card["cells"]
    made = {name: cell for name, cell in cells.items() if "device" in cell}
    devices = " and ".join(sorted({cell["device"] for cell in made.values()}))
    lines = [f"# {card['title']} on {devices}", "", card.get("note", ""), ""]
    lines += [f"| | {' | '.join(cells)} |", f"|{' --- |' * (len(cells) + 1)}"]
    table = {title: [cell.get(key) for cell in cells.values()] for title, key in _ROWS.items()}
    losses = [cell.get("losses", {}) for cell in cells.values()]
    for step in map(str, LOSSES):
        if any(step in found for found in losses):
            table[f"loss, step {step}"] = [found.get(step) for found in losses]
    table["loss, last step"] = [cell.get("loss") for cell in cells.values()]
    missing = ["not measured" if name in made else "not run" for name in cells]
    for title, values in table.items():
        pairs = zip(values, missing, strict=True)
        texts = [shown(value) if value else instead for value, instead in pairs]
        lines.append(f"| {title} | {' | '.join(texts)} |")
    failed = {name: cell["failed"] for name, cell in cells.items() if "failed" in cell}
    lines += ["", *(f"- {name} failed: {why}" for name, why in failed.items())]
    lines += ["", "## Model FLOPs utilization", "", _FORMULA, *_utilizations(made)]
    lines += ["", "## Gradients of the first step", ""]
    lines += [f"- {line}" for line in card.get("gradients", ["not run"])]
    lines += ["", "## Origin", "", *_origins(made)]
    return "\n".join(lines) + "\n"


def _utilizations(made: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the formula with the numbers of each cell."""
    lines = []
    for name, cell in made.items():
        weights, attention = cell["FLOPs of weights"] / 1e9, cell["FLOPs of attention"] / 1e9
        rate = cell["tokens/s"] * (weights + attention) / 1e3
        text = f"{shown(cell['tokens/s'])} × ({weights:,.4g} + {attention:,.4g}) GFLOP = "
        text += f"{rate:,.4g} TFLOP/s"
        if peak := cell["peak"]:
            text += f", {100e12 * rate / peak:.3g} % of {peak / 1e12:,.4g} TFLOP/s"
        else:
            text += ". The peak of this device is not known: no MFU"
        lines.append(f"- {name}: {text}")
    return lines


def _origins(made: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return dates, commits, configs, commands and versions, those that are equal once."""
    found: dict[str, list[str]] = {}
    for name, cell in made.items():
        versions = ", ".join(" ".join(version) for version in cell["versions"].items())
        texts = [f"{cell['date']}, commit {cell['commit']}", f"config {cell['config']}"]
        for text in (*texts, f"`{cell['command']}`", versions):
            found.setdefault(text, []).append(name)
    return [f"- {', '.join(names)}: {text}" for text, names in found.items()]


if __name__ == "__main__":
    main()
