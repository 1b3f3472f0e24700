"""Initial weights that do not depend on how the model is sharded.

Each parameter is drawn in fixed blocks of rows, each block from a generator seeded by (seed,
parameter name, block). A rank draws only the blocks that its shard touches. So weights are the same
on any mesh, with no full tensor in memory. (Plain `nn.init` on DTensors gives every CPU rank the
same shard.) Weights differ between CPUs and GPUs, as torch's generators do, and not between models
of GPU.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlite.models.spec import Init

#: Rows per block. Changing it changes every model's initial weights.
ROWS = 128
#: Values that a CUDA kernel draws at once. The values of a larger draw depend on the number of
#: multiprocessors. Every data-center GPU since 2017 holds the threads of 32.
PIECE = 32 * 1024


def seed_generators(seed: int, mesh: DeviceMesh) -> None:
    """Seed torch's own generators on this rank, for dropout and the like.

    Ranks that share each product (`tp`) draw the same numbers, as DTensor requires; all others draw
    other ones.
    """
    place = 0
    for name in mesh.mesh_dim_names or ():
        if name != "tp":
            place = place * mesh[name].size() + mesh.get_local_rank(name)
    torch.manual_seed(seed + place)


def _draw(
    shape: torch.Size | tuple[int, ...], init: Init, generator: torch.Generator
) -> torch.Tensor:
    block = torch.empty(shape, dtype=torch.float32, device=generator.device)
    cut = init.kind == "trunc_normal"
    cuda = block.device.type == "cuda"
    if cut and not cuda:
        return nn.init.trunc_normal_(
            block, 0.0, init.std, -init.bound, init.bound, generator=generator
        )
    # torch draws values outside of the bounds again, with a host sync each time: here they are
    # never drawn.
    scale = math.sqrt(2) * init.std
    # Below 1, whose inverse is infinite: a wide bound rounds to 1.
    bound = min(math.erf(init.bound / scale), 1 - 2**-23) if cut else init.bound
    for piece in block.view(-1).split(PIECE) if cuda else [block]:
        if init.kind == "normal":
            piece.normal_(0.0, init.std, generator=generator)
        elif cut or init.kind == "uniform":
            piece.uniform_(-bound, bound, generator=generator)
        else:
            raise ValueError(f"unknown kind of initial values: {init.kind!r}")
    return block.erfinv_().mul_(scale).clamp_(-init.bound, init.bound) if cut else block


@torch.no_grad()
def fill(  # noqa: PLR0913
    local: torch.Tensor,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    name: str,
    init: Init,
    seed: int,
    device: torch.device | None = None,
) -> None:
    """Fill `local`, the part of a parameter of global `shape` that starts at `offset`, in place.

    device: where to draw the values, if not there.
    """
    if local.numel() == 0:
        return
    if len(shape) > 2:
        # A stack of matrices: each by itself, so that no rank draws all of them at once.
        for index, matrix in enumerate(local, offset[0]):
            fill(matrix, offset[1:], shape[1:], f"{name}.{index}", init, seed, device)
        return
    if init.kind in ("ones", "zeros", "constant"):
        local.fill_({"ones": 1.0, "zeros": 0.0}.get(init.kind, init.value))
        return
    first = offset[0]
    last = first + local.shape[0]
    columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
    generator = torch.Generator(device or local.device)
    for block in range(first // ROWS, math.ceil(last / ROWS)):
        top = block * ROWS
        rows = min(ROWS, shape[0] - top)
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "big") >> 1)  # torch takes signed 64 bits
        values = _draw((rows, *shape[1:]), init, generator)
        low = max(first, top)
        high = min(last, top + rows)
        local[low - first : high - first].copy_(values[(slice(low - top, high - top),) + columns])


@torch.no_grad()
def init_weights(
    model: nn.Module, rule: Callable[[str], Init], seed: int, device: torch.device | None = None
) -> None:
    """Give every parameter of `model` (plain or DTensor, already on its device) its initial value.

    rule: full parameter name → Init. device: where to draw, so that weights in host memory start as
    those on the device.
    """
    for name, parameter in model.named_parameters():
        fill_part(parameter, name, rule(name), seed, device)


@torch.no_grad()
def fill_part(
    tensor: torch.Tensor, name: str, init: Init, seed: int, device: torch.device | None = None
) -> None:
    """Fill this rank's part of a tensor (plain or DTensor) in place, by seed and name alone.

    device: where to draw the values, if not there.
    """
    local, offset = part_of(tensor)
    fill(local, offset, tuple(tensor.shape), name, init, seed, device)


def part_of(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(
        tuple(tensor.shape), tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), tuple(offset)


def fix_workspace() -> None:
    """Fix cuBLAS' workspace, without which it is not deterministic. Call it before the first
    product.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_deterministic(warn_only: bool = False) -> None:
    """Let torch use deterministic algorithms. warn_only: warn where there is none."""
    fix_workspace()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Else each new tensor is filled with NaN before it is written: another kernel, for faults of
    # torch's operations.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device,
    initialize: Callable[[nn.Module], None],
    parameters_on: torch.device | None = None,
) -> None:
    """Give a meta-device model memory and values. parameters_on: where parameters live, if not on
    `device`.

    All are NaN first, or an integer that no model has. Raises RuntimeError for a tensor that
    `initialize` leaves so.
    """
    model.to_empty(device=parameters_on or device)
    for tensor in [*model.parameters(), *model.buffers()]:
        _numbers(tensor).fill_(_unset(_numbers(tensor).dtype))
    initialize(model)
    # Look the buffers up again: `initialize` may have replaced instead of written them.
    tensors = {name: _numbers(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    bad = []
    for part in tensors.values():
        if part.is_floating_point():
            bad.append(part.sum(dtype=torch.float32).isnan())
        else:
            bad.append((part == _unset(part.dtype)).all() & (part.numel() > 0))
    unset = torch.stack(bad).tolist()
    missed = [name for name, is_bad in zip(tensors, unset, strict=True) if is_bad]
    if missed:
        raise RuntimeError(f"no initial value for: {', '.join(missed)}")
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device.type != device.type:
                setattr(module, name, buffer.to(device))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: complex numbers as pairs, truth values as bytes."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if part.is_complex():
        return torch.view_as_real(part)
    return part.view(torch.uint8) if part.dtype == torch.bool else part


def _unset(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).min or 113
