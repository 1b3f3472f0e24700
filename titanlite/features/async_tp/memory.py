"""GPUs that reach each other's memory, for asynchronous tensor parallelism."""

from __future__ import annotations

import itertools
import warnings

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.dist import ParallelismError


def check_async(tp: int, device_type: str, ranks_per_node: int) -> None:
    """Raise ParallelismError unless tensor-parallel ranks can write to each other's memory."""
    if device_type != "cuda":
        raise ParallelismError(
            "needs GPUs that reach each other's memory (CUDA symmetric memory), and this run is "
            "on a CPU"
        )
    if ranks_per_node % tp:
        raise ParallelismError(
            f"needs the {tp} ranks of tensor parallelism on one node, and there are "
            f"{ranks_per_node} on each"
        )
    # Neighbouring ranks share a product, and the local rank is the number of the GPU.
    for a, b in itertools.permutations(range(ranks_per_node), 2):
        if a // tp == b // tp and not torch.cuda.can_device_access_peer(a, b):
            raise ParallelismError(
                f"needs GPUs that reach each other's memory; GPU {a} does not reach GPU {b}"
            )


def enable_async(mesh: DeviceMesh) -> None:
    """Give the ranks of a one-dimensional CUDA mesh the shared memory that compiled overlap
    needs.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        # The warning says that the call is not needed; but inductor fuses only for groups that had
        # it.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
