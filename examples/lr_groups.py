"""An optimizer of your own: AdamW in groups, with a lower learning rate for embeddings and no decay
of vectors.

[optimizer]
name = "./lr_groups.py:adamw"
lr = 8e-4                       # the schedule's peak; each group keeps its ratio to it
"""

from __future__ import annotations

import torch
from torch import nn

from titanlite import Optimizer


def adamw(
    parameters: dict[str, nn.Parameter], settings: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer.

    parameters: by name, sharded (DTensor). settings: the section `[optimizer]`.
    """
    tables = [p for name, p in parameters.items() if "embed" in name]
    matrices = [p for name, p in parameters.items() if "embed" not in name and p.ndim > 1]
    vectors = [p for name, p in parameters.items() if "embed" not in name and p.ndim == 1]
    groups = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
        {"params": tables, "lr": 0.2 * settings.lr},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],  # a pipeline stage may have no table
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=device.type
        == "cuda",  # then the guard holds an update back without waiting for the device
    )
