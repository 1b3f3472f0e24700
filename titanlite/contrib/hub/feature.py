"""`checkpoint.hub`: checkpoints of a run go to the hub while it trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.run.features import Feature, Row

if TYPE_CHECKING:
    from torch import nn

    from titanlite.assembly.build import TrainingComponents
    from titanlite.callbacks import Callback
    from titanlite.config.sections import Config
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.run.config import RunConfig
    from titanlite.run.features import Write


class HubFeature(Feature):
    """Uploads of a run that names a repository."""

    key = "checkpoint.hub"

    def __init__(self, config: Config) -> None:
        self.section = config.checkpoint

    def machine_problems(self, run: RunConfig, args: Any | None) -> Iterator[Problem]:
        from titanlite.contrib.hub.upload import HubError, open_repository
        from titanlite.dist.launch_env import this_rank

        try:
            if args is None and this_rank().rank == 0:
                open_repository(self.section.hub, private=True)
        except HubError as error:
            yield Problem("does-not-fit", self.key, str(error), "train without it")

    def callbacks(self, parts: TrainingComponents, write: Write) -> Iterator[Callback]:
        if parts.saves is not None and parts.world.rank == 0:
            from titanlite.contrib.hub.callback import HubUploads

            run = parts.run
            yield HubUploads(self.section, Path(run.job.dump_folder), run.model.name)

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        every = self.section.hub_every
        which = "each checkpoint"
        if every:
            which = f"checkpoints of every {every:,} steps, milestones and the last one"
        yield "hub", f"{which} to {self.section.hub}, branch step-N; at the end also to main"
