"""The targets of benchmarks/gpu.py on one H200, each with its source and its arithmetic.

A published figure is a target as it stands. Others are sums of a step's parts. A run is to reach
`SHARE` of such a sum, which leaves out what nobody has counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Llama 3 8B: parameters, vocabulary, width, blocks; width of keys and values, of feed-forwards.
PARAMETERS, VOCABULARY, WIDTH, BLOCKS = 8_030_261_248, 128_256, 4096, 32
EMBEDDING = VOCABULARY * WIDTH
#: Dense bf16, by NVIDIA's data sheet.
PEAK = 989e12

# KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md at 9f3f03a, row 1 (one H200). Its
# MFU counts the embedding's parameters, as its FLOPs show: 57.8 % there are 54.5 % by our formula.
RIVAL_TOKENS, RIVAL_MFU, RIVAL_SEQUENCE = 10_471, 57.8, 4096
# The four levels of AWS's SageMaker text, 32 H100: tokens/s and loss after 2,000 steps.
LEVEL_2_TOKENS, LEVEL_4_TOKENS = 7166, 8950
LEVEL_2_LOSS, LEVEL_3_LOSS = 3.601, 3.612

#: Assumed: 89 % of the 787 TFLOP/s that the H200 reached for 8192 x 8192 (results/gpu.md).
PRODUCTS = 700e12
#: Speed in float8 over bf16: twice, by the share that published runs reach (plan/rates.py).
FLOAT8 = 2 * 0.95
#: cuDNN's forward on an H100 (pytorch issue 142132). The backward takes 2.5 times as long, since it
#: computes the scores again; the causal mask leaves half.
ATTENTION = 631e12
#: Bytes per second that the H200 copied (results/gpu.md).
COPY = 4.267e12
#: Bytes that an update moves per parameter: weight and state read and written, the gradient read
#: for the norm and for the update. AdamW in fp32; bf16 with Kahan is many kernels, as the null GPU
#: counts them (titanlite/plan/optimizer.py).
UPDATE, UPDATE_KAHAN = 32, 206
#: By `titanlite plan`: seconds of the kernels between products, and of casts to float8.
TRAFFIC, CASTS = 0.0672, 0.0348
#: Assumed: gaps between kernels, and the loss in pieces.
REST = 0.03
TOKENS = 8192
SHARE = 0.93


def flops(sequence: int, embedding: int = EMBEDDING) -> float:
    """Return the model's FLOPs of a token. embedding: parameters that do not count."""
    return 6 * (PARAMETERS - embedding) + 12 * BLOCKS * WIDTH * sequence


def step_seconds(float8: bool = False) -> float:
    """Return the seconds of a micro-batch of 8,192 tokens without the update."""
    blocks = 6 * (PARAMETERS - 2 * EMBEDDING) * TOKENS / PRODUCTS
    head = 6 * EMBEDDING * TOKENS / PRODUCTS
    attention = 3.5 * 2 * BLOCKS * WIDTH * TOKENS**2 / ATTENTION
    products = blocks / FLOAT8 + CASTS if float8 else blocks
    return products + head + attention + TRAFFIC + REST


def tokens_per_second(micro_batches: int, update: float, float8: bool = False) -> float:
    """Return the sum of a step's parts as a speed."""
    seconds = micro_batches * step_seconds(float8) + update * PARAMETERS / COPY
    return micro_batches * TOKENS / seconds


def shown(value: float) -> str:
    """Return a figure as text."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Target:
    """A figure of a row, alone or against another row, that is to be reached."""

    row: str
    figure: str
    bound: float
    source: str
    #: The row whose figure it is divided by, or for a loss the one that it is near to.
    against: str = ""

    def found(self, rows: Mapping[str, Mapping[str, Any]]) -> float | None:
        """Return the figure; None where it is not measured."""
        names = [self.row, self.against] if self.against else [self.row]
        values = [rows.get(name, {}).get(self.figure) for name in names]
        if None in values:
            return None
        if self.figure == "loss":
            return abs(values[0] - values[1])
        return values[0] / values[1] if self.against else values[0]

    def line(self, rows: Mapping[str, Mapping[str, Any]]) -> str:
        """Return the target, its source and what came of it."""
        loss = self.figure == "loss"
        about = f"{self.figure}{f' against {self.against}' * bool(self.against)}"
        about = f"{about} {'at most' if loss else 'at least'} {self.bound:,g}"
        found = self.found(rows)
        if found is None:
            return f"- {self.row}: {about} ({self.source}): not measured"
        met = found <= self.bound if loss else found >= self.bound
        verdict = "met" if met else "missed"
        return f"- {self.row}: {about} ({self.source}): {verdict}, {shown(found)}"


SUM = "93 % of the sum of the parts in benchmarks/gpu_targets.py"
TARGETS = (
    Target("rival", "tokens/s", RIVAL_TOKENS, "KempnerForge on one H200, 54.5 % MFU"),
    Target("bf16", "tokens/s", round(SHARE * tokens_per_second(1, UPDATE), -2), SUM),
    Target("float8", "tokens/s", round(SHARE * tokens_per_second(1, UPDATE, True), -2), SUM),
    Target("kahan", "tokens/s", round(SHARE * tokens_per_second(4, UPDATE_KAHAN), -2), SUM),
    Target(
        "float8",
        "tokens/s",
        round(LEVEL_4_TOKENS / LEVEL_2_TOKENS, 2),
        "AWS's levels 4 and 2, 8,950 and 7,166 on 32 H100",
        "bf16",
    ),
    Target(
        "loss-float8",
        "loss",
        0.02,
        "AWS's levels 2 and 3 differ by 0.011 after 2,000 steps; twice that",
        "loss-bf16",
    ),
)
