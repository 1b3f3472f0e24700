"""Optimizers that `optimizer.name` names by a dotted path."""

from __future__ import annotations

import torch
from torch import nn

from titanlite.config.errors import unfit
from titanlite.config.model_sections import Optimizer
from titanlite.config.own_functions import load_optimizer
from titanlite.optim.groups import parameter_groups


def build_custom(
    parameters: dict[str, nn.Parameter], settings: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer of a function, or of a class that knows nothing of titanlite: its arrays
    become tuples.

    See `build_optimizer` for what it raises.
    """
    maker, is_class = load_optimizer(settings.name, settings.args)
    if not is_class:
        optimizer = maker(parameters, settings, device)
        if not isinstance(optimizer, torch.optim.Optimizer):
            message = f"optimizer.name = {settings.name!r} returned {optimizer!r:.80}"
            raise TypeError(f"{message}, and no torch optimizer")
        return optimizer
    args = dict(settings.args)
    for name, value in args.items():
        if isinstance(value, list):
            args[name] = tuple(value)
    groups = parameter_groups(parameters, settings)
    try:
        optimizer = maker(groups, lr=settings.lr, **args)
    except (TypeError, ValueError) as error:
        message = f"{settings.name!r} refuses them: {error}"
        raise unfit("optimizer.args", message) from error
    for group in groups:
        unknown = [name for name in group if name not in ("params", *optimizer.defaults)]
        if unknown:
            message = (
                f"{settings.name!r} knows no {' and no '.join(unknown)}, which a group of "
                "parameters sets"
            )
            remedy = "remove it from [[optimizer.groups]], or optimizer.no_decay_on_norms"
            raise unfit("optimizer.groups", message, remedy)
    return optimizer
