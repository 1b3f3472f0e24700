"""Grouped products of experts against a loop over the experts: seconds of a forward and backward,
interleaved.

    python benchmarks/experts.py [--json FILE] [--rounds 15]

The loop is what one writes without `torch.nn.functional.grouped_mm`: it reads the counts on the
host and multiplies each expert's rows by itself. Both get the same sorted rows. On a GPU the
products are in bfloat16, on a CPU in both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from titanlite.metrics.throughput import device_name
from titanlite.models.autograd import silu_mul
from titanlite.models.experts.grouped import Experts

#: Tokens of a micro-batch, experts, top_k, dim and width; the last is the debug model.
CPU_SHAPES = [
    (512, 8, 2, 512, 1024),
    (512, 32, 4, 512, 512),
    (2048, 8, 2, 512, 1024),
    (512, 8, 2, 256, 512),
]
#: 8x7B, and many small experts.
CUDA_SHAPES = [(4096, 8, 2, 4096, 14336), (8192, 8, 2, 4096, 14336), (8192, 128, 8, 2048, 768)]


def loop(experts: Experts, x: Tensor, counts: Tensor) -> Tensor:
    """Compute what `experts(x, counts)` does, expert by expert."""
    parts = []
    for rows, w1, w2, w3 in zip(
        x.split(counts.tolist()), experts.w1, experts.w2, experts.w3, strict=True
    ):
        parts.append(silu_mul(rows @ w1.T, rows @ w3.T) @ w2.T)
    return torch.cat(parts)


def seconds(run: Callable[[], Tensor], gradient: Tensor, device: torch.device) -> float:
    """Return the time of a forward and backward."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run().backward(gradient)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, rounds: int
) -> dict[str, object]:
    """Measure one shape: medians of both ways, run by turns, and the median of their ratios."""
    tokens, n_experts, top_k, dim, width = shape
    torch.manual_seed(0)
    with device:
        experts = Experts(n_experts, dim, width)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        experts.to(dtype)
        x = torch.randn(tokens * top_k, dim, dtype=dtype, requires_grad=True)
        # A router is never quite even.
        counts = torch.multinomial(torch.rand(n_experts) + 0.5, len(x), replacement=True).bincount(
            minlength=n_experts
        )
        gradient = torch.randn_like(x)
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 2):
        grouped = seconds(lambda: experts(x, counts), gradient, device)
        times.append((grouped, seconds(lambda: loop(experts, x, counts), gradient, device)))
    times = times[2:]
    return {
        "tokens": tokens,
        "experts": n_experts,
        "top_k": top_k,
        "dim": dim,
        "width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "grouped_ms": 1e3 * median(g for g, _ in times),
        "loop_ms": 1e3 * median(one for _, one in times),
        "ratio": median(one / g for g, one in times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = [torch.bfloat16] if device.type == "cuda" else [torch.float32, torch.bfloat16]
    shapes = CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES
    rows = [measure(shape, dtype, device, options.rounds) for dtype in dtypes for shape in shapes]
    print(f"{device_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(
        "| tokens | experts | top k | dim | width | dtype | grouped, ms | loop, ms | loop / "
        "grouped |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        shown = " | ".join(
            str(r[key]) for key in ("tokens", "experts", "top_k", "dim", "width", "dtype")
        )
        print(f"| {shown} | {r['grouped_ms']:.1f} | {r['loop_ms']:.1f} | {r['ratio']:.2f} |")
    if options.json:
        options.json.write_text(
            json.dumps({"device": device_name(device), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
