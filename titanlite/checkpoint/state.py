"""What a checkpoint holds, as flat names to tensors: no pickled objects of ours."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titanlite.parallel.float8 import forget_scales, plain
from titanlite.parallel.pipeline import PipelineModel

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
#: Hyper-parameters belong to the configuration, not to the checkpoint.
_HYPERPARAMETERS = "param_groups."


def gather(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """The tensors to save or to load into, by name: `model.…`, and `optimizer.…` unless it is None.

    An optimizer that has not stepped yet is given its state first, of a step without gradients, so that there is
    something to load into.
    """
    tensors = {f"model.{name}": plain(cast(torch.Tensor, t)) for name, t in get_model_state_dict(model).items()}
    if optimizer is None:
        return tensors
    fresh = not optimizer.state
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    if fresh:  # torch makes the state by a step of size zero, which is counted in it
        for entry in optimizer.state.values():
            for value in entry.values():
                value.zero_()
    tensors.update(
        (f"optimizer.{name}", value) for name, value in state.items() if not name.startswith(_HYPERPARAMETERS)
    )
    return tensors  # without param_groups only tensors are left


def weights(model: nn.Module, dtype: str) -> dict[str, torch.Tensor]:
    """The weights alone, as `gather` names them; those in floating point as `dtype`, such as "bfloat16"."""
    return {
        f"model.{name}": converted(plain(cast(torch.Tensor, t)), dtype)
        for name, t in get_model_state_dict(model).items()
    }


def converted(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A tensor in another precision, the same object where it has it; whole numbers stay what they are."""
    wanted: torch.dtype = getattr(torch, dtype)
    return tensor.to(wanted) if tensor.is_floating_point() and tensor.dtype != wanted else tensor


def scatter(tensors: dict[str, torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Put loaded tensors (as `gather` names them) into model and optimizer; hyper-parameters stay as configured."""
    set_model_state_dict(model, _strip(tensors, "model."))
    forget_scales(model)
    if optimizer is None:
        return
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    state.update(_strip(tensors, "optimizer."))
    set_optimizer_state_dict(model, optimizer, state, options=_OPTIONS)


def _strip(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def rng_state(device: torch.device, world_size: int) -> DTensor:
    """torch's generators of all ranks, [world_size, bytes] uint8, one row per rank.

    As a sharded tensor each rank writes and reads its own row, and another number of ranks is seen by the shape.
    """
    row = torch.get_rng_state()
    if device.type == "cuda":
        row = torch.cat([row, torch.cuda.get_rng_state(device)])
    mesh = init_device_mesh("cpu", (world_size,))
    return DTensor.from_local(row[None], mesh, [Shard(0)])


def set_rng_state(state: DTensor, device: torch.device) -> None:
    row = state.to_local()[0]
    size = torch.get_rng_state().numel()
    torch.set_rng_state(row[:size].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(row[size:].clone(), device)


def describe(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Tensor name -> [dtype, global shape], for the manifest."""
    return {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}


def describe_all(tensors: dict[str, torch.Tensor], model: nn.Module) -> dict[str, list[Any]]:
    """As `describe`, with the tensors that other ranks of a pipeline hold; all ranks of it call this together."""
    mine = describe(tensors)
    if not isinstance(model, PipelineModel):
        return mine
    parts: list[dict[str, list[Any]]] = [{} for _ in range(dist.get_world_size(model.group))]
    dist.all_gather_object(parts, mine, model.group)
    return {name: entry for part in parts for name, entry in part.items()}
