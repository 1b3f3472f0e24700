"""Parts of the mesh that several features share."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import MESH_DIMS


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise ParallelismError unless a mesh has the dimensions of `DistEnv.build_mesh`."""
    names = getattr(mesh, "mesh_dim_names", None)
    if names != MESH_DIMS:
        found = ", ".join(names) if names else "no names"
        raise ParallelismError(
            f"a mesh needs the dimensions {', '.join(MESH_DIMS)}, also those of size 1, and this "
            f"one has {found}: make it by DistEnv.build_mesh, as "
            "world.build_mesh(dp_shard=world.size)"
        )


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks that shard each weight: [shard], or with replicas [replicate, shard].

    They include ranks that share a sequence, since these hold the same weights.
    """
    check_mesh(mesh)
    replicas = mesh["dp_replicate"].size() > 1
    if mesh["cp"].size() == 1:
        return mesh["dp_replicate", "dp_shard"] if replicas else mesh["dp_shard"]
    shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if not replicas:
        return shards
    # torch offers this in place of named slices of a flattened mesh, which are deprecated.
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])
