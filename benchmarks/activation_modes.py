"""Step time, tokens per second and peak memory of each mode of activation checkpointing, eager and
compiled.

    python benchmarks/activation_modes.py  # eager, on the GPU if there is one
    python benchmarks/activation_modes.py --compile both  # and with torch.compile, the budgets too

A Llama on one rank trains on random tokens with titanlite's own build and step. Every cell is a
process of its own, so that its peak is its own, over the counted steps: live bytes of the allocator
on a GPU; on a CPU the high-water mark of resident memory, less what is resident between steps
(weights, optimizer state, what a compiler left behind). Cells stay alive and take turns, one step
each, so that a machine whose speed drifts moves them alike; medians are printed. On a CPU the time
is the process's own: with one thread the step's time on an idle machine. Writes Markdown and JSON
with --out.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Steps of each cell that are not counted: the first sets up FSDP and the optimizer, or compiles.
WARM = 2
EAGER: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "selective, 2": {"mode": "selective", "selective_ac_option": "2"},
    "selective, op": {"mode": "selective", "selective_ac_option": "op"},
    "full": {"mode": "full"},
}
COMPILED = {
    **EAGER,
    "budget 0.5": {"mode": "budget", "memory_budget": 0.5},
    "budget 0.1": {"mode": "budget", "memory_budget": 0.1},
}
#: On a GPU only: a CPU's activations are in host memory already.
OFFLOADED = {
    "none, offload": {"mode": "none", "offload": True},
    "full, offload": {"mode": "full", "offload": True},
}


@dataclass(frozen=True)
class Shape:
    """The model and the micro-batch."""

    dim: int
    layers: int
    heads: int
    vocab: int
    seq: int
    batch: int
    dtype: str


CPU_SHAPE = Shape(dim=256, layers=8, heads=4, vocab=2048, seq=512, batch=4, dtype="float32")
#: Weights and optimizer state of all cells, 4.3 GB each, share the GPU with the activations of one:
#: 80 GB hold all.
GPU_SHAPE = Shape(dim=1024, layers=16, heads=8, vocab=32768, seq=4096, batch=4, dtype="bfloat16")


@dataclass
class Row:
    """One cell, measured."""

    mode: str
    compiled: bool
    #: Seconds of each step; on a CPU the process's own, all threads together.
    seconds: list[float]
    seconds_to_warm: float
    peak_bytes: int
    #: What all blocks keep of one micro-batch by the plan; of no meaning where a compiler
    #: decides.
    kept_bytes: int
    losses: list[float]


def kept_bytes(args: Any, shape: Shape, mode: str, option: str) -> int:
    """Return what all blocks keep of one micro-batch, by the plan."""
    from titanlite.plan.blocks import Shape as RankShape
    from titanlite.plan.blocks import block_ops
    from titanlite.plan.lifetimes import measure

    size = 4 if shape.dtype == "float32" else 2
    ops = block_ops(RankShape(shape.batch * shape.seq, args, size))
    plain = measure(ops, "none").kept
    if mode in ("none", "budget"):
        return shape.layers * plain
    every = int(option) if mode == "selective" and option != "op" else 1
    of_block = "op" if mode == "selective" and option == "op" else "full"
    recomputing = shape.layers // every
    kept = measure(ops, of_block).kept
    return recomputing * kept + (shape.layers - recomputing) * plain


def serve(shape: Shape, plan: dict[str, Any], compiled: bool) -> None:
    """A cell: builds, answers each line on stdin with one step, and says its peak at the end."""
    sys.path.insert(0, str(ROOT))
    import torch
    from msgspec.structs import replace as replace_fields

    from titanlite.config.model_sections import Optimizer
    from titanlite.config.sections import ActivationCheckpoint, Compile, Training
    from titanlite.data.loader import Batch, to_device
    from titanlite.dist.dist_env import DistEnv
    from titanlite.metrics.throughput import reset_peak
    from titanlite.models import LlamaArgs
    from titanlite.optim.guard import FiniteGuard
    from titanlite.optim.optimizer import build_optimizer
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.resolve.load import load_config
    from titanlite.step import PlainRunner, TrainStep

    args = LlamaArgs(
        dim=shape.dim,
        n_layers=shape.layers,
        n_heads=shape.heads,
        vocab_size=shape.vocab,
        max_seq_len=shape.seq,
    )
    with DistEnv.open() as world:
        device = world.device
        run = replace_fields(
            load_config("debug_model.toml", 1),
            training=Training(mixed_precision_param=shape.dtype, compile=compiled),  # type: ignore[arg-type]
            activation_checkpoint=ActivationCheckpoint(**plan),
            compile=Compile(components=["model"]),
        )
        builder = ModelBuilder(run, args, world.build_mesh(), device)
        kept = kept_bytes(args, shape, plan["mode"], plan.get("selective_ac_option", "op"))
        model = builder.build(seed=0)
        optimizer = build_optimizer(dict(model.named_parameters()), Optimizer(), device)
        train_step = TrainStep(
            model, optimizer, PlainRunner(model), FiniteGuard(device), max_norm=1.0
        )
        window = torch.randint(
            0, shape.vocab, (shape.batch, shape.seq + 1), generator=torch.Generator().manual_seed(0)
        )
        batches = to_device(
            [Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())], device
        )
        at_rest = 0
        print(json.dumps({"device": _name(device), "kept": kept}), flush=True)

        def take(step: int) -> float:
            return train_step(batches, step, lr=1e-4).loss.item()  # waits for a GPU

        for turn, _ in enumerate(sys.stdin, start=1):
            if device.type == "cuda":
                take(2 * turn - 1)  # fills the allocator's cache, which the turn before gave back
            began, used = time.perf_counter(), time.process_time()
            loss = take(2 * turn)
            wall, own = time.perf_counter() - began, time.process_time() - used
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the next cell needs it
            if turn == WARM and device.type == "cuda":
                reset_peak(device)
            elif turn == WARM:
                at_rest = _begin_peak()
            print(json.dumps({"wall": wall, "own": own, "loss": loss}), flush=True)
        if device.type == "cuda":
            # What another stream still reads is not allocated any more, but nobody can have it: it
            # is active.
            peak = torch.cuda.memory_stats(device)["active_bytes.all.peak"]
        else:
            peak = _resident("VmHWM:") - at_rest
        print(json.dumps({"peak": peak}), flush=True)


def _begin_peak() -> int:
    """Return freed memory to the system, start a new high-water mark, and say what is resident now,
    in bytes.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS:")


