"""GPUs, machines and clusters as numbers: the project's only table of peaks. No torch here.

Numbers of a GPU are NVIDIA's data sheets', dense (without sparsity); its memory is the least that
torch reports.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from titanlite.config.errors import ConfigError, Problem, nearest
from titanlite.models.spec import names_like
from titanlite.plan.parts import GIB
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.config.run_sections import Launch
    from titanlite.run.config import RunConfig


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    #: As "h100-80g": name, form where there are several, and memory in GB.
    key: str
    #: Pattern over CUDA's name of the device, in whole words.
    pattern: str
    #: Bytes that torch reports.
    memory: int
    #: Peak dense FLOPS of matrix products; float8 is None where there is none.
    bf16: float
    float8: float | None
    #: Bytes per second: of the memory; to the other GPUs of the machine, and to the host, each per
    #: direction.
    bandwidth: float
    link: float
    pcie: float
    #: Share of `bf16` that large products reach under the power limit. Fitted for A100, H100 and
    #: H200, taken for the others (FORMULAS.md).
    sustained: float = 0.597
    #: Share of `bf16` that causal attention kernels reach, counting only the pairs that they
    #: compute.
    attention: float = 0.278
    #: Bandwidth of an optimizer's update over that of other kernels.
    update: float = 1.0


def _gpu(
    key: str,
    pattern: str,
    gib: float,
    tflops: tuple[float, float | None],
    gb_per_s: tuple[float, float, float],
    *rest: float,
) -> Gpu:
    bf16, float8 = tflops
    speeds = [speed * 1e9 for speed in gb_per_s]
    return Gpu(key, pattern, int(gib * GIB), bf16 * 1e12, float8 and float8 * 1e12, *speeds, *rest)


#: Most specific pattern first. Whole words: A100 is neither A10G nor A1000, H200 not GH200. An H100
#: whose name gives neither its form nor its memory stays unknown: its forms differ by 30 %. The
#: H200's PCIe form computes as the H100 NVL. Links: NVLink, or PCIe where a machine's GPUs have no
#: switch between them (of NVL forms only pairs have).
GPUS: dict[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        _gpu("a100-80g", r"A100.*80GB", 79.15, (312, None), (2039, 300, 32), 0.748, 0.557),
        _gpu("a100-40g", r"A100", 39.39, (312, None), (1555, 300, 32), 0.748, 0.557),
        _gpu("h100-nvl-94g", r"H100[ -]NVL", 93.1, (835, 1671), (3938, 64, 64)),
        _gpu("h100-pcie-80g", r"H100[ -]PCIe", 79.1, (756, 1513), (2000, 64, 64)),
        _gpu("h100-80g", r"H100[ -](?:\d+GB HBM3|SXM\d?)", 79.1, (989, 1979), (3350, 450, 64)),
        _gpu("h200-nvl-141g", r"H200[ -]NVL", 139.7, (835, 1671), (4800, 64, 64)),
        _gpu("h200-141g", r"H200", 139.7, (989, 1979), (4800, 450, 64), 0.693, 0.322),
        _gpu("b200-180g", r"B200", 178.3, (2250, 4500), (8000, 900, 64)),
        _gpu("b300-288g", r"B300", 267.6, (2250, 4500), (8000, 900, 64)),
        _gpu("l40s-48g", r"L40S", 44.39, (362, 733), (864, 32, 32)),
        _gpu("l4-24g", r"L4", 21.95, (121, 242), (300, 32, 32)),
        _gpu("a10g-24g", r"A10G", 21.98, (70, None), (600, 32, 32), 0.748, 0.557),
    )
}


class Instance(NamedTuple):
    """One kind of machine on AWS."""

    gpu: str
    gpus: int
    #: Memory of one GPU in GB.
    gpu_memory: int
    #: EFA devices; 0: plain TCP.
    efa: int = 0
    #: EFA reads and writes the GPU's memory.
    rdma: bool = False
    #: Gbit/s of the machine's network, per direction.
    network: int = 0
    #: GiB of the host's memory.
    host: int = 0

    @property
    def gpu_key(self) -> str:
        return f"{self.gpu.lower()}-{self.gpu_memory}g"


#: Size → GPUs, and Gbit/s of g5, g6 and of g6e; sizes without EFA first.
_SIZES = {
    "xlarge": (1, 10, 20),
    "2xlarge": (1, 10, 20),
    "4xlarge": (1, 25, 20),
    "8xlarge": (1, 25, 25),
    "12xlarge": (4, 40, 100),
    "16xlarge": (1, 25, 35),
    "24xlarge": (4, 50, 200),
    "48xlarge": (8, 100, 400),
}
_WITHOUT_EFA = ("xlarge", "2xlarge", "4xlarge")
_G6E_EFA = {"24xlarge": 2, "48xlarge": 4}


def _graphics(name: str, gpu: str, memory: int, host: int) -> dict[str, Instance]:
    """Return the machines of a kind. host: GiB of an xlarge, which larger ones multiply."""
    is_newest = name == "g6e"
    found: dict[str, Instance] = {}
    for size, (gpus, network, larger) in _SIZES.items():
        efa = 0 if size in _WITHOUT_EFA else 1
        if is_newest:
            efa = _G6E_EFA.get(size, efa)
            network = larger
        shares = int(size.removesuffix("xlarge") or 1)
        machine = Instance(gpu, gpus, memory, efa, network=network, host=host * shares)
        found[f"{name}.{size}"] = machine
    return found


#: AWS instance types whose GPUs have bfloat16, as of 2026, from Amazon's tables of instance types
#: and of EFA.
INSTANCES: dict[str, Instance] = {
    **_graphics("g5", "A10G", 24, 16),
    **_graphics("g6", "L4", 24, 16),
    **_graphics("g6e", "L40S", 48, 32),
    "p4d.24xlarge": Instance("A100", 8, 40, 4, rdma=True, network=400, host=1152),
    "p4de.24xlarge": Instance("A100", 8, 80, 4, rdma=True, network=400, host=1152),
    "p5.48xlarge": Instance("H100", 8, 80, 32, rdma=True, network=3200, host=2048),
    "p5e.48xlarge": Instance("H200", 8, 141, 32, rdma=True, network=3200, host=2048),
    "p5en.48xlarge": Instance("H200", 8, 141, 16, rdma=True, network=3200, host=2048),
    "p6-b200.48xlarge": Instance("B200", 8, 180, 8, rdma=True, network=3200, host=2048),
    "p6-b300.48xlarge": Instance("B300", 8, 288, 16, rdma=True, network=6400, host=4096),
}

#: Network of machines of which AWS has none with the GPU: bytes/s of each GPU, as of 400 Gbit/s.
DEFAULT_NETWORK = 50e9
DEFAULT_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Cluster:
    """Equal machines."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    #: Bytes per second and direction between one machine and the others.
    network: float
    #: AWS instance type; empty: none is named.
    instance: str = ""
    #: Factor by which steps take longer, and the run that measured it (`--measured`).
    slower: float = 1.0
    note: str = ""

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def host(self) -> int | None:
        """Bytes of one machine's host memory; None: no instance type is named."""
        return find_instance(self.instance).host * GIB if self.instance else None


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its key, its unique beginning ("l4"), or CUDA's device name.

    Raises ConfigError with the nearest names.
    """
    key = name.lower()
    keys = [key] if key in GPUS else [other for other in GPUS if other.startswith(f"{key}-")]
    if len(keys) > 1:
        raise _error("gpu", f"{name} may be each of {', '.join(keys)}", "give one of them")
    known = GPUS[keys[0]] if keys else gpu_of_device(name)
    if known is None:
        raise _error("gpu", f"no GPU {name!r} is known", names_like(key, GPUS))
    return known


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the GPU of a CUDA device name; None if unknown, as for a MIG slice."""
    if re.search(r"\bMIG\b", device_name):
        return None
    named = (
        gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.pattern}\b", device_name, re.IGNORECASE)
    )
    return next(named, None)


