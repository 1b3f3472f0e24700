"""The loss in chunks of the tokens.

    head.py          a head that computes the loss too, and its way under tensor parallelism
    plan_memory.py   what head and loss keep and need, for the plan

The key is `training.loss_chunks`. head.py needs torch and is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.run.features import Feature

if TYPE_CHECKING:
    from torch import nn

    from titanlite.config.sections import Config
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.rank_sizes import RankSizes
    from titanlite.run.config import RunConfig


class LossChunks(Feature):
    """The loss in more than one chunk."""

    key = "training.loss_chunks"

    def __init__(self, config: Config) -> None:
        self.chunks = config.training.loss_chunks

    # On the machine

    def machine_problems(self, run: RunConfig, args: Any | None) -> Iterable[Problem]:
        if args is None:
            return
        try:
            self.apply(run.spec.build_on_meta(args), run.spec.head)
        except ValueError as error:
            yield Problem("does-not-fit", self.key, str(error), "set it to 1")

    # The model

    def convert(self, builder: ModelBuilder, model: nn.Module) -> None:
        self.apply(model, builder.spec.head)

    def apply(self, model: nn.Module, head: str) -> None:
        """Let a model or pipeline stage on the meta device compute its loss, in place. Raises
        ValueError as `chunk_head` does.
        """
        from titanlite.features.loss_chunks.head import chunk_head

        chunk_head(model, self.chunks, head)

    # The plan

    def plan_memory(self, sizes: RankSizes) -> None:
        from titanlite.features.loss_chunks.plan_memory import chunked_loss

        sizes.loss = replace(sizes.loss, chunks=self.chunks, operators=chunked_loss)
