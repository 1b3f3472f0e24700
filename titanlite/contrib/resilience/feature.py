"""`checkpoint.local_folder`: saves on each node's own disk or in its memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from titanlite.config.errors import Problem
from titanlite.config.raw_values import quote
from titanlite.config.urls import is_url
from titanlite.run.features import Feature, Row

if TYPE_CHECKING:
    from torch import nn

    from titanlite.config.loaded import LoadedConfig
    from titanlite.config.sections import Config
    from titanlite.contrib.resilience.manager import LocalSchedule, TieredCheckpointer
    from titanlite.parallel.parallelize import ModelBuilder


KEY = "checkpoint.local_folder"
#: Stands for the number of a rank on its node.
PLACE = "{local_rank}"


class LocalSaves(Feature):
    """Saves to each node's own disk or memory."""

    key = KEY

    def __init__(self, config: Config) -> None:
        self.section = config.checkpoint

    def contradictions(self, config: LoadedConfig) -> Iterator[Problem]:
        section = config.sections.checkpoint
        folder = section.local_folder or ""
        plain = folder.replace(PLACE, "")
        hint = f"name a folder of each node, such as /local/saves; {PLACE} may stand in it"
        # A variable gets its value on the machines of the job.
        is_known = "${" not in folder
        if is_url(folder):
            yield Problem("url", KEY, f"{quote(folder)} is a store, which all nodes share", hint)
        elif is_known and ("{" in plain or "}" in plain):
            message = f"{quote(folder)} has another field than {PLACE}"
            yield Problem("unknown-value", KEY, message, hint)
        elif is_known and not os.path.isabs(folder):
            yield Problem("unknown-value", KEY, f"{quote(folder)} does not begin with /", hint)
        if section.interval_type == "steps" and section.local_interval >= section.interval:
            message = (
                f"is {section.local_interval}, and checkpoint.interval = {section.interval} saves "
                "as often"
            )
            yield Problem(
                "conflict", "checkpoint.local_interval", message, "lower it, or raise that"
            )

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        section = self.section
        yield (
            "local saves",
            f"every {section.local_interval} steps in {section.local_folder} of each node, "
            f"{section.local_keep_latest_k} kept",
        )

    # The checkpoints: `titanlite.assembly.saves` calls it

    def parts(self) -> tuple[type[TieredCheckpointer], type[LocalSchedule]]:
        from titanlite.contrib.resilience.manager import LocalSchedule, TieredCheckpointer

        return TieredCheckpointer, LocalSchedule
