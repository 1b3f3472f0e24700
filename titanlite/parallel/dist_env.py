"""The processes of a run: launcher variables, device, store, default process group, mesh, timeouts.

One path serves one CPU process and many GPUs: `fully_shard` and the collectives also run at world size 1.
This module imports torch inside its functions, since `titanlite.main` checks the variables before the import of torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from titanlite.parallel import ParallelismError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

#: Outermost first: ranks that communicate most are neighbours, which are close in hardware.
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: Description of a process group that keeps its own timeout, since nothing waits for it.
KEEPS_TIMEOUT = "titanlite_keeps_timeout"
#: Longest wait at the start for the processes of the other ranks, and for connections to them.
RENDEZVOUS_SECONDS = 60.0

#: Variables with which a user sets up torch's allocator.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
#: gloo's groups of all ranks: the default one, those of a mesh, of saves, of asynchronous saves. Other files.
_GROUPS, _FILES = 4, 256

_INTEGER = re.compile(r"\s*-?\d{1,9}\s*")
_NO_LIMIT = 10**9


@dataclass(frozen=True)
class LaunchEnv:
    """What the launcher says about one rank."""

    rank: int
    world_size: int
    #: Number of this rank on its node.
    local_rank: int
    #: Ranks on this node; as many as `local_rank` shows where LOCAL_WORLD_SIZE is not set.
    local_world_size: int
    #: Host and port of the store; None for a single process.
    address: tuple[str, int] | None


def read_launch_env(group: tuple[int, int] | None = None) -> LaunchEnv:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a single process has none.

    group: rank and size of an existing process group, which stand for the variables.
    Raises ParallelismError that names all wrong variables and the remedies.
    """
    problems: list[str] = []
    given = {} if group is None else {"RANK": str(group[0]), "WORLD_SIZE": str(group[1])}
    environ = {**os.environ, **given}

    def number(name: str, low: int, high: int, default: int | None, meaning: str) -> int:
        """Return a variable's number; of one that is not set `default`. None: it must be set."""
        text = environ.get(name)
        if text is None and default is not None and low <= default <= high:
            return default
        if text is None:
            problems.append(
                f"{name} is not set, but {by} is: start with torchrun or ./run_llama_train.sh, or unset {by}"
            )
        elif not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
            span = f"of at least {low}" if high == _NO_LIMIT else f"from {low} to {high}"
            problems.append(f"{name} is {text!r}, expected a whole number {span}: {meaning}")
        else:
            return int(text)
        return low

    by, address = "RANK", None
    alone = environ.get("RANK", "0").strip() == "0"
    size = number("WORLD_SIZE", 1, _NO_LIMIT, 1 if alone else None, "the number of ranks")
    if not problems:  # the limits of the others depend on it
        by = "WORLD_SIZE"
        local_size = number("LOCAL_WORLD_SIZE", 1, size, size, f"the ranks of this node, of {size} in all (WORLD_SIZE)")
        rank = number("RANK", 0, size - 1, 0 if size == 1 else None, f"WORLD_SIZE is {size}")
        if size > 1 and group is None:
            address = environ.get("MASTER_ADDR", "").strip(), number("MASTER_PORT", 1, 65535, None, "a free port")
            if not address[0]:
                problems.append("MASTER_ADDR is not set, but WORLD_SIZE is: set it to the host of rank 0")
        by = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else by
        local_rank = number("LOCAL_RANK", 0, local_size - 1, rank, f"{by} is {local_size}")
    if problems:
        one, count = len(problems) == 1, len(problems)
        head = "environment variable " if one else f"{count} environment variables are wrong:\n  "
        raise ParallelismError(head + "\n  ".join(problems))
    return LaunchEnv(rank, size, local_rank, local_size if by == "LOCAL_WORLD_SIZE" else local_rank + 1, address)


