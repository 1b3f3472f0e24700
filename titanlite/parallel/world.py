"""The processes of a run: device, rendezvous store, default process group, timeouts.

One path serves one CPU process and many GPUs: `fully_shard` and the collectives run at world size 1 too.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from titanlite.config.plans import CommPlan, MeshPlan
from titanlite.parallel.environment import Environment, WorldError, read_environment
from titanlite.parallel.flight_recorder import recording
from titanlite.parallel.meeting import LIMIT_SECONDS, come, connect, meet

#: Outermost first: neighbours in rank, which are close in hardware, share what communicates most.
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: Description of a group that keeps its own timeout: what it is for holds nobody up.
PATIENT = "titanlite_patient"


def this_rank() -> Environment:
    """This process among the ranks: of the process group that exists, else by the environment. Raises WorldError."""
    return read_environment((dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None)


def join_store(limit: float = LIMIT_SECONDS) -> dist.Store | None:
    """The run's key-value store, at which the process groups meet; None for one process alone.

    Call it as soon as the process is up: from then on the others know that this rank is coming (see meeting.py). Raises
    WorldError when the environment is wrong or rank 0 cannot open MASTER_PORT, MeetingError when the store cannot be
    reached within `limit` seconds, or what listens there does not answer within as many.
    """
    if dist.is_initialized():
        return None
    ranks = read_environment()
    if ranks.address is None:
        return None
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return come(ranks.rank, ranks.size, ranks.address, ranks.rank == 0 and not agent_store, limit)


@dataclass(frozen=True)
class World:
    """The ranks of a run and the device of this one.

    Make it with `World.open`, a context manager. A default process group that exists already is joined
    and left alone; one that `open` creates is destroyed at its end.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    #: Collective timeout for the groups of meshes built here; None leaves torch's.
    timeout: timedelta | None = None

    @classmethod
    @contextmanager
    def open(
        cls, comm: CommPlan | None = None, device_type: str | None = None, store: dist.Store | None = None
    ) -> Iterator[World]:
        """Enter the world that the environment (torchrun's variables) describes; one process without them.

        device_type: "cpu" or "cuda"; by default CUDA when this machine has it. store: what `join_store` gave.
        Raises WorldError when the environment is wrong, MeetingError when another rank does not come within a
        minute, or cannot be reached.
        """
        comm = comm or CommPlan()
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        ranks = this_rank()
        rank, local_rank, size = ranks.rank, ranks.local_rank, ranks.size
        if device_type == "cuda":
            gpus = torch.cuda.device_count()
            if ranks.local_size > gpus:
                raise WorldError(
                    f"{ranks.local_size} ranks on {socket.gethostname()}, which shows {gpus} GPUs: each rank needs "
                    "one of its own. Start fewer ranks per node"
                )
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
        if dist.is_initialized():
            yield cls(rank, local_rank, size, device)
            return
        timeout = timedelta(seconds=comm.init_timeout_seconds)
        with recording(comm, device, size):
            store = store or join_store(comm.meeting_seconds) or dist.HashStore()
            meet(store, rank, size, comm.init_timeout_seconds, comm.meeting_seconds)
            # Host-side collectives (checkpoint plans, agreed decisions) go through gloo on GPUs too.
            backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
            connect(backend, store, rank, size, comm.meeting_seconds)
            store.set_timeout(timeout)
            _apply_timeout(timeout)
            try:
                yield cls(rank, local_rank, size, device, timeout)
            except BaseException:
                # Alone, clean up for whoever uses this process next. With peers, leave at once: they may be stuck in a
                # collective, and only this rank's death lets the launcher end them.
                if size == 1:
                    dist.destroy_process_group()
                raise
            # Ranks that leave while others still hold gloo connections make those abort at exit.
            dist.barrier()
            dist.destroy_process_group()

    def build_mesh(self, plan: MeshPlan) -> DeviceMesh:
        """The device mesh, dimensions `MESH_DIMS`, those of degree 1 too.

        Raises WorldError when the degrees do not multiply to the world size.
        """
        degrees = (plan.pipeline, plan.dp_replicate, plan.dp_shard, plan.context, plan.tensor)
        if math.prod(degrees) != self.size:
            parts = [f"{name} {degree}" for name, degree in zip(MESH_DIMS, degrees, strict=True) if degree != 1]
            equation = " x ".join(parts or ["all degrees 1"])
            raise WorldError(f"{equation} = {math.prod(degrees)}, but there are {self.size} ranks")
        mesh = init_device_mesh(self.device.type, degrees, mesh_dim_names=MESH_DIMS)
        self.cover_groups()
        return mesh

    def cover_groups(self) -> None:
        """Give the timeout of the start to groups made since: those of a mesh do not take the default group's."""
        if self.timeout is not None:
            _apply_timeout(self.timeout)

    def agree(self, value: object) -> object:
        """Rank 0's `value` on every rank (any picklable object; through gloo, on the host)."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


def set_timeouts(seconds: int) -> None:
    """Set the collective timeout of every group of this process.

    The first step may compile and warm up for minutes; after it, a stuck peer should be found soon.
    """
    dist.barrier()  # a rank still in the slow phase must not be timed out by a faster one
    _apply_timeout(timedelta(seconds=seconds))


@contextmanager
def patience(seconds: int, usual: int) -> Iterator[None]:
    """Within, collectives may take `seconds` (a save to a slow disk), and `usual` seconds again afterwards.

    What is inside must end together on all ranks.
    """
    _apply_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        _apply_timeout(timedelta(seconds=usual))


def _apply_timeout(timeout: timedelta) -> None:
    # All that torch knows of: FSDP makes groups of its own, for a partial reshard one per unit.
    for group in list(_world.pg_map):
        if group.group_desc != PATIENT:
            _set_pg_timeout(timeout, group)
