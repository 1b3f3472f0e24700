"""Finds silent data corruption: a chip, a link or memory that computes wrong and reports no error.

The key is `sdc.freq`. `repeat.py` runs checked steps twice and compares their bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.run.features import Feature

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.callbacks import Callback
    from titanlite.config.sections import Config
    from titanlite.run.features import Write


class CorruptionChecks(Feature):
    """The checks in a run that has them on."""

    key = "sdc.freq"

    def __init__(self, config: Config) -> None:
        self.freq = config.sdc.freq

    def callbacks(self, parts: TrainingComponents, write: Write) -> Iterator[Callback]:
        from titanlite.features.sdc.repeat import RepeatedSteps

        yield RepeatedSteps(self.freq)
