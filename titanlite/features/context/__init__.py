"""Context parallelism (CP): ranks that share each sequence.

    ranks.py      this rank's part of a sequence        attention.py     the blocks of a model
    loader.py     … of the batches                      plan_memory.py   what they keep and need

The key is `experimental.context_parallel_degree`. Files that need torch are imported where they are
used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import around
from titanlite.run.features import Feature

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.features.context.loader import CPLoader
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.rank_sizes import RankSizes
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import RunConfig


class ContextParallel(Feature):
    """Context parallelism of more than one rank."""

    key = "experimental.context_parallel_degree"
    model_field = "context_parallel"

    # Before the ranks start

    def rank_problems(self, run: RunConfig) -> Iterator[Problem]:
        chunks = 2 * run.mesh.context
        for key, length in run.sequence_lengths.items():
            if length % chunks == 0:
                continue
            message = (
                f"is {run.mesh.context}, but {key} = {length} cannot be cut into {chunks} chunks, "
                "two for each rank"
            )
            yield Problem(
                "divide", self.key, message, f"these work: {key} = {around(length, chunks)}"
            )

    # The model: `titanlite.parallel.parallelize` calls these

    def distribute(self, builder: ModelBuilder, model: nn.Module) -> None:
        from titanlite.features.context.gathered_attention import apply_cp
        from titanlite.parallel.parallelize import select

        # A pipeline stage may have no blocks.
        if select(model, builder.spec.block_names(builder.args)):
            apply_cp(model, builder.mesh)

    def part(self, tensor: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
        from titanlite.features.context.balanced_chunks import CPRank

        return CPRank.of(mesh).part(tensor, dim)

    # The text: `titanlite.assembly.loaders` calls this

    def loader(self, whole: Any, mesh: DeviceMesh) -> CPLoader:
        from titanlite.features.context.loader import CPLoader

        return CPLoader(whole, mesh)

    # The plan

    def plan_memory(self, sizes: RankSizes) -> None:
        from titanlite.features.context.plan_memory import attention_of_parts

        sizes.attention = attention_of_parts

    def plan_speed(self, step: StepSizes) -> None:
        step.attention_slower = 1 + step.rates.constants.context * math.log2(step.mesh.context)
        step.traffic["context traffic"] = self.traffic

    def traffic(self, step: StepSizes) -> float:
        """Return the seconds of a micro-batch's gathers of keys and values, and of their
        gradients.
        """
        mesh = step.mesh
        args = step.args
        # Values of latent attention are filled up to the width of keys.
        width = getattr(args, "qk_head_dim", getattr(args, "head_dim", 0))
        heads = getattr(args, "kv_heads", 0) * width
        size = step.itemsize * step.tokens * mesh.context * (2 * heads / mesh.tensor)
        one = step.rates.collective(size, mesh.context, mesh.tensor)
        return step.blocks * (2 + step.recomputed) * one
