"""Adapters on ranks that share products.

Ranks divide an adapter as the weight beside it: by columns they share B, by rows A. The other
matrix is whole on each rank. So an adapter needs no traffic of its own between layers: what it adds
travels with the output of the product. Its whole matrix gets a part of the gradient on each rank,
which FSDP sums, as that of a norm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from titanlite.dist import ParallelismError
from titanlite.features.lora.products import dropped
from titanlite.features.lora.settings import DOWN, TOKENS, UP

#: Kind of a linear → how A and B are divided.
_PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "colwise": (Replicate(), Shard(0)),
    "gathered": (Replicate(), Shard(0)),
    "rowwise": (Shard(1), Replicate()),
    # Whole weights, and a part of the tokens on each rank.
    "sequence": (Replicate(), Replicate()),
    "heads": (Replicate(), Replicate()),
}


def divided_style(style: ParallelStyle | None, kind: str) -> ParallelStyle:
    """Return how a linear with an adapter is divided. style: of the linear; None: torch's.

    Raises ParallelismError for any other kind.
    """
    from titanlite.parallel.tensor import style_of

    if kind not in _PLACEMENTS:
        raise ParallelismError(f"a linear with an adapter cannot be divided as {kind!r}")
    return _Divided(style or style_of(kind), kind)


class _Divided(ParallelStyle):
    """Divides the weight by another style, and the adapter with it."""

    def __init__(self, style: ParallelStyle, kind: str) -> None:
        super().__init__()
        self.style = style
        self.kind = kind

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Apart, as torch's styles divide all parameters of a linear alike.
        adapter = {name: module._parameters.pop(name) for name in (DOWN, UP)}
        module = self.style._apply(module, device_mesh)
        for (name, whole), placement in zip(adapter.items(), _PLACEMENTS[self.kind], strict=True):
            assert whole is not None
            part = distribute_tensor(whole.detach(), device_mesh, [placement])
            module.register_parameter(name, nn.Parameter(part))
        module.divided = self.kind  # type: ignore[assignment]
        return module


def added_on_rank(linear: Any, x: Tensor) -> DTensor:
    """Return what an adapter adds to a product that ranks share, divided as its output.

    linear: after `_Divided`. x: its input, a DTensor.
    """
    assert isinstance(x, DTensor)
    mesh = x.device_mesh
    down: DTensor = linear.lora_a
    up: DTensor = linear.lora_b
    rate = linear.dropout if linear.training else 0.0
    if linear.divided in TOKENS:
        hidden = F.linear(x.to_local(), down.to_local(grad_placements=[Partial()]))
        out = F.linear(hidden * linear.scale, up.to_local(grad_placements=[Partial()]))
        return DTensor.from_local(out, mesh, x.placements, run_check=False)
    if linear.divided != "rowwise":
        # Each rank has all inputs, and makes a part of the outputs: gradients of what is whole are
        # sums over ranks.
        part = x.to_local(grad_placements=[Partial()])
        if rate:
            part = dropped(part, rate)
        hidden = F.linear(part, down.to_local(grad_placements=[Partial()]))
        out = F.linear(hidden * linear.scale, up.to_local())
        return DTensor.from_local(out, mesh, [Shard(-1)], run_check=False)
    part = x.to_local()
    if rate:
        part = _dropped_columns(part, rate, mesh)
    hidden = F.linear(part, down.to_local())
    out = F.linear(hidden * linear.scale, up.to_local(grad_placements=[Partial()]))
    return DTensor.from_local(out, mesh, [Partial()], run_check=False)


def _dropped_columns(part: Tensor, rate: float, mesh: DeviceMesh) -> Tensor:
    """Return this rank's columns of an input after dropout.

    The ranks draw the same numbers, so each draws those of all columns, and takes its own. One rank
    alone would drop the same.
    """
    ranks = mesh.size()
    shape = (*part.shape[:-1], part.shape[-1] * ranks)
    whole = torch.ones(shape, dtype=part.dtype, device=part.device)
    stays = torch.native_dropout(whole, rate, True)[1]
    mine = stays.chunk(ranks, dim=-1)[mesh.get_local_rank()].contiguous()
    return part * mine * (1 / (1 - rate))