def peak_flops(device_name: str) -> float | None:
    """Return the peak bf16 FLOPS by CUDA device name; None if unknown, as for a MIG slice."""
    gpu = gpu_of_device(device_name)
    return gpu.bf16 if gpu else None


def find_instance(name: str, place: str = "") -> Instance:
    """Return an AWS instance type, also from the "ml." names of SageMaker and HyperPod.

    place: of the name. Raises ConfigError with the nearest names.
    """
    found = INSTANCES.get(name.removeprefix("ml."))
    if found is None:
        message = f"no instance type {name!r} with bfloat16 is known"
        close = ", ".join(nearest(name, INSTANCES, 3))
        advice = f"nearest: {close or 'none'}; or leave it out and set launch.gpus_per_node"
        raise ConfigError([Problem("does-not-fit", "launch.instance_type", message, advice, place)])
    return found


def ranks_of(
    launch: Launch,
    *,
    gpu: str | None = None,
    instance: str | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
) -> int:
    """Return the given GPUs, else those of `[launch]`; 8 of an unknown machine."""
    kind = instance or ("" if gpu else launch.instance_type)
    size = _gpus_used(kind, launch) if kind else launch.gpus_per_node
    return gpus or (nodes or launch.nodes) * (size or DEFAULT_GPUS_PER_NODE)


