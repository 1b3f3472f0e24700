"""torch's AdamW and Adam, optimizers of your own, and an update that a flag on the device can hold back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from titanlite.config.extensions import load_function
from titanlite.config.sections import Optimizer
from titanlite.utils import is_dotted

_CLASSES = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def build_optimizer(
    parameters: Iterable[nn.Parameter] | dict[str, nn.Parameter], settings: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer of section `[optimizer]`. `gated_step` sets its learning rates at every step.

    parameters: all of a model, by name for an optimizer of your own. torch's have all of them in one group with one
    weight decay, norms included, as in Llama 2's and torchtitan's training.

    Raises ValueError for an optimizer that is not implemented, TypeError for an object that is none.
    """
    if is_dotted(settings.name):
        optimizer = load_function("optimizer.name", settings.name)(parameters, settings, device)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer.name = {settings.name!r} returned {optimizer!r:.80}, and no torch optimizer")
        return keep_ratios(optimizer, settings.lr)
    if settings.name not in _CLASSES:
        raise ValueError(f'optimizer.name = "{settings.name}" is not implemented yet: take {" or ".join(_CLASSES)}')
    implementation = settings.implementation or ("fused" if device.type == "cuda" else "foreach")
    return _CLASSES[settings.name](
        parameters.values() if isinstance(parameters, dict) else parameters,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )


def keep_ratios(optimizer: torch.optim.Optimizer, base: float) -> torch.optim.Optimizer:
    """Note in each parameter group as `lr_scale` the ratio of its learning rate to `base`, unless it has one.

    The ratios belong to the configuration, as all hyper-parameters: a resumed run has those of its own optimizer.
    """
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", group["lr"] / base if base else 1.0)
    return optimizer


def gated_step(optimizer: torch.optim.Optimizer, ok: torch.Tensor, lr: float) -> None:
    """Take one optimizer step at learning rate `lr` if the flag `ok` (0-dim bool) is set, else change nothing.

    A parameter group with `lr_scale` steps at `lr * lr_scale`. Fused kernels of torch's select on the device, so the
    host does not wait (`found_inf` is the protocol that gradient scalers use). The other optimizers have no such
    selection: the host reads the flag, which costs nothing on a CPU and one synchronization on a GPU.
    """
    ok = ok.to(optimizer.param_groups[0]["params"][0].device)  # offloaded parameters are in host memory
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if fused and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = (~ok).to(torch.float32)  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(ok):
        optimizer.step()
