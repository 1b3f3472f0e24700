"""Local saves: on each node's own disk or in its memory, more often than shared checkpoints.

    checks.py    other keys
    folder.py    what is on one node, and which saves may come back
    part.py      one rank's tensors in a safetensors file
    write.py     one local save, on all ranks
    copies.py    copies of parts on other nodes
    reader.py    each rank gets and reads its part: its own, or a copy from another rank
    load.py      the choice between the two tiers, and the load
    manager.py   a `Checkpointer` with both

The key is `checkpoint.local_folder`. Each rank writes all tensors that it holds:

    local_folder/RUN/rank-R/step-N/ID.safetensors, generators.bin, manifest.json
    local_folder/RUN/copy-R/step-N/...: the same, of a rank on another node

The manifest is the same on all ranks, and has the hash of each rank's part. It comes last, when
all parts are there. So a single manifest proves a whole save. Two parts with the same hash are the
same part: replicas of HSDP find each other by that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from titanlite.features.local_saves import checks
from titanlite.run.features import Feature, Row

if TYPE_CHECKING:
    from torch import nn

    from titanlite.config.errors import Problem
    from titanlite.config.loaded import LoadedConfig
    from titanlite.config.sections import Config
    from titanlite.features.local_saves.manager import LocalSchedule, TieredCheckpointer
    from titanlite.parallel.parallelize import ModelBuilder


class LocalSaves(Feature):
    """Saves to each node's own disk or memory."""

    key = checks.KEY

    def __init__(self, config: Config) -> None:
        self.section = config.checkpoint

    def contradictions(self, config: LoadedConfig) -> Iterable[Problem]:
        return checks.findings(config.sections.checkpoint)

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        section = self.section
        yield (
            "local saves",
            f"every {section.local_interval} steps in {section.local_folder} of each node, "
            f"{section.local_keep_latest_k} kept",
        )

    # The checkpoints: `titanlite.assembly.saves` calls it

    def parts(self) -> tuple[type[TieredCheckpointer], type[LocalSchedule]]:
        """Return the classes that save and resume with both kinds, and that say when."""
        from titanlite.features.local_saves.manager import LocalSchedule, TieredCheckpointer

        return TieredCheckpointer, LocalSchedule
