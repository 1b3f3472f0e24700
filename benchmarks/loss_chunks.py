"""What a loss in chunks saves and costs: step time and peak memory by number of chunks.

    python benchmarks/loss_chunks.py                        # a small model with a large vocabulary
    python benchmarks/loss_chunks.py --dtype bfloat16 --chunks 1 8 64

On one rank with titanlite's own build and step, on random tokens, on the GPU if there is one. All
models are of one process and take turns, one step each, so that a machine whose speed drifts moves
them alike; medians of the steps and of the ratios within a round are printed. On a CPU the time is
the process's own, and the peak is the high-water mark of resident memory in a step, less what was
resident before it; on a GPU it is the allocator's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from titanlite.config.model_sections import Optimizer
from titanlite.data.loader import Batch, to_device
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics.throughput import device_name
from titanlite.models import LlamaArgs
from titanlite.optim.guard import FiniteGuard
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.resolve.load import load_config
from titanlite.step import PlainRunner, TrainStep

MIB = 2**20


def resident(key: str) -> int:
    """Bytes of this process in memory: VmRSS: now, VmHWM: at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class Cell:
    """A model with a number of chunks, and what its steps took."""

    def __init__(self, world: DistEnv, args: LlamaArgs, chunks: int, dtype: Any) -> None:
        self.chunks, self.device = chunks, world.device
        flags = [
            f"--training.mixed_precision_param={dtype}",
            f"--training.loss_chunks={chunks}",
        ]
        run = load_config("debug_model.toml", 1, flags)
        builder = ModelBuilder(run, args, world.build_mesh(), self.device)
        model = builder.build(seed=0)
        optimizer = build_optimizer(dict(model.named_parameters()), Optimizer(), self.device)
        runner = PlainRunner(model, builder.loss())
        self.train_step = TrainStep(
            model, optimizer, runner, FiniteGuard(self.device), max_norm=1.0
        )
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.loss = 0.0

    def take(self, step: int, batches: list[Batch]) -> None:
        """One measured step."""
        cuda = self.device.type == "cuda"
        gc.collect()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            rest = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            rest = resident("VmRSS:")
        began = time.perf_counter() if cuda else time.process_time()
        self.loss = self.train_step(batches, step, lr=1e-4).loss.item()  # waits for a GPU
        self.seconds.append((time.perf_counter() if cuda else time.process_time()) - began)
        self.peaks.append(
            (torch.cuda.max_memory_allocated() if cuda else resident("VmHWM:")) - rest
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chunks",
        type=int,
        nargs="+",
        default=[1, 4, 16],
        help="the first is what others are held to",
    )
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    args = LlamaArgs(
        options.dim, options.layers, n_heads=4, vocab_size=options.vocab, max_seq_len=options.seq
    )
    window = torch.randint(
        0, options.vocab, (options.batch, options.seq + 1), generator=torch.manual_seed(0)
    )
    with DistEnv.open() as world:
        batches = to_device(
            [Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())], world.device
        )
        cells = [Cell(world, args, chunks, options.dtype) for chunks in options.chunks]
        for turn in range(options.rounds + 1):
            for cell in cells:
                cell.take(turn + 1, batches)
        logits = 4 * options.batch * options.seq * options.vocab
        print(
            f"{device_name(world.device)}, {torch.get_num_threads()} threads, torch "
            f"{torch.__version__}; {options.dtype}, dim {options.dim}, {options.layers} blocks, "
            f"vocabulary {options.vocab:,}, {options.batch} x {options.seq} tokens: "
            f"{logits / MIB:,.0f} MiB of logits in float32; {options.rounds} rounds\n"
        )
        print("| chunks | s per step | ratio (min–max) | peak of a step, MiB | loss |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        for cell in cells:
            ratios = [a / b for a, b in zip(cell.seconds[1:], cells[0].seconds[1:], strict=True)]
            print(
                f"| {cell.chunks} | {statistics.median(cell.seconds[1:]):.2f} | "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) | "
                f"{statistics.median(cell.peaks[1:]) / MIB:,.0f} "
                f"| {cell.loss:.5f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
