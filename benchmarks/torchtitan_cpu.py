"""Runs torchtitan 0.2.2's own `train` on a CPU, for `benchmarks/throughput.py --versus torchtitan`.

torchtitan assumes CUDA. What is changed here lets it start on gloo; none of it changes what it computes:
the device type, functions of `torch.cuda` that `torch.cpu` lacks, `barrier` without device ids, a stand-in for a module
that imports triton, and plain sums where gloo knows no pre-multiplied ones. A model of any shape is registered as the
flavor `bench`; its sizes come as JSON in TITAN_BENCH_MODEL.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any


class _Properties:
    """What torchtitan asks of a device."""

    name = "CPU"
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def patch_torch() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    missing: dict[str, Any] = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: _Properties(),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
    }
    for name, function in missing.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)
    # Read before the first allocation, where CUDA's counters would be zero.
    torch.cpu.memory_stats = lambda device=None: _Zeros()  # type: ignore[attr-defined]

    barrier = dist.barrier
    dist.barrier = lambda *args, **kwargs: barrier(  # type: ignore[assignment]
        *args, **{name: value for name, value in kwargs.items() if name != "device_ids"}
    )

    divide = FSDPModule.set_gradient_divide_factor

    def divide_by_sum(self: FSDPModule, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_by_sum  # type: ignore[method-assign]


class _Zeros(dict):  # type: ignore[type-arg]
    def __missing__(self, key: str) -> int:
        return 0

    def get(self, key: str, default: Any = None) -> int:
        return 0


def stand_in_for_triton() -> None:
    module = types.ModuleType("torchtitan.models.moe.kernels")
    module.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def main() -> None:
    patch_torch()
    stand_in_for_triton()
    import torchtitan.train as train
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    llama3_args["bench"] = TransformerModelArgs(**json.loads(os.environ["TITAN_BENCH_MODEL"]))
    train.main(train.Trainer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
