"""A warning about weights that several ranks hold, and that are not the same there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.callbacks import Callback
from titanlite.dist.dist_env import gather_objects
from titanlite.dist.local_parts import bit_sum
from titanlite.optim.bad_step_errors import name_ranks
from titanlite.parallel.init import part_of
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.trainer import Trainer

_NAMED = 4


class EqualReplicas(Callback):
    """Compares at the first log what several ranks hold of the weights, by sums of its bits.

    A checkpoint holds one of these parts, so they must be equal.
    """

    def __init__(self) -> None:
        self._done = False

    def on_log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        world = trainer.parts.world
        if self._done:
            return
        self._done = True
        mine = _shared_parts(trainer.parts.model, world.size // world.places["pp"])
        holders: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, parts in enumerate(gather_objects(mine)):
            for part, bits in parts.items():
                holders[part][bits].append(rank)
        wrong = {name: groups for (name, _), groups in holders.items() if len(groups) > 1}
        if wrong and world.rank == 0:
            shown = ", ".join(list(wrong)[:_NAMED])
            more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            groups = " and ".join(map(name_ranks, next(iter(wrong.values())).values()))
            logger.warning(
                f"WEIGHTS DIFFER at step {trainer.step} between {groups}, which must hold the "
                f"same: {shown}{more}. Random numbers or code that differ by rank do this; a "
                "checkpoint keeps the values of one rank"
            )


def _shared_parts(model: nn.Module, ranks: int) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return sums of bits by name and offset. ranks: that hold the same layers."""
    from titanlite.checkpoint.state_dict import gather

    found = {}
    for name, tensor in gather(model).items():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            divided = [n for n, how in enumerate(tensor.placements) if not how.is_replicate()]
            if math.prod(map(mesh.size, divided)) == ranks:
                continue
        part, offset = part_of(tensor)
        if part.numel():
            found[name.removeprefix("model."), offset] = int(bit_sum(part))
    return found
