"""Rows of the start report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from titanlite.config.sections import Float8
from titanlite.features.float8.choice import Float8Choice

if TYPE_CHECKING:
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.run.features import Row


def float8_rows(
    float8: Float8, numbers: str, choices: Sequence[Float8Choice], builder: ModelBuilder
) -> Iterator[Row]:
    """Return one row of all, and one for each kind of linear. numbers: their format in words."""
    total = sum(len(choice.names) for choice in choices)
    converted = sum(len(choice.names) for choice in choices if choice.converted)
    parts = [numbers]
    if float8.enable_fsdp_float8_all_gather:
        scales = "each scale found as it is"
        if float8.precompute_float8_dynamic_scale_for_fsdp:
            scales = "all scales by one all-reduce after the update"
        parts.append(f"weights gathered in float8, {scales}")
    parts.append(f"{converted:,} of {total:,} linears")
    parts.append(f"M = {builder.run.tokens_at_once:,} tokens in a product of one rank")
    yield "float8", "; ".join(parts)
    for choice in choices:
        size = f"K x N = {choice.size.in_features:,} x {choice.size.out_features:,}"
        what = "in float8" if choice.converted else f"kept: {choice.reason}"
        yield f"  {choice.kind}", f"{size}, {len(choice.names)} {what}"
    if builder.device.type != "cpu" and not builder.compiles("model"):
        yield (
            "warning",
            "float8 without training.compile is slower than bf16: scaling and rounding run as "
            "kernels of their own. Set training.compile = true",
        )
