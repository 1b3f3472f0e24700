"""Write an evidence card: a page with what runs of one config on one device showed.

    python benchmarks/card.py '1 rank=RUN_FOLDER' 'compiled' --out docs/cards/NAME.md

A cell is a name and the folder of its run; a name alone is a cell that is not run. The cells are
kept in NAME.json: later calls add to it, and without cells the page is written again from it.
--gradients reads what benchmarks/gpu_gradients.py printed. A run for a card logs every step
(metrics.log_freq = 1). benchmarks/gpu.py writes the cards of its rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from msgspec import to_builtins  # noqa: E402

from titanlite.config.load import read  # noqa: E402
from titanlite.plan.hardware import peak_flops  # noqa: E402
from titanlite.plan.memory import with_vocabulary  # noqa: E402
from titanlite.resolve.load import check_config  # noqa: E402
from titanlite.runs.read import Run, read_run  # noqa: E402
from titanlite.utils import atomic_write  # noqa: E402

#: Steps before those whose speed counts.
WARMUP = 4
#: Steps whose loss a card shows, besides the last.
LOSSES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
#: Keys that say where a run lies and what it is called, not what it does.
_NAMES = ("dump_folder", "description", "config_file", "extends", "print_config")
NOT_RUN = "not run"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", metavar="CELL[=RUN_FOLDER]")
    parser.add_argument("--out", type=Path, required=True, metavar="NAME.md")
    parser.add_argument("--gradients", type=Path, metavar="FILE", help="of gpu_gradients.py")
    parser.add_argument("--note", help="what a reader must know of all cells")
    asked = parser.parse_args()
    named = (cell.partition("=")[::2] for cell in asked.cells)
    added = {name: figures(Path(folder)) if folder else {} for name, folder in named}
    gradients = json.loads(asked.gradients.read_text()) if asked.gradients else None
    lines = None if gradients is None else [line_of(row) for row in gradients]
    write(asked.out, added, lines, asked.note)
    print(asked.out.read_text())


def write(
    page: Path,
    added: Mapping[str, Mapping[str, Any]],
    gradients: Sequence[str] | None = None,
    note: str | None = None,
) -> None:
    """Add cells to a card, whose page has a JSON file beside it. Others stay as they are."""
    store = page.with_suffix(".json")
    card = json.loads(store.read_text()) if store.exists() else {"cells": {}}
    card["cells"] |= added
    new = {"gradients": gradients, "note": note}
    card |= {name: value for name, value in new.items() if value is not None}
    page.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(store, json.dumps(card, indent=1) + "\n")
    atomic_write(page, text_of(card))


def figures(folder: Path) -> dict[str, Any]:
    """Return what the steps of a run showed. Raises RunError for a folder that is no run."""
    run = read_run(folder)
    rows = [row for row in run.training if "tps" in row]
    speeds = [row["tps"] for row in rows[WARMUP:]]
    if len(speeds) < 2:
        return {"steps": len(rows)}
    low, middle, high = quantiles(speeds, n=4, method="inclusive")
    mfu = [row["mfu"] for row in rows[WARMUP:] if "mfu" in row]
    return {
        "steps": len(rows),
        "tokens/s": middle,
        "quartiles": [low, high],
        "slowest": min(speeds),
        "fastest": max(speeds),
        "MFU %": median(mfu) if mfu else None,
        "memory GiB": max(row.get("memory_gib", 0) for row in rows),
        "reserved GiB": max(row.get("reserved_gib", 0) for row in rows),
        "loss": rows[-1]["loss"],
        "losses": {int(row["step"]): row["loss"] for row in rows if row["step"] in LOSSES},
        **(origin(run) if run.attempts else {}),
    }


def origin(run: Run) -> dict[str, Any]:
    """Return what a run was: its device, versions and config, and the model's FLOPs of a token."""
    began = run.attempts[-1]
    file = run.folder / "config.toml"
    command = [word for word in began["command"] if not word.startswith("--job.dump_folder")]
    flags = [f"--job.config_file={file}"]
    config = check_config(flags, began["ranks"], training=False)[1]
    args = with_vocabulary(config).model_args()
    device = began["device"]
    weights, seq_len = config.flops_per_token(args, 0), config.batch.seq_len
    tflops = config.metrics.peak_tflops
    return {
        "date": str(began["time"])[:10],
        "device": device,
        "ranks": began["ranks"],
        "command": [word.replace(f"{ROOT}/", "") for word in command],
        "git": began["git"],
        "versions": began["versions"],
        "config": config_hash(file),
        "seq_len": seq_len,
        "tokens a step": config.batch.tokens_per_step,
        "FLOPs of weights": weights,
        "FLOPs of attention": config.flops_per_token(args, seq_len) - weights,
        "peak": tflops * 1e12 if tflops else peak_flops(device),
    }


