"""The moments at which a feature has a say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from titanlite.assembly.report_rows import Row, Setup
    from titanlite.config.errors import Problem
    from titanlite.config.loaded import LoadedConfig
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import RunConfig


class Feature:
    """Base of all features, as `Callback` is of callbacks: a method for each moment, all optional.

    The methods here are called for every feature that is on, in the order of `Features.on`. Some
    steps have a fixed order or concern one feature alone. They are methods of that feature, and the
    place where they happen calls them by name.
    """

    #: The key that switches it on, for messages.
    key: str
    #: The field of `ModelSpec` without which a model does not offer it; "": any model does.
    model_field = ""

    # Before the ranks start. Nothing here imports torch.

    def contradictions(self, config: LoadedConfig) -> Iterable[Problem]:
        """Find keys that exclude each other on any ranks and with any model."""
        return ()

    def rank_problems(self, run: RunConfig) -> Iterable[Problem]:
        """Find what does not fit the number of ranks."""
        return ()

    def model_problems(self, run: RunConfig, args: Any) -> Iterable[Problem]:
        """Find what does not fit the model on these ranks.

        args: the model's. `vocab_size` is None where the tokenizer decides it.
        """
        return ()

    def warnings(self, run: RunConfig) -> Iterable[str]:
        """Tell what a user should know and what stops nothing."""
        return ()

    # On the machine of a rank

    def machine_problems(self, run: RunConfig, args: Any | None) -> Iterable[Problem]:
        """Find what this machine, or the torch on it, cannot do. It needs no process group.

        args: the model's; None before the text is read, when only the machine is looked at.
        """
        return ()

    # The plan. Nothing here imports torch.

    def traffic(self, step: StepSizes) -> Mapping[str, float]:
        """Return traffic that computing waits for, in seconds of a micro-batch.

        By the names of `titanlite.plan.speed.PARTS`.
        """
        return {}

    # On the ranks

    def report_rows(self, setup: Setup, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        """Return rows of the start report."""
        return ()