def _resident(key: str) -> int:
    """Bytes of this process in memory: VmRSS: now, VmHWM: at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def _name(device: Any) -> str:
    from titanlite.metrics.throughput import device_name

    return device_name(device)


class Cell:
    """A process that takes a step when told."""

    def __init__(self, shape: Shape, mode: str, plan: dict[str, Any], compiled: bool) -> None:
        self.mode, self.compiled = mode, compiled
        self.wall: list[float] = []
        self.own: list[float] = []
        self.losses: list[float] = []
        settings = json.dumps({"shape": asdict(shape), "plan": plan, "compiled": compiled})
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--cell", settings],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        built = self._read()
        self.device, self.kept = str(built["device"]), int(built["kept"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"the cell {self.mode!r}, compiled {self.compiled}, failed (see above)")

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self._read()
        self.wall.append(answer["wall"])
        self.own.append(answer["own"])
        self.losses.append(answer["loss"])

    def finish(self) -> Row:
        assert self.process.stdin is not None
        self.process.stdin.close()
        peak = int(self._read()["peak"])
        self.process.wait()
        # A GPU works while its process waits; on a CPU other processes take turns, whose time is
        # not this one's.
        seconds = self.own if self.device.startswith("CPU") else self.wall
        warm = sum(self.wall[:WARM])
        return Row(self.mode, self.compiled, seconds[WARM:], warm, peak, self.kept, self.losses)


def table(rows: list[Row], shape: Shape) -> list[str]:
    """Markdown: a row per cell, and its ratios to the first."""
    lines = [
        (
            "| compile | mode | s per step | tokens/s | speed | blocks keep, MiB | peak, MiB | "
            "peak less | s to warm up |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first = rows[0]
    for row in rows:
        # Step by step against the first cell's, which was taken in the same round.
        speed = statistics.median(a / b for a, b in zip(first.seconds, row.seconds, strict=True))
        seconds = statistics.median(row.seconds)
        kept = "" if row.compiled else f"{row.kept_bytes / 2**20:,.1f}"
        lines.append(
            f"| {'on' if row.compiled else 'off'} | {row.mode} | {seconds:.3f} | "
            f"{shape.batch * shape.seq / seconds:,.0f} | {speed:.2f} | {kept} | "
            f"{row.peak_bytes / 2**20:,.0f} | {1 - row.peak_bytes / first.peak_bytes:.0%} | "
            f"{row.seconds_to_warm:.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", choices=["off", "on", "both"], default="off")
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        help=f"counted steps of each cell, after {WARM} that are not",
    )
    parser.add_argument("--modes", nargs="*", help="only these, as the table names them")
    parser.add_argument("--out", type=Path, help="write FILE.md and FILE.json", metavar="FILE")
    for name in asdict(CPU_SHAPE):
        kind = str if name == "dtype" else int
        parser.add_argument(
            f"--{name}", type=kind, help="of the model and batch; see CPU_SHAPE and GPU_SHAPE"
        )
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        settings = json.loads(arguments.cell)
        serve(Shape(**settings["shape"]), settings["plan"], settings["compiled"])
        return

    import torch

    gpu = torch.cuda.is_available()
    given = {
        name: getattr(arguments, name)
        for name in asdict(CPU_SHAPE)
        if getattr(arguments, name) is not None
    }
    shape = Shape(**{**asdict(GPU_SHAPE if gpu else CPU_SHAPE), **given})
    wanted: list[tuple[str, dict[str, Any], bool]] = []
    if arguments.compile != "on":
        wanted += [
            (mode, plan, False) for mode, plan in {**EAGER, **(OFFLOADED if gpu else {})}.items()
        ]
    if arguments.compile != "off":
        wanted += [(mode, plan, True) for mode, plan in COMPILED.items()]
    wanted = [cell for cell in wanted if not arguments.modes or cell[0] in arguments.modes]
    if not wanted:
        parser.error(
            f"--modes {' '.join(arguments.modes)} matches no mode; there are {', '.join(COMPILED)}"
        )
    cells = [Cell(shape, *cell) for cell in wanted]
    for step in range(WARM + arguments.steps):
        for cell in cells:
            cell.step()
        print(f"round {step + 1} of {WARM + arguments.steps}", file=sys.stderr, flush=True)
    rows = [cell.finish() for cell in cells]
    head = (
        f"{cells[0].device}, torch {torch.__version__}; dim {shape.dim}, {shape.layers} layers, "
        f"{shape.heads} heads, vocabulary {shape.vocab:,}, {shape.batch} x {shape.seq} tokens, "
        f"{shape.dtype}; medians of {arguments.steps} steps in turn. Peak: "
        + (
            "live bytes of the allocator in a counted step."
            if gpu
            else "highest resident memory in a counted step less that between steps."
        )
    )
    eager = [row.losses for row in rows if not row.compiled]
    verdict = "equal" if all(losses == eager[0] for losses in eager) else "DIFFERENT"
    same = f"Losses of the {len(eager)} eager cells, bit for bit: {verdict}."
    lines = [head, "", *table(rows, shape), *(["", same] if len(eager) > 1 else [])]
    print("\n".join(lines))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        measured = [asdict(row) for row in rows]
        report = {
            "device": cells[0].device,
            "shape": asdict(shape),
            "command": sys.argv,
            "rows": measured,
        }
        arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
