"""Activations of blocks that wait in host memory for their backward.

The key is `activation_checkpoint.offload`. `titanlite.parallel.offload_blocks` sends and fetches
them; `plan_memory.py` has what that leaves on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.config.errors import Problem
from titanlite.run.features import Feature

if TYPE_CHECKING:
    from titanlite.config.loaded import LoadedConfig
    from titanlite.plan.rank_sizes import RankSizes
    from titanlite.plan.step_sizes import StepSizes


class ActivationOffload(Feature):
    """Offload of activations in a run that has it on."""

    key = "activation_checkpoint.offload"

    # Before the ranks start

    def contradictions(self, config: LoadedConfig) -> Iterator[Problem]:
        if not config.sections.activation_checkpoint.by_op:
            return
        message = (
            'excludes activation_checkpoint.selective_ac_option = "op", whose tensors are held on '
            "the device"
        )
        hint = 'take mode = "full", or selective_ac_option = "N"'
        yield Problem("conflict", self.key, message, hint)

    # The plan

    def plan_memory(self, sizes: RankSizes) -> None:
        from titanlite.features.activation_offload.plan_memory import SentEvents

        if sizes.device != "cpu":
            sizes.kept_events = SentEvents

    def plan_speed(self, step: StepSizes) -> None:
        step.activation_transfers = self.transfers

    def transfers(self, step: StepSizes) -> float:
        """Return the seconds of a step's copies over PCIe, in one direction."""
        inputs = step.itemsize * step.tokens * step.width * step.blocks / step.mesh.tensor
        whole = step.itemsize * step.tokens * step.outputs * 1.5
        # Roughly what all blocks keep of one micro-batch.
        kept = inputs + whole * (1 - step.recomputed)
        return kept * step.micro_batches * step.stage_share / step.rates.gpu.pcie
