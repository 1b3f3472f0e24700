"""The processes of a run: device, store, default process group, mesh, timeouts.

One path serves one CPU process and many GPUs: `fully_shard` and the collectives also run at world
size 1.
This module imports torch inside its functions, since a config check reads some of its names without
torch.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from titanlite.dist import ParallelismError
from titanlite.dist.launch_env import RENDEZVOUS_SECONDS, LaunchEnv, this_rank
from titanlite.dist.process_settings import kernel_order
from titanlite.utils import logger

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

#: Outermost first: ranks that communicate most are neighbours, which are close in hardware.
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: Description of a process group that keeps its own timeout, since nothing waits for it.
KEEPS_TIMEOUT = "titanlite_keeps_timeout"

#: Variables with which a user sets up torch's allocator.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group, in order. They call it together."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found


def connect_store(limit: float = RENDEZVOUS_SECONDS) -> dist.Store | None:
    """Connect to the run's key-value store, through which the ranks find each other; one process
    has none.

    Call it early, so that others know that this rank is coming. Raises as `run_store.register`, and
    ParallelismError for a wrong environment or too few open files.
    """
    import torch.distributed as dist

    env = this_rank()
    if env.address is None or dist.is_initialized():
        return None
    from titanlite.dist.open_files import allow_files
    from titanlite.dist.run_store import register

    allow_files(env.world_size)
    is_master = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return register(env.rank, env.world_size, env.address, is_master, limit)


@dataclass(frozen=True)
class DistEnv:
    """The ranks of a run and the device of this one.

    `DistEnv.open` is a context manager. It joins a default process group that exists and leaves it
    alone at its end. It destroys one that it creates.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    #: Collective timeout for the groups of meshes built here; None leaves torch's.
    timeout: timedelta | None = None
    #: Degrees of the latest mesh, by name, all data ranks counted together: a rank's place in it
    #: decides which random numbers it draws.
    places: dict[str, int] = field(default_factory=dict, init=False, compare=False)

    @classmethod
    def open(
        cls,
        device_type: str | None = None,
        store: dist.Store | None = None,
        *,
        init_timeout_seconds: float = 300,
        rendezvous_seconds: float = RENDEZVOUS_SECONDS,
        trace_buf_size: int = 20_000,
        trace_folder: str = "",
    ) -> AbstractContextManager[DistEnv]:
        """Enter the process group that the environment (torchrun's variables) describes; one
        process without them.

        device_type: "cpu" or "cuda"; by default CUDA when this machine has it. store: from
        `connect_store`. init_timeout_seconds: of collectives until `set_timeouts`.
        rendezvous_seconds: the longest wait for the others. trace_buf_size, trace_folder: on GPUs,
        see `flight_recorder.recording`.
        Raises ParallelismError when the environment is wrong, RendezvousError when another rank
        does not come in time or cannot be reached.

        A process that ends without leaving it, as a notebook's, leaves it at its end.
        """
        return _LeftAtExit(
            cls._opened(
                device_type,
                store,
                init_timeout_seconds,
                rendezvous_seconds,
                trace_buf_size,
                trace_folder,
            )
        )

    @classmethod
    @contextmanager
    def _opened(
        cls,
        device_type: str | None,
        store: dist.Store | None,
        init_timeout_seconds: float,
        rendezvous_seconds: float,
        trace_buf_size: int,
        trace_folder: str,
    ) -> Iterator[DistEnv]:
        import torch
        import torch.distributed as dist

        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        env = this_rank()
        rank, size = env.rank, env.world_size
        device = _take_gpu(env) if device_type == "cuda" else torch.device("cpu")
        if dist.is_initialized():
            with kernel_order(device_type):
                yield cls(rank, env.local_rank, size, device)
            return
        timeout = timedelta(seconds=init_timeout_seconds)
        # Host-side collectives (checkpoint plans, broadcast decisions) go through gloo on GPUs too.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        with ExitStack() as stack:
            if size == 1:
                store = store or dist.HashStore()
                dist.init_process_group(backend, store=store, rank=0, world_size=1)
            else:
                from titanlite.dist.flight_recorder import recording
                from titanlite.dist.rendezvous import barrier, connect

                if device_type == "cuda":
                    stack.enter_context(recording(trace_folder, trace_buf_size))
                store = store or connect_store(rendezvous_seconds)
                assert store is not None
                barrier(store, rank, size, init_timeout_seconds, rendezvous_seconds)
                connect(backend, store, rank, size, rendezvous_seconds)
            stack.enter_context(kernel_order(device_type))
            store.set_timeout(timeout)
            set_timeout(timeout)
            try:
                yield cls(rank, env.local_rank, size, device, timeout)
            except BaseException:
                # A single process cleans up for later code. With peers, leave at once. They may be
                # stuck in a collective, and only the death of this rank lets the launcher end them.
                if size == 1:
                    dist.destroy_process_group()
                raise
            # Ranks that leave while others still hold gloo connections make those abort at exit.
            try:
                dist.barrier()
            except RuntimeError:
                logger.warning("another rank does not end; this one is done, and leaves")
            dist.destroy_process_group()

    def build_mesh(
        self, *, pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1
    ) -> DeviceMesh:
        """Build the device mesh with the dimensions `MESH_DIMS`, also those of degree 1.

        Raises ParallelismError when the product of the degrees is not the world size.
        """
        from torch.distributed.device_mesh import init_device_mesh

        degrees = (pp, dp_replicate, dp_shard, cp, tp)
        if math.prod(degrees) != self.size:
            named = zip(MESH_DIMS, degrees, strict=True)
            parts = [f"{name} {degree}" for name, degree in named if degree != 1]
            equation = " x ".join(parts) or "all degrees 1"
            raise ParallelismError(
                f"{equation} = {math.prod(degrees)}, but there are {self.size} ranks"
            )
        meet()
        mesh = init_device_mesh(self.device.type, degrees, mesh_dim_names=MESH_DIMS)
        self.places.update(pp=pp, dp=dp_replicate * dp_shard, cp=cp, tp=tp)
        self.apply_timeout()
        return mesh

    def apply_timeout(self) -> None:
        """Give new groups the timeout of the start: groups of a mesh do not take that of the
        default group.
        """
        if self.timeout is not None:
            set_timeout(self.timeout)

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank (any picklable object; through gloo, on the
        host).
        """
        import torch
        import torch.distributed as dist

        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        received: T = box[0]
        return received


def _take_gpu(env: LaunchEnv) -> torch.device:
    import torch

    gpus = torch.cuda.device_count()
    if env.local_world_size > gpus:
        raise ParallelismError(
            f"{env.local_world_size} ranks on {socket.gethostname()}, which shows {gpus} "
            "GPUs: each rank needs one of its own. Start fewer ranks per node"
        )
    device = torch.device("cuda", env.local_rank)
    torch.cuda.set_device(device)
    if not any(name in os.environ for name in ALLOCATOR):
        # Segments of fixed sizes do not fit the next tensors: it frees and allocates them again in
        # each step.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return device


class _LeftAtExit(AbstractContextManager[DistEnv]):
    """Leaves a context at the end of the process, if it is still open.

    Later, Python has no modules for it.
    """

    def __init__(self, context: AbstractContextManager[DistEnv]) -> None:
        self._context = context

    def __enter__(self) -> DistEnv:
        world = self._context.__enter__()
        atexit.register(self._leave)
        return world

    def __exit__(self, *error: Any) -> bool | None:
        atexit.unregister(self._leave)
        return self._context.__exit__(*error)

    def _leave(self) -> None:
        """Leave as after an error: the other ranks may not come to a barrier."""
        with suppress(SystemExit):
            self._context.__exit__(SystemExit, SystemExit(), None)


def meet() -> None:
    """Wait for all ranks by a collective on the host, which fails at once when one has ended.

    Call it before process groups are made: they wait their whole timeout for such a rank.
    """
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(()))


def log_once(level: int, text: str) -> None:
    """Log at this level on rank 0, for the console, and at INFO elsewhere."""
    import torch.distributed as dist

    logger.log(logging.INFO if dist.get_rank() else level, text)


def set_timeout(timeout: timedelta) -> None:
    """Set the collective timeout of every group of this process."""
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    # All groups that torch knows: FSDP makes its own groups, for a partial reshard one per group
    # of weights.
    for group in list(_world.pg_map):
        if group.group_desc != KEEPS_TIMEOUT:
            _set_pg_timeout(timeout, group)
