"""Linears with adapters: after float8's conversion.

    add_adapters(model, adapters, dropout, frozen_dtype)    # on the meta device
    freeze(model)                                           # before `fully_shard`

An adapter is two parameters of the linear itself. So the names of all other parameters stay, and
weights load as those of a model without adapters.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.checkpoint.state_dict import adapter_names
from titanlite.features.lora.settings import DOWN, UP, Adapters
from titanlite.parallel.feature_linear import FeatureLinear
from titanlite.parallel.fsdp_private import prefetched_in_backward, shares_group


def add_adapters(
    model: nn.Module, adapters: Adapters, dropout: float, frozen_dtype: torch.dtype
) -> None:
    """Give the linears of a model or pipeline stage on the meta device their adapters, in place.

    Adapters take over the dtype of the weights, which get `frozen_dtype`. Raises TypeError for a
    target that is no linear.
    """
    modules = dict(model.named_modules())
    targets: dict[str, Any] = {name: modules[name] for name in adapters.sizes if name in modules}
    for name, module in targets.items():
        if not isinstance(module, nn.Linear):
            raise TypeError(f"{name} is a {type(module).__name__}, and adapters belong to linears")
    dtypes = {name: module.weight.dtype for name, module in targets.items()}
    for parameter in model.parameters():
        if parameter.dtype != frozen_dtype:
            parameter.data = parameter.data.to(frozen_dtype)
    for name, linear in targets.items():
        options: dict[str, Any] = {"dtype": dtypes[name], "device": linear.weight.device}
        down = torch.empty(adapters.rank, linear.in_features, **options)
        up = torch.empty(linear.out_features, adapters.rank, **options)
        linear.register_parameter(DOWN, nn.Parameter(down))
        linear.register_parameter(UP, nn.Parameter(up))
        kind: Any = type(linear)
        linear.__class__ = _adapted(kind)
        linear.adapter_rank = adapters.rank
        linear.scale = adapters.scale
        # Activation checkpointing looks for a rate of this name, to draw the same numbers again.
        linear.dropout = dropout


def freeze(model: nn.Module) -> None:
    """Let only adapters have gradients."""
    trained = adapter_names(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def skip_unused_gathers(model: nn.Module) -> None:
    """Let no backward gather groups before the first adapter, as a frozen embedding.

    torch gathers one group ahead, and the backward never comes to these. Call it after
    `fully_shard`.
    """
    idle: list[FSDPModule] = []
    first: FSDPModule | None = None
    for module in model.modules():
        # Modules of one group share its weights, which may be needed later.
        if not isinstance(module, FSDPModule) or module is model or shares_group(module):
            continue
        if adapter_names(module):
            first = module
            break
        idle.append(module)
    if first is None or not idle:
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            later = prefetched_in_backward(module)
            needed = [one for one in later if one not in idle]
            if module is first or len(needed) < len(later):
                # Gathered already; an empty list would mean torch's own choice.
                module.set_modules_to_backward_prefetch(needed or [module])


# One class for all linears of a kind: `torch.compile` compiles each class again.
@functools.cache
def _adapted(cls: type[nn.Linear]) -> type[nn.Linear]:
    base: Any = cls

    class Adapted(base, FeatureLinear):
        adapters = (DOWN, UP)
        scale: float
        dropout: float
        lora_a: Tensor
        lora_b: Tensor

        def forward(self, x: Tensor) -> Tensor:
            # The base may not change its input: gradients of both need it.
            whole = super().forward(x)
            if self.dropout and self.training:
                # It keeps a byte for each number, on CPUs too.
                x = torch.native_dropout(x, self.dropout, True)[0]
            # The factor is applied where rows are shortest.
            added = F.linear(F.linear(x, self.lora_a) * self.scale, self.lora_b)
            return cast(Tensor, whole + added)

    Adapted.__name__ = Adapted.__qualname__ = f"Adapted{cls.__name__}"
    return Adapted