def config_hash(file: Path) -> str:
    """Return the hash of a config's values: without comments, and without names of folders."""
    sections = to_builtins(read([f"--job.config_file={file}"])[0].sections)
    for name in _NAMES:
        sections["job"].pop(name, None)
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row of gpu_gradients.py or gpu_probe.py as text."""
    return f"{row['what']}: {shown(row['value'])} {row['unit']}"


def shown(value: float) -> str:
    """Return a figure as text."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def text_of(card: Mapping[str, Any]) -> str:
    """Return the page of a card."""
    cells: dict[str, dict[str, Any]] = card["cells"]
    made = {name: cell for name, cell in cells.items() if "device" in cell}
    files = {Path(word.partition("=")[2]).name for cell in made.values() for word in _files(cell)}
    devices = {cell["device"] for cell in made.values()}
    lines = [f"# {' and '.join(sorted(files))} on {' and '.join(sorted(devices))}", ""]
    if note := card.get("note"):
        lines += [note, ""]
    lines += [f"| | {' | '.join(cells)} |", f"|{' --- |' * (len(cells) + 1)}"]
    steps = [n for n in LOSSES if any(str(n) in _losses(cell) for cell in cells.values())]
    loss_rows = {f"loss of step {n}": _loss(n) for n in steps}
    for title, value in {**ROWS, **loss_rows, "loss of the last step": _figure("loss")}.items():
        values = [value(cell) for cell in cells.values()]
        if set(values) != {NOT_RUN}:
            lines.append(f"| {title} | {' | '.join(values)} |")
    lines += ["", "## Model FLOPs utilization", "", *_mfu(made)]
    lines += ["", "## Gradients of step 1", ""]
    lines += [f"- {line}" for line in card.get("gradients") or [NOT_RUN]]
    lines += ["", "## Origin", "", *_origins(made)]
    return "\n".join(lines) + "\n"


def _files(cell: Mapping[str, Any]) -> list[str]:
    return [word for word in cell["command"] if word.startswith("--job.config_file=")]


def _losses(cell: Mapping[str, Any]) -> dict[str, float]:
    return {str(step): loss for step, loss in cell.get("losses", {}).items()}


Show = Callable[[Mapping[str, Any]], str]


def _figure(name: str) -> Show:
    """Return how a cell shows a figure; 0 is one that this device has not."""
    return lambda cell: shown(cell[name]) if cell.get(name) else NOT_RUN


def _loss(step: int) -> Show:
    return lambda cell: f"{_losses(cell)[str(step)]:.4f}" if str(step) in _losses(cell) else NOT_RUN


def _spread(cell: Mapping[str, Any]) -> str:
    return " to ".join(map(shown, cell["quartiles"])) if "quartiles" in cell else NOT_RUN


def _steps(cell: Mapping[str, Any]) -> str:
    done = cell.get("steps")
    return f"{done}, speed of the last {done - WARMUP}" if "loss" in cell else NOT_RUN


ROWS: dict[str, Show] = {
    "ranks": _figure("ranks"),
    "tokens a step": _figure("tokens a step"),
    "steps": _steps,
    "tokens/s and device, median": _figure("tokens/s"),
    "quartiles": _spread,
    "slowest step": _figure("slowest"),
    "fastest step": _figure("fastest"),
    "MFU, %": _figure("MFU %"),
    "peak memory of a rank, GiB": _figure("memory GiB"),
    "reserved by the allocator, GiB": _figure("reserved GiB"),
}


def _mfu(made: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        "MFU = tokens/s and device × FLOPs of a token / peak of the device. A token has 6 FLOPs a "
        "weight that is multiplied, and 12 × layers × heads × head_dim × seq_len for attention.",
        "",
    ]
    for name, cell in made.items():
        weights, attention = cell["FLOPs of weights"], cell["FLOPs of attention"]
        total = weights + attention
        parts = f"{weights / 1e9:,.4g} + {attention / 1e9:,.4g} GFLOP at {cell['seq_len']:,} tokens"
        rate = cell["tokens/s"] * total / 1e12
        text = f"- {name}: {cell['tokens/s']:,.1f} × ({parts}) = {rate:,.4g} TFLOP/s"
        peak = cell["peak"]
        mfu = f"; / {peak / 1e12:,.4g} TFLOP/s = {100 * rate * 1e12 / peak:.1f} %" if peak else ""
        lines.append(text + (mfu or "; the peak of this device is not known, so no MFU"))
    return lines


def _origins(made: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    versions: dict[str, list[str]] = {}
    for name, cell in made.items():
        git = cell["git"] or {"commit": "unknown", "dirty": False}
        commit = git["commit"][:12] + " with local changes" * bool(git["dirty"])
        lines.append(f"- {name}: {cell['date']}, commit {commit}, config {cell['config']}:")
        lines.append(f"  `{' '.join(cell['command'])}`")
        said = ", ".join(f"{package} {version}" for package, version in cell["versions"].items())
        versions.setdefault(said, []).append(name)
    return lines + [f"- {', '.join(names)}: {said}" for said, names in versions.items()]


if __name__ == "__main__":
    main()
