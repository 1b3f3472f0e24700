"""Converted linears in high precision for a while, to compare."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titanlite.dist.local import parts_of, plain, wrapper_of
from titanlite.features.float8.rounded import RoundedLinear
from titanlite.parallel.fsdp import free_gathered


@contextmanager
def high_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let converted linears compute in `dtype` inside, where compiled code and backward passes do
    not run.

    All ranks enter it together, with no module of `fully_shard` between its forward and its
    backward. A weight that is gathered in float8 is gathered once more in `dtype`.
    """
    linears = [module for module in model.modules() if isinstance(module, RoundedLinear)]
    _free(model)
    for linear in linears:
        linear.exact = functools.partial(_exact, linear, linear.weight, dtype)
    try:
        with uncompiled():
            yield
    finally:
        for linear in linears:
            del linear.exact
        _free(model)


def uncompiled() -> Any:
    """Run compiled modules eagerly inside."""
    return torch.compiler.set_stance("force_eager")


def _exact(linear: RoundedLinear, sharded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in high precision. sharded: the parameter while it is not gathered."""
    if wrapper_of(sharded) is None:
        return linear.weight
    weight = plain(sharded)
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or ()
    placements = dict(zip(names, weight.placements, strict=True))
    # FSDP's ranks hold equal numbers of rows (`titanlite.features.float8.checks` refuses others);
    # tensor parallelism's part stays divided.
    over = [name for name in names if name != "tp"][-1]
    parts = DTensor.from_local(weight.to_local().to(dtype), mesh[over], [Shard(0)])
    whole = parts.full_tensor()
    if "tp" not in placements:
        return whole
    return DTensor.from_local(whole, mesh["tp"], [placements["tp"]])


def _free(model: nn.Module) -> None:
    """Free gathered weights of a model or a pipeline."""
    for part in parts_of(model):
        free_gathered(part)
