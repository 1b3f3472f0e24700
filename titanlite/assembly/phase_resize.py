"""Fits the parts of a model to the size of a step, where `[[data.phase]]` changes it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from titanlite.assembly.model import ModelParts
from titanlite.data.step_sizes import StepSize
from titanlite.run.config import RunConfig
from titanlite.utils import counted, logger


@runtime_checkable
class Resizable(Protocol):
    """A runner that is made for steps of one size."""

    def resize(self, accumulation: int, seq_len: int) -> None:
        """`seq_len` counts the tokens of a row on this rank."""
        ...


class Resizer:
    """Is called with the size of each step, and made with that of the first."""

    def __init__(self, run: RunConfig, model: ModelParts, size: StepSize) -> None:
        self._run = run
        self._model = model
        self._size = size
        if run.training.compile and len(run.legs) > 1:
            import torch

            # In training and in validation. Beyond eight torch would end the run.
            config = torch._dynamo.config
            config.recompile_limit = max(config.recompile_limit, 4 + 2 * len(run.legs))

    def __call__(self, size: StepSize) -> None:
        before = self._size
        if size == before:
            return
        self._size = size
        logger.info(
            f"data.phase: from here on a step has {_in_words(size)}; it had {_in_words(before)}"
        )
        if self._model.moe_layers is not None:
            self._model.moe_layers.set_step_tokens(self._model.model, size.tokens)
        rank_len = size.seq_len // self._run.mesh.context
        at_once = self._run.batch.micro_batch_size * self._run.mesh.dp_degree
        runner = self._model.runner
        if isinstance(runner, Resizable):
            runner.resize(size.sequences // at_once, rank_len)


def _in_words(size: StepSize) -> str:
    sequences = counted(size.sequences, "sequences")
    return f"{sequences} of {size.seq_len:,} tokens, {size.tokens:,} in all"
