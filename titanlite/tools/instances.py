"""AWS instance types with GPUs, as of 2026, from Amazon's tables of instance types and of EFA."""

from __future__ import annotations

from typing import NamedTuple


class Instance(NamedTuple):
    """One kind of machine."""

    gpu: str
    gpus: int
    #: Memory of one GPU in GB.
    gpu_memory: int
    #: EFA devices; 0: plain TCP.
    efa: int = 0
    #: EFA reads and writes the GPU's memory.
    rdma: bool = False


_SIZES = {
    "xlarge": 1,
    "2xlarge": 1,
    "4xlarge": 1,
    "8xlarge": 1,
    "12xlarge": 4,
    "16xlarge": 1,
    "24xlarge": 4,
    "48xlarge": 8,
}
_EFA_SIZES = ("8xlarge", "12xlarge", "16xlarge", "24xlarge", "48xlarge")
_G6E_EFA = {"24xlarge": 2, "48xlarge": 4}


def _graphics(name: str, gpu: str, memory: int) -> dict[str, Instance]:
    def efa(size: str) -> int:
        return (_G6E_EFA.get(size, 1) if name == "g6e" else 1) if size in _EFA_SIZES else 0

    return {f"{name}.{size}": Instance(gpu, gpus, memory, efa(size)) for size, gpus in _SIZES.items()}


INSTANCES: dict[str, Instance] = {
    **_graphics("g5", "A10G", 24),
    **_graphics("g6", "L4", 24),
    **_graphics("g6e", "L40S", 48),
    "p4d.24xlarge": Instance("A100", 8, 40, 4, rdma=True),
    "p4de.24xlarge": Instance("A100", 8, 80, 4, rdma=True),
    "p5.48xlarge": Instance("H100", 8, 80, 32, rdma=True),
    "p5e.48xlarge": Instance("H200", 8, 141, 32, rdma=True),
    "p5en.48xlarge": Instance("H200", 8, 141, 16, rdma=True),
    "p6-b200.48xlarge": Instance("B200", 8, 180, 8, rdma=True),
}


def network_environment(instance: Instance | None, *, efa: bool = True) -> dict[str, str]:
    """Return the variables of NCCL and libfabric for the network of an instance type; None: none are known.

    efa: with those of EFA; a single machine needs none.
    """
    if instance is None:
        return {}
    # Sockets carry the start-up and, without EFA, all traffic: not over loopback, nor over a container's bridge.
    variables = {"NCCL_SOCKET_IFNAME": "^lo,docker,veth"}
    if instance.efa and efa:
        variables |= {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}  # huge pages break fork of data workers
    if instance.rdma and efa:
        variables["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return variables
