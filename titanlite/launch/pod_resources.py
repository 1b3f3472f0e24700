"""CPUs and memory that a pod asks for, and the size of its /dev/shm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from titanlite.config.errors import ConfigError
from titanlite.launch.job import Job
from titanlite.plan.hardware import DEFAULT_NETWORK, GPUS, HOST_GIB, Cluster
from titanlite.plan.parts import GIB

#: CPUs of a rank with a GPU: its main thread, and those that load data, launch collectives and
#: write saves.
_CPUS = 2
#: Shared memory of a rank, in GiB: NCCL has buffers of 4 MiB for up to 32 channels and each other
#: GPU of the machine.
_SHM_GIB = 2
#: Share of a machine's memory that pods can get: the rest is Kubernetes' and the system's.
_USABLE = 0.9
#: The part of the plan that may lie in /dev/shm.
_COPY = "copy of an asynchronous save"
#: The value of a key that asks for nothing.
_NOTHING = "0"


class PodResources(NamedTuple):
    """What a pod asks for beside GPUs and network devices."""

    #: Resource → amount, as Kubernetes writes it.
    requests: dict[str, str]
    #: Largest size of /dev/shm; "": all memory of the node.
    shm: str
    #: What the numbers leave open.
    warnings: list[str]


def pod_resources(job: Job) -> PodResources:
    """Return the requests of section `[launch]`; those it leaves out are from the plan."""
    launch = job.launch
    planned = _planned(job)
    warnings = []
    shm = ""
    memory = ""
    if planned is not None:
        shm_gib = _SHM_GIB * job.ranks
        needed = math.ceil(sum(planned.values()) / GIB) + shm_gib
        usable = _usable_gib(job)
        if usable is not None and needed > usable:
            warnings.append(
                f"the plan has {needed} GiB of memory for a pod, and {launch.instance_type} has "
                f"{usable} GiB for pods: it asks for these"
            )
            needed = usable
        shm = f"{shm_gib + math.ceil(planned.get(_COPY, 0) / GIB)}Gi"
        memory = f"{needed}Gi"
    elif not (launch.memory_request and launch.shm_size):
        warnings.append(
            "the memory of this run is not known: set launch.memory_request, or pods are evicted "
            "first, and launch.shm_size, or /dev/shm may fill the node"
        )
    cpus = job.ranks if launch.cpu else _CPUS * job.ranks
    asked = {
        "cpu": launch.cpu_request or str(cpus),
        "memory": launch.memory_request or memory,
    }
    requests = {name: amount for name, amount in asked.items() if amount not in ("", _NOTHING)}
    size = launch.shm_size or shm
    return PodResources(requests, "" if size == _NOTHING else size, warnings)


def _planned(job: Job) -> Mapping[str, int] | None:
    """Return the memory of a pod by part, in bytes; None: no formula has it."""
    from titanlite.plan.plan import make_plan

    if job.launch.cpu:
        return None
    # The memory of the host depends on the number of ranks, not on their GPU.
    gpu = GPUS[job.instance.gpu_key] if job.instance else next(iter(GPUS.values()))
    cluster = Cluster(gpu, job.ranks, job.launch.nodes, DEFAULT_NETWORK)
    try:
        return make_plan(job.run, cluster).host
    except ConfigError:
        return None


def _usable_gib(job: Job) -> int | None:
    """Return the GiB of a machine that pods can get; None: the machine is not known."""
    size = HOST_GIB.get(job.launch.instance_type.removeprefix("ml."))
    return None if size is None else int(size * _USABLE)