def cluster_of(
    run: RunConfig,
    *,
    gpu: str | None = None,
    instance: str | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
) -> Cluster:
    """Return the machines of a run: as given, else as section `[launch]` says, for all its ranks.

    gpus: of all machines. Without an instance type a machine has 8 GPUs, with their share of AWS's
    slowest network for 8, else 400 Gbit/s each.
    Raises ConfigError when no GPU is named, or numbers contradict each other or the run's ranks.
    """
    instance = _instance_name(run, gpu, instance)
    own = run.launch.gpus_per_node
    if instance:
        machine = find_instance(instance)
        kind = GPUS[machine.gpu_key]
        own = _gpus_used(instance, run.launch)
        alike = [machine]
    else:
        kind = find_gpu(gpu or "")
        alike = [one for one in INSTANCES.values() if one.gpu_key == kind.key and one.gpus == 8]
    size = gpus_per_node or own or DEFAULT_GPUS_PER_NODE
    shares = [one.network / 8 * 1e9 / one.gpus for one in alike]
    network = min(shares, default=DEFAULT_NETWORK) * size
    ranks = run.mesh.world_size
    total = gpus or (nodes or 0) * size or ranks
    if total < size and nodes in (None, 1):
        # A part of one machine.
        size = total
    if total % size or nodes not in (None, total // size):
        machines = "whole machines" if nodes is None else counted(nodes, "machines")
        raise _error("gpus", f"{total} GPUs are not {machines} of {size}")
    if total != ranks:
        raise _error("gpus", f"{total} GPUs, but the run has {ranks} ranks")
    return Cluster(kind, size, total // size, network, instance)


def local_cluster(run: RunConfig, device_name: str, ranks: int) -> Cluster:
    """Return machines like this one, or those of `launch.instance_type`. Raises ConfigError.

    ranks: of this machine; more than 8 are several machines.
    """
    if run.launch.instance_type:
        return cluster_of(run)
    if ranks > DEFAULT_GPUS_PER_NODE:
        ranks = math.gcd(ranks, DEFAULT_GPUS_PER_NODE)
    return cluster_of(run, gpu=device_name, gpus_per_node=ranks)


def _gpus_used(kind: str, launch: Launch) -> int:
    machine = find_instance(kind)
    return min(machine.gpus, launch.gpus_per_node or machine.gpus)


def _instance_name(run: RunConfig, gpu: str | None, instance: str | None) -> str:
    """Return the given instance type; empty: a GPU is given. Raises ConfigError."""
    if gpu and instance:
        raise _error("gpu", f"both {gpu} and {instance} are given", "give one of them")
    found = instance or ("" if gpu else run.launch.instance_type)
    if not (gpu or found):
        hint = "give --gpu h100-80g, --instance p5.48xlarge or launch.instance_type"
        raise _error("gpu", "no GPU is named", hint)
    return found


def _error(key: str, message: str, hint: str = "") -> ConfigError:
    return ConfigError([Problem("does-not-fit", f"--{key}", message, hint)])
