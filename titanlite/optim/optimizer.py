"""torch's AdamW and Adam, and a step that a flag on the device can hold back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from titanlite.config.errors import ConfigError, Problem
from titanlite.config.plans import OptimizerPlan
from titanlite.config.toml import quote

_CLASSES = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def build_optimizer(
    parameters: Iterable[nn.Parameter], plan: OptimizerPlan, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of the plan. Its learning rate is set before every step (see `titanlite.optim.schedule`).

    All parameters are in one group with one weight decay, norms included, as in Llama 2's and torchtitan's training.

    Raises ConfigError for an optimizer that is not built yet.
    """
    if plan.name not in _CLASSES:
        advice = f"take {' or '.join(_CLASSES)}"
        raise ConfigError([Problem("", "optimizer.name", f"{quote(plan.name)} is not built yet", advice)])
    implementation = plan.implementation or ("fused" if device.type == "cuda" else "foreach")
    return _CLASSES[plan.name](
        parameters,
        lr=plan.lr,
        betas=(plan.beta1, plan.beta2),
        eps=plan.eps,
        weight_decay=plan.weight_decay,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )


def gated_step(optimizer: torch.optim.Optimizer, ok: torch.Tensor, lr: float) -> None:
    """Take one optimizer step at learning rate `lr` if the flag `ok` (0-dim bool) is set, else change nothing.

    ok: on the device of the parameters.

    Fused kernels select on the device, so the host does not wait (`found_inf` is the protocol that gradient
    scalers use). The other implementations have no such selection: the host reads the flag, which costs nothing
    on a CPU and one synchronization on a GPU.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~ok).to(torch.float32)  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(ok):
        optimizer.step()
