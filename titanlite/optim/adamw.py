"""AdamW with a dtype per state and Kahan summation for weights in bfloat16, and AdamW with moments
of 8 bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from titanlite.dist.local_parts import local
from titanlite.optim.gated import GatedOptimizer

#: Keys of `[optimizer]` with the dtype of a state each.
STATE_DTYPES = ("momentum_dtype", "variance_dtype", "compensation_dtype")


class AnyPrecisionAdamW(GatedOptimizer):
    """AdamW (Loshchilov and Hutter, 2019).

    With all dtypes float32 and no Kahan summation it is torch's, to rounding.

    A weight in bfloat16 has 8 bits of precision: an update below 1/256 of it rounds away, and
    training stagnates. Kahan summation keeps what was rounded away, and adds it to the next update
    (Kahan, 1965; Zamirai et al., 2020, arXiv:2010.06192).

    The arithmetic is in float32; a step rounds its results once, when it stores them. Bytes per
    parameter besides weight and gradient: those of momentum and variance, and of the compensation
    with `kahan`.
    """

    def __init__(  # noqa: PLR0913
        self,
        parameters: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        kahan: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.bfloat16,
        compensation_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.kahan, self.momentum_dtype, self.variance_dtype = kahan, momentum_dtype, variance_dtype
        self.compensation_dtype = compensation_dtype

    def update(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        """Take AdamW's step on each parameter."""
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            weight, gradient = local(parameter), self.gradient_of(parameter)
            step = self.state[parameter]["step"]
            first = self.average(parameter, "exp_avg", self.momentum_dtype, gradient, beta1)
            second = self.average(
                parameter, "exp_avg_sq", self.variance_dtype, gradient.square(), beta2
            )
            size = group["lr"] / (1 - beta1**step)
            change = first.mul_(-size).div_((second / (1 - beta2**step)).sqrt_().add_(group["eps"]))
            # The decay goes through the same sum: a factor 1 - lr * decay alone rounds to 1 in
            # bfloat16.
            change.add_(weight, alpha=-group["lr"] * group["weight_decay"])
            if not self.kahan:
                self.store(weight, weight + change)
                continue
            rest = self.buffer(parameter, "compensation", self.compensation_dtype)
            change.add_(rest)
            result = (weight + change).to(weight.dtype)
            self.store(rest, change - (result.float() - weight))
            self.store(weight, result)

    def average(
        self,
        parameter: torch.nn.Parameter,
        name: str,
        dtype: torch.dtype,
        value: torch.Tensor,
        decay: float,
    ) -> torch.Tensor:
        """Move a running average towards `value`; store it as `dtype`, and return it in float32."""
        stored = self.buffer(parameter, name, dtype)
        moved = stored.float().lerp(value, 1 - decay)
        self.store(stored, moved)
        return moved


#: Elements that share a scale at most; ranks that may cut a row without cutting a block; elements
#: below which a tensor stays in float32, as do all whose rows do not divide into blocks of `_LEAST`
#: on that many ranks.
_BLOCK, _CUTS, _SMALL, _LEAST = 256, 8, 4096, 32


def block_of(shape: torch.Size) -> int:
    """Return how many neighbours in a row share a scale; 0: moments of this shape stay in
    float32.
    """
    block = min(_BLOCK, math.gcd(shape[-1], _BLOCK * _CUTS) // _CUTS) if len(shape) > 1 else 0
    return block if shape.numel() >= _SMALL and block >= _LEAST else 0


@functools.cache
def _levels(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 256 values of a code, rising, and the 255 borders between them.

    They are torchao's, whose import takes seconds: seven decades, each in twice the steps of that
    below.
    """
    values = torch.tensor([0.0, 1.0])
    for decade in range(7):
        steps = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        means = 10.0 ** (decade - 6) * (steps[:-1] + steps[1:]) / 2
        values = torch.cat([values, means, *([-means] if signed else [])])
    values = values.sort().values.to(device)
    return values, (values[:-1] + values[1:]) / 2


class AdamW8bit(AnyPrecisionAdamW):
    """AdamW whose moments are codes of 8 bits with one float32 scale for each block of a row.

    After Dettmers et al., 2021, arXiv:2110.02861, in torchao's number format. Moments are sharded
    as the weights, not flat, and checkpoints load on any mesh that cuts no block.
    """

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, variance_dtype=torch.float32, **options)

    def average(
        self,
        parameter: torch.nn.Parameter,
        name: str,
        dtype: torch.dtype,
        value: torch.Tensor,
        decay: float,
    ) -> torch.Tensor:
        block = block_of(parameter.shape)
        if not block:
            return super().average(parameter, name, dtype, value, decay)
        codes = self.buffer(parameter, name, torch.uint8)
        scales = self.buffer(
            parameter, f"{name}_scale", torch.float32, parameter.shape[-1] // block
        )
        signed = name == "exp_avg"
        values, borders = _levels(signed, codes.device)
        old = values.index_select(0, codes.flatten().int()).view(scales.shape + (block,))
        old = old.mul_(scales.unsqueeze(-1)).view(codes.shape)
        moved = old.lerp(value, 1 - decay)
        blocks = moved.unflatten(-1, (scales.shape[-1], block))
        largest = blocks.abs().amax(-1).clamp(min=1e-12)
        nearest = torch.bucketize(
            blocks / largest.unsqueeze(-1), borders, out_int32=True, right=True
        )
        self.store(codes, nearest.flatten(-2))
        self.store(scales, largest)
        return moved