def this_rank() -> LaunchEnv:
    """Return this process among the ranks, by the existing process group or else by the environment."""
    import torch.distributed as dist

    return read_launch_env((dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None)


def connect_store(limit: float = RENDEZVOUS_SECONDS) -> dist.Store | None:
    """Connect to the key-value store of the run, through which the ranks find each other; None for a single process.

    Call it as soon as the process is up, so that the others know that this rank is coming. Raises ParallelismError
    when the environment is wrong or the process may open too few files, else as `rendezvous.register`.
    """
    import torch.distributed as dist

    from titanlite.parallel.rendezvous import register

    env = this_rank()
    if env.address is None or dist.is_initialized():
        return None
    allow_files(env.world_size)
    is_master = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return register(env.rank, env.world_size, env.address, is_master, limit)


def raise_file_limit(wanted: int) -> int:
    """Let this process and its children open so many files, or as many as the hard limit allows. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # systems have further limits
            higher = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (higher, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_files(ranks: int) -> None:
    """Raise the limit of open files for a run on so many ranks: gloo has a socket per rank in each group.

    Raises ParallelismError where the hard limit is too low.
    """
    needed = _FILES + _GROUPS * ranks
    limit = raise_file_limit(2 * needed)  # the process that serves the store has connections to all as well
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ParallelismError(
            f"a process on {socket.gethostname()} may open {limit:,} files, but {ranks:,} ranks need {needed:,}: gloo "
            f"connects each to all others in {_GROUPS} groups. Raise the hard limit (ulimit -Hn): LimitNOFILE in the "
            "service of slurmd or containerd, /etc/security/limits.conf, or docker run --ulimit nofile"
        )


@dataclass(frozen=True)
class DistEnv:
    """The ranks of a run and the device of this one.

    `DistEnv.open` is a context manager. It joins a default process group that exists and leaves it alone at its end;
    it destroys one that it creates.
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
        cls,
        device_type: str | None = None,
        store: dist.Store | None = None,
        *,
        init_timeout_seconds: float = 300,
        rendezvous_seconds: float = RENDEZVOUS_SECONDS,
        trace_buf_size: int = 20_000,
        trace_folder: str = "",
    ) -> Iterator[DistEnv]:
        """Enter the process group that the environment (torchrun's variables) describes; one process without them.

        device_type: "cpu" or "cuda"; by default CUDA when this machine has it. store: from `connect_store`.
        init_timeout_seconds: of collectives until `set_timeouts`. rendezvous_seconds: the longest wait for the others.
        trace_buf_size, trace_folder: see `flight_recorder.recording`.
        Raises ParallelismError when the environment is wrong, RendezvousError when another rank does not come in time
        or cannot be reached.
        """
        import torch
        import torch.distributed as dist

        from titanlite.parallel.flight_recorder import recording
        from titanlite.parallel.rendezvous import barrier, connect

        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        env = this_rank()
        rank, size, device = env.rank, env.world_size, torch.device("cpu")
        if device_type == "cuda":
            gpus = torch.cuda.device_count()
            if env.local_world_size > gpus:
                raise ParallelismError(
                    f"{env.local_world_size} ranks on {socket.gethostname()}, which shows {gpus} GPUs: each rank needs "
                    "one of its own. Start fewer ranks per node"
                )
            device = torch.device("cuda", env.local_rank)
            torch.cuda.set_device(device)
            if not any(name in os.environ for name in ALLOCATOR):
                # Segments of fixed sizes do not fit the next tensors: it frees and allocates them again in each step.
                torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        if dist.is_initialized():
            with kernel_order(device_type):
                yield cls(rank, env.local_rank, size, device)
            return
        timeout = timedelta(seconds=init_timeout_seconds)
        with recording(trace_folder, trace_buf_size, device, size), kernel_order(device_type):
            store = store or connect_store(rendezvous_seconds) or dist.HashStore()
            barrier(store, rank, size, init_timeout_seconds, rendezvous_seconds)
            # Host-side collectives (checkpoint plans, broadcast decisions) go through gloo on GPUs too.
            backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
            connect(backend, store, rank, size, rendezvous_seconds)
            store.set_timeout(timeout)
            _set_timeout(timeout)
            try:
                yield cls(rank, env.local_rank, size, device, timeout)
            except BaseException:
                # A single process cleans up for later code. With peers, leave at once: they may be stuck in a
                # collective, and only the death of this rank lets the launcher end them.
                if size == 1:
                    dist.destroy_process_group()
                raise
            # Ranks that leave while others still hold gloo connections make those abort at exit.
            dist.barrier()
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
            parts = [f"{name} {degree}" for name, degree in zip(MESH_DIMS, degrees, strict=True) if degree != 1]
            equation = " x ".join(parts or ["all degrees 1"])
            raise ParallelismError(f"{equation} = {math.prod(degrees)}, but there are {self.size} ranks")
        mesh = init_device_mesh(self.device.type, degrees, mesh_dim_names=MESH_DIMS)
        self.apply_timeout()
        return mesh

    def apply_timeout(self) -> None:
        """Give new groups the timeout of the start: groups of a mesh do not take that of the default group."""
        if self.timeout is not None:
            _set_timeout(self.timeout)

    def broadcast(self, value: object) -> object:
        """Return rank 0's `value` on every rank (any picklable object; through gloo, on the host)."""
        import torch
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


