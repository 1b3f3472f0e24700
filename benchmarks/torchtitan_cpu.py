"""Runs torchtitan 0.2.2's own `train` on a CPU: the other side of `throughput.py` and of
`torchtitan_losses.py`.

torchtitan assumes CUDA. What is changed here lets it start on gloo; none of it changes what it
computes:
the device type, functions of `torch.cuda` that `torch.cpu` lacks, `barrier` without device ids, a
stand-in for a module that imports triton, and plain sums where gloo knows no pre-multiplied ones. A
model of any shape is registered as the flavor `bench`; its sizes come as JSON in TITAN_BENCH_MODEL.
With a file named in TITAN_BENCH_RECORD it trains from the weights and batches of `equal_start.py`
and writes what it logs there, unrounded.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equal_start


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


class _Sequences:
    """What torchtitan's trainer asks of a data loader: micro-batches of the sequences i with i =
    rank (mod ranks).
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        import torch

        size = equal_start.MICRO_BATCH
        indexes = range(self._rank, equal_start.STEPS * equal_start.GLOBAL_BATCH, self._ranks)
        for first in range(0, len(indexes), size):
            rows = [equal_start.sequence(i) for i in indexes[first : first + size]]
            tokens, labels = (
                torch.stack([torch.from_numpy(row) for row in column])
                for column in zip(*rows, strict=True)
            )
            yield {"input": tokens}, labels


def recording_trainer(record: Path) -> Any:
    """torchtitan's Trainer with the weights and batches of `equal_start`; its own `train_step` runs
    as it is.
    """
    import torch
    import torchtitan.protocols.train_spec as specs
    import torchtitan.train as train

    own = specs.get_train_spec("llama3")
    own.build_tokenizer_fn = None
    own.build_dataloader_fn = lambda *, dp_world_size, dp_rank, **_: _Sequences(
        dp_rank, dp_world_size
    )
    specs.register_train_spec("llama3", own)

    class Recording(train.Trainer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name, parameter in self.model_parts[0].named_parameters():
                value = torch.from_numpy(equal_start.weight(name, tuple(parameter.shape)))
                equal_start.place(parameter, value)
            self.metrics_processor.log = self._log

        def _log(
            self,
            step: int,
            loss: float,
            max_loss: float,
            norm: float,
            extra_metrics: dict[str, Any],
        ) -> None:
            if torch.distributed.get_rank() == 0:
                row = {
                    "step": step,
                    "loss": loss,
                    "max_loss": max_loss,
                    "grad_norm": norm,
                    "lr": extra_metrics["lr"],
                }
                with open(record, "a") as stream:
                    stream.write(json.dumps(row) + "\n")

    return Recording


def main() -> None:
    patch_torch()
    stand_in_for_triton()
    import torchtitan.train as train
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    model = json.loads(os.environ["TITAN_BENCH_MODEL"])
    if "rope_scaling_args" in model:
        model["rope_scaling_args"] = RoPEScalingArgs(**model["rope_scaling_args"])
    llama3_args["bench"] = TransformerModelArgs(**model)
    record = os.environ.get("TITAN_BENCH_RECORD")
    train.main(recording_trainer(Path(record)) if record else train.Trainer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
