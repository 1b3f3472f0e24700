"""A warning about weights that get no gradient, and so learn nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.callbacks import Callback
from titanlite.dist.dist_env import gather_objects
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.trainer import Trainer

#: Behind a weight that begins at zero, all gradients of the first step are zero.
_ENOUGH_STEPS = 2
_NAMED = 4
#: Logs at which it looks, where the guard held back all steps before the first.
_LOOKS = 3
#: Names of first moments in an optimizer's state.
_MOMENTS = ("exp_avg", "momentum", "momentum_buffer")


class DeadWeights(Callback):
    """Looks once, at the first log after two steps of the run, for weights without a gradient.

    It reads the optimizer's first moments. They are zero exactly where every gradient was. So the
    steps themselves cost nothing more. Optimizers without moments, or with quantized ones, are not
    examined.
    """

    def __init__(self) -> None:
        self._looks_left = _LOOKS

    def on_log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        if not self._looks_left or trainer.step <= _ENOUGH_STEPS:
            return
        self._looks_left -= 1
        names = _names_with_moments(trainer)
        zero = _zero_here(names)
        # On some rank a weight may have all its parts, or only zeros of it.
        learning = bool(names) and len(zero) < len(names)
        answers = gather_objects((zero, learning))
        suspects = set[str]().union(*(part for part, _ in answers))
        if not any(ok for _, ok in answers):
            # The guard held all steps back, or there is nothing to examine.
            return
        self._looks_left = 0
        if suspects:
            self._tell(suspects, set(names) - zero, trainer.step)

    def _tell(self, suspects: set[str], alive_here: set[str], step: int) -> None:
        """Warn of the suspects that are zero on every rank. All ranks call it together."""
        alive = gather_objects(suspects & alive_here)
        dead = sorted(suspects.difference(*alive))
        if not dead or dist.get_rank():
            return
        shown = ", ".join(dead[:_NAMED])
        more = f" and {len(dead) - _NAMED} more" if len(dead) > _NAMED else ""
        logger.warning(
            f"no gradient has reached {shown}{more} in {step} steps, so they learn nothing. If the "
            "model uses them, compare with a run that has --no-training.compile"
        )


def _names_with_moments(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's part of the first moment of each weight, by the weight's name."""
    state = trainer.parts.optimizer.state
    found = {}
    for name, parameter in trainer.parts.model.named_parameters():
        entry = state.get(parameter, {})
        for key in _MOMENTS:
            moment = _plain(entry.get(key))
            if moment is not None:
                found[name] = moment
    return found


def _plain(value: object) -> Tensor | None:
    """Return this rank's part of a moment; None for one that is quantized, or is none."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if type(local) is not Tensor or not local.is_floating_point():
        return None
    return local


def _zero_here(moments: Mapping[str, Tensor]) -> set[str]:
    """Return the names of moments that are zero on this rank; empty parts are."""
    full = {name: moment for name, moment in moments.items() if moment.numel()}
    zero = set(moments) - set(full)
    if not full:
        return zero
    largest = torch._foreach_norm(list(full.values()), float("inf"))
    together = torch.stack([value.float() for value in largest]).tolist()
    return zero | {name for name, value in zip(full, together, strict=True) if value == 0}