def set_timeouts(seconds: float) -> None:
    """Set the collective timeout of every group of this process.

    The first step may compile and warm up for minutes. After it, a stuck peer should be found soon.
    """
    import torch.distributed as dist

    dist.barrier()  # a fast rank must not time out one that is still in the slow phase
    _set_timeout(timedelta(seconds=seconds))


@contextmanager
def patience(seconds: float, usual: float) -> Iterator[None]:
    """Let collectives take `seconds` inside (a save to a slow disk), and `usual` seconds again afterwards.

    All ranks must leave it together.
    """
    _set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        _set_timeout(timedelta(seconds=usual))


def _set_timeout(timeout: timedelta) -> None:
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    # All groups that torch knows: FSDP makes groups of its own, for a partial reshard one per group of weights.
    for group in list(_world.pg_map):
        if group.group_desc != KEEPS_TIMEOUT:
            _set_pg_timeout(timeout, group)


#: Kernels of `scaled_dot_product_attention` on GPUs, in the order in which they are tried: names of `SDPBackend`.
KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def kernel_order(device_type: str) -> AbstractContextManager[object]:
    """Let attention on GPUs try its kernels in the order of `KERNELS`; elsewhere do nothing."""
    if device_type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # Around the whole run: at each call it would cost tens of microseconds.
    return sdpa_kernel([getattr(SDPBackend, name) for name in KERNELS], set_priority=True)


#: For GLIBC_TUNABLES. They do as `keep_freed_memory`, and cache no small blocks: these lie in the remainders of aligned
#: requests, and holes between them are too small for the next tensor. Huge pages: 3 s of a start for 2 % speed.
TUNABLES = ":".join(
    f"glibc.malloc.{setting}" for setting in ("mmap_max=0", f"trim_threshold={2**62}", "mxfast=0", "tcache_count=0")
)


def chose_malloc() -> bool:
    """Return whether the user has chosen an allocator for the host's memory, or its settings."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory for the next step, for the rest of the process. Return whether that was possible.

    glibc gives large blocks back to the system when they are freed and asks for them again, a page fault for every
    4 KiB: hundreds of thousands in a step of a small model on a CPU. The next step needs as much memory as this one.
    Does nothing without glibc, or where `chose_malloc`.
    """
    import ctypes

    if chose_malloc():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # macOS, musl, Windows
        return False
    trim_threshold, mmap_max = -1, -4  # options of mallopt(3) in glibc's malloc.h
    # Without blocks of their own from mmap, large tensors come from the heap, whose end is not trimmed.
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, -1))
