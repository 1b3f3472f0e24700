"""Asynchronous tensor parallelism: inductor splits products so that their parts overlap with their
traffic.

    memory.py    GPUs that reach each other's memory, which it needs

The key is `experimental.enable_async_tensor_parallel`. memory.py needs torch and is imported where
it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import Rule, broken_rules, contains
from titanlite.dist import ParallelismError
from titanlite.run.features import Feature

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.config.loaded import LoadedConfig
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import RunConfig


KEY = "experimental.enable_async_tensor_parallel"
NEEDS = [
    Rule(KEY, True, "training.compile", True),
    Rule(KEY, True, "compile.components", contains("model"), '"model" must be among them'),
    Rule(KEY, True, "compile.backend", "inductor"),
]


class AsyncTensorParallel(Feature):
    """Asynchronous tensor parallelism in a run that has it on."""

    key = KEY

    # Before the ranks start

    def contradictions(self, config: LoadedConfig) -> Iterable[Problem]:
        return broken_rules(config, NEEDS)

    # On the machine

    def machine_problems(self, run: RunConfig, args: Any | None) -> Iterator[Problem]:
        if args is None or run.mesh.tensor == 1:
            return
        import torch

        from titanlite.dist.launch_env import this_rank
        from titanlite.features.async_tp.memory import check_async

        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            check_async(run.mesh.tensor, device_type, this_rank().local_world_size)
        except ParallelismError as error:
            hint = (
                "set it to false: tensor parallelism works without it, its traffic then waits for "
                "the products"
            )
            yield Problem("does-not-fit", KEY, str(error), hint)

    def enable(self, mesh: DeviceMesh) -> None:
        from titanlite.features.async_tp.memory import enable_async

        if mesh["tp"].size() > 1:
            enable_async(mesh["tp"])

    def convert(self, builder: ModelBuilder, model: nn.Module) -> None:
        builder.compile_options["_micro_pipeline_tp"] = True

    # The plan

    def plan_speed(self, step: StepSizes) -> None:
        step.tensor_traffic_left = step.rates.constants.async_tensor
