"""The optimizer of section `[optimizer]`, and steps that a flag on the device can hold back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from titanlite.config.model_sections import Optimizer
from titanlite.dist.local_parts import local
from titanlite.optim.groups import Scales, parameter_groups
from titanlite.utils import is_dotted


class Adam(torch.optim.Adam):
    """torch's Adam on this rank's parts; its state keeps the sharding of the parameters.

    All operators are elementwise, so numbers are the same; DTensor would dispatch each more slowly.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        is_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return bool(is_complex)


class AdamW(Adam, torch.optim.AdamW):
    """torch's AdamW, in the same way."""


def build_optimizer(
    parameters: dict[str, nn.Parameter],
    settings: Optimizer,
    device: torch.device,
    blocks: Collection[str] = (),
    scales: Scales | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer of section `[optimizer]`; `gated_step` sets its rates at every step.

    parameters: all of a model, by name. blocks: their names; Muon takes their matrices. scales: of
    rates and epsilons, for a built-in optimizer.

    Raises TypeError for an object that is no optimizer, and ConfigError for a class that refuses
    its arguments.
    """
    if is_dotted(settings.name):
        from titanlite.optim.custom import build_custom

        return keep_ratios(build_custom(parameters, settings, device), settings.peak_lr)
    groups = parameter_groups(parameters, settings, blocks, scales)
    common: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    optimizer: torch.optim.Optimizer
    if settings.name == "AnyPrecisionAdamW":
        from titanlite.optim.adamw import STATE_DTYPES, AnyPrecisionAdamW

        dtypes = {name: getattr(torch, getattr(settings, name)) for name in STATE_DTYPES}
        optimizer = AnyPrecisionAdamW(groups, **common, kahan=settings.kahan, **dtypes)
    elif settings.name == "Muon":
        from titanlite.optim.muon import Muon

        optimizer = Muon(groups, **common, momentum=settings.momentum)
    else:
        kind = {"AdamW": AdamW, "Adam": Adam}[settings.name]
        how = settings.implementation or ("fused" if device.type == "cuda" else "foreach")
        optimizer = kind(groups, **common, fused=how == "fused", foreach=how == "foreach")
    return keep_ratios(optimizer, settings.peak_lr)


def keep_ratios(optimizer: torch.optim.Optimizer, base: float) -> torch.optim.Optimizer:
    """Note in each parameter group without `lr_scale` the ratio of its rate to `base`.

    Ratios belong to the configuration: a resumed run has its own optimizer's.
    """
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", group["lr"] / base if base else 1.0)
    return optimizer


def set_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each parameter group to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `gated_step` can divide this optimizer's gradients: it saves a pass
    over them.
    """
    return isinstance(optimizer, Adam) and _selects(optimizer)


def _selects(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernels take a step by a flag on the device."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def to_host(norm: torch.Tensor, ok: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two 0-dim tensors of a GPU, float32 and bool, in host memory; waits once for both."""
    copy = torch.empty(2, pin_memory=True)
    event = torch.cuda.Event()
    copy.copy_(torch.stack([norm, ok]), non_blocking=True)
    event.record()
    event.synchronize()
    return copy[0], copy[1] > 0


def gated_step(
    optimizer: torch.optim.Optimizer,
    ok: torch.Tensor,
    lr: float,
    divisor: torch.Tensor | None = None,
) -> None:
    """Take one optimizer step if the flag `ok` (0-dim bool) is set, else change nothing.

    A parameter group with `lr_scale` steps at `lr * lr_scale`. torch's fused kernels select on the
    device by `found_inf`; for others the host reads the flag. divisor: of all gradients (0-dim
    float32), for an optimizer that `divides_gradients`. Both are on the weights' device.
    """
    set_rates(optimizer, lr)
    if _selects(optimizer):
        optimizer.found_inf = (~ok).to(torch.float32)  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(ok):
        optimizer.step()
