"""Parts of the mesh that several features share."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks that shard each weight: [shard], or with replicas [replicate, shard].

    They include ranks that share a sequence, since these hold the same weights.
    """
    replicas = mesh["dp_replicate"].size() > 1
    if mesh["cp"].size() == 1:
        return mesh["dp_replicate", "dp_shard"] if replicas else mesh["dp_shard"]
    shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if not replicas:
        return shards
    # torch offers this in place of named slices of a flattened mesh, which are deprecated.
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])
