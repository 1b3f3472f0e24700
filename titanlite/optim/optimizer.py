"""torch's AdamW and Adam, and an update that a flag on the device can hold back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from titanlite.config.sections import Optimizer

_CLASSES = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer of section `[optimizer]`. `gated_step` sets its learning rate at every step.

    All parameters are in one group with one weight decay, norms included, as in Llama 2's and torchtitan's training.

    Raises ValueError for an optimizer that is not implemented yet.
    """
    if settings.name not in _CLASSES:
        raise ValueError(f'optimizer.name = "{settings.name}" is not implemented yet: take {" or ".join(_CLASSES)}')
    implementation = settings.implementation or ("fused" if device.type == "cuda" else "foreach")
    return _CLASSES[settings.name](
        parameters,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )


def gated_step(optimizer: torch.optim.Optimizer, ok: torch.Tensor, lr: float) -> None:
    """Take one optimizer step at learning rate `lr` if the flag `ok` (0-dim bool) is set, else change nothing.

    Fused kernels select on the device, so the host does not wait (`found_inf` is the protocol that gradient
    scalers use). The other implementations have no such selection: the host reads the flag, which costs nothing
    on a CPU and one synchronization on a GPU.
    """
    ok = ok.to(optimizer.param_groups[0]["params"][0].device)  # offloaded parameters are in host memory
    for group in optimizer.param_groups:
        group["lr"] = lr
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~ok).to(torch.float32)  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(ok):
        optimizer.step()
