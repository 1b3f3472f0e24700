"""What follows for a run from the keys of its pipeline. No torch here.

Here nothing is checked: `titanlite.features.pipeline.checks` tells what does not fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace as replace_fields

from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.features.pipeline.stage_layout import stage_count
from titanlite.parallel.schedules import find_schedule

if TYPE_CHECKING:
    from titanlite.run.config import BatchSizes, MeshSizes


class Cut(NamedTuple):
    """How a pipeline cuts the model and the micro-batches of a run."""

    #: With the schedule's exact name, the number of pieces, and the default of
    #: training.reshard_after_forward.
    sections: Config
    #: Stages of the whole model, and pieces of each micro-batch.
    stages: int
    microbatches: int
    #: How the numbers came about, and what a user should know.
    notes: list[str]
    warnings: list[str]


def cut_run(d: Config, microbatches: int, mesh: MeshSizes, batch: BatchSizes) -> Cut:
    """Return how a pipeline cuts a run. microbatches: pieces of each micro-batch."""
    settings = d.experimental
    schedule = find_schedule(settings.pipeline_parallel_schedule) or "1F1B"
    points = settings.pipeline_parallel_split_points
    reshard = d.training.reshard_after_forward
    experimental = replace_fields(
        settings,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatches=microbatches,
    )
    training = d.training
    if reshard == "default":
        training = replace_fields(training, reshard_after_forward="never")
    notes = [
        f"pipeline micro-batches per step = {microbatches * batch.accumulation}: {microbatches} "
        f"of each batch of {batch.micro_batch_size} sequences * accumulation {batch.accumulation}"
    ]
    warnings = []
    if mesh.weight_shards > 1 and reshard == "default":
        notes.append(
            "weights stay gathered for the whole step: each pipeline micro-batch would gather "
            "them again"
        )
    elif mesh.weight_shards > 1 and reshard != "never":
        warnings.append(
            f"training.reshard_after_forward = {quote(reshard)} gathers the weights again for "
            "each pipeline micro-batch"
        )
    return Cut(
        replace_fields(d, experimental=experimental, training=training),
        stage_count(schedule, mesh.pipeline, points),
        microbatches,
        notes,
        warnings,
    )
