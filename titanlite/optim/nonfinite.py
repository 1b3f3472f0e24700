"""Search tensors of all ranks for numbers that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@torch.no_grad()
def find_nonfinite(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> str:
    """Return the name of the first tensor with a NaN or an infinity, and the ranks that have one.

    "": no tensor has one.

    All ranks of `group` call it together with their own parts, and get the same answer. Each device
    makes one pass over its tensors and is read once.
    """
    devices: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            devices.setdefault(part.device, {})[name] = part
    mine = ""
    for parts in devices.values():
        # A sum needs no memory and keeps every NaN and infinity. It may also overflow: then the
        # tensor decides.
        sums = torch.stack([part.sum(dtype=torch.float32) for part in parts.values()])
        finite = sums.isfinite().tolist()
        for (name, part), fine in zip(parts.items(), finite, strict=True):
            if not mine and not fine and not part.isfinite().all():
                mine = name
    names = [mine] * dist.get_world_size(group)
    dist.all_gather_object(names, mine, group)
    ranks = [rank for rank, name in enumerate(names) if name]
    return f"{names[ranks[0]]} on {name_ranks(ranks)}" if ranks else ""
