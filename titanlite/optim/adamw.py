"""AdamW with a dtype per state and Kahan summation for weights in bfloat16."""

from __future__ import annotations

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

    The arithmetic is in float32; a step rounds its results once, when it stores them.
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
