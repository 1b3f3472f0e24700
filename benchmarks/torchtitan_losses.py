"""The same weights and batches through torchtitan 0.2.2 and through titanlite: losses and gradient
norms, step by step.

    python benchmarks/torchtitan_losses.py [--peer-environment FOLDER] [--write]

Both trainers run under torchrun with their own Trainer, FSDP, loss, clipping, optimizer and
schedule, for the 4 steps that `equal_start.py` describes: grouped queries, scaled RoPE,
accumulation, sequences of unequal length, warm-up, decay, clipping in some steps. Exit code 1 if a
float32 loss differs by more than the tolerance. --write stores torchtitan's numbers for the test
that repeats titanlite's side without torchtitan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equal_start
from peer import DEFAULT_ENVIRONMENT, ROOT, TITAN_SCRIPT, TITAN_VERSION, peer_python, torchrun

GOLDEN = ROOT / "tests" / "training" / "torchtitan_losses.json"
#: Largest difference of a float32 loss, in nats per token.
TOLERANCE = 1e-5
Rows = list[dict[str, float]]


@dataclass(frozen=True)
class Cell:
    dtype: str
    ranks: int


#: On 1 rank torchtitan uses no FSDP: its bfloat16 is then autocast, other arithmetic than ours.
#: Bfloat16 is shown but neither judged nor stored: between CPUs with other instructions one
#: trainer's own losses differ by up to 3e-3.
CELLS = [Cell("float32", 1), Cell("float32", 2), Cell("bfloat16", 2)]


def _run(command: list[str], **environment: str) -> None:
    # Both trainers leave files in the working directory.
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command,
            cwd=scratch,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stdout[-4000:]}")


def _read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_torchtitan(python: str, cell: Cell, folder: Path) -> Rows:
    record = folder / "torchtitan.jsonl"
    flags = {
        **equal_start.torchtitan_flags(),
        "model.name": "llama3",
        "model.flavor": "bench",
        "job.dump_folder": folder / "torchtitan",
        "training.mixed_precision_param": cell.dtype,
    }
    arguments = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    model = json.dumps(equal_start.torchtitan_model())
    command = torchrun(python, cell.ranks, TITAN_SCRIPT, arguments)
    _run(command, TITAN_BENCH_MODEL=model, TITAN_BENCH_RECORD=str(record))
    return _read(record)


def run_titanlite(cell: Cell, folder: Path) -> Rows:
    record = folder / "titanlite.jsonl"
    arguments = ["--inside", str(record), cell.dtype]
    _run(
        torchrun(sys.executable, cell.ranks, str(Path(__file__).resolve()), arguments),
        PYTHONPATH=str(ROOT),
    )
    return _read(record)


def inside(record: Path, dtype: str) -> None:
    """One rank of titanlite's side."""
    from titanlite.dist.dist_env import DistEnv

    with DistEnv.open(device_type="cpu") as world:
        rows = equal_start.train_titanlite(
            world, record.parent, f"--training.mixed_precision_param={dtype}"
        )
        if world.rank == 0:
            record.write_text("".join(json.dumps(row) + "\n" for row in rows))


def show(cell: Cell, theirs: Rows, ours: Rows) -> float:
    """Print both side by side; the largest difference of a loss."""
    print(f"\n{cell.dtype}, {cell.ranks} rank{'s' if cell.ranks > 1 else ''}")
    print(
        "step        lr   torchtitan   titanlite      |diff|      norm, theirs       ours   "
        "relative"
    )
    worst = 0.0
    for a, b in zip(theirs, ours, strict=True):
        if (a["step"], round(a["lr"], 12)) != (b["step"], round(b["lr"], 12)):
            raise SystemExit(f"not the same step or learning rate: torchtitan {a}, titanlite {b}")
        off, norm_off = abs(a["loss"] - b["loss"]), abs(a["grad_norm"] / b["grad_norm"] - 1)
        worst = max(worst, off)
        print(
            f"{a['step']:4}  {a['lr']:8.6f}  {a['loss']:10.7f}  {b['loss']:10.7f}  {off:10.1e}"
            f"    {a['grad_norm']:12.7f} {b['grad_norm']:10.7f}  {norm_off:9.1e}"
        )
    print(f"largest difference of a loss: {worst:.1e}")
    return worst


def golden(runs: dict[Cell, Rows]) -> dict[str, Any]:
    import torch

    return {
        "about": "Logged by torchtitan itself. Made by: python benchmarks/torchtitan_losses.py --write",  # noqa: E501
        "torchtitan": TITAN_VERSION,
        "torch": torch.__version__,
        "runs": [
            {"dtype": cell.dtype, "ranks": cell.ranks, "steps": rows}
            for cell, rows in runs.items()
            if cell.dtype == "float32"
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer-environment", type=Path, default=DEFAULT_ENVIRONMENT, metavar="FOLDER"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"store torchtitan's numbers in {GOLDEN.relative_to(ROOT)}",
    )
    parser.add_argument("--inside", nargs=2, metavar=("FILE", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(Path(arguments.inside[0]), arguments.inside[1])
        return
    python = peer_python(arguments.peer_environment)
    runs: dict[Cell, Rows] = {}
    failed = False
    for cell in CELLS:
        with tempfile.TemporaryDirectory() as folder:
            runs[cell] = run_torchtitan(python, cell, Path(folder))
            worst = show(cell, runs[cell], run_titanlite(cell, Path(folder)))
        failed |= cell.dtype == "float32" and worst > TOLERANCE
    if arguments.write:
        GOLDEN.write_text(json.dumps(golden(runs), indent=1) + "\n")
        print(f"\nwritten: {GOLDEN.relative_to(ROOT)}")
    if failed:
        raise SystemExit(f"a float32 loss differs by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
