"""Values that a pipeline gives to keys that a config leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_fields

from titanlite.config.toml import quote
from titanlite.features.pipeline.split import stage_count
from titanlite.parallel.schedules import find_schedule

if TYPE_CHECKING:
    from titanlite.config.sections import Config
    from titanlite.start.derive import BatchSizes, MeshSizes, Told


def fill_in(d: Config, mesh: MeshSizes, batch: BatchSizes, told: Told) -> tuple[Config, int, int]:
    """Return the sections of a run with a pipeline, the stages of the whole model, and the pieces
    of each micro-batch.
    """
    settings = d.experimental
    schedule = find_schedule(settings.pipeline_parallel_schedule) or "1F1B"
    pieces = settings.pipeline_parallel_microbatches or mesh.pipeline
    stages = stage_count(schedule, mesh.pipeline, settings.pipeline_parallel_split_points)
    told.notes.append(
        f"pipeline micro-batches per step = {pieces * batch.accumulation}: {pieces} of each batch "
        f"of {batch.micro_batch_size} sequences * accumulation {batch.accumulation}"
    )
    reshard = d.training.reshard_after_forward
    if mesh.weight_shards > 1 and reshard == "default":
        told.notes.append(
            "weights stay gathered for the whole step: each pipeline micro-batch would gather "
            "them again"
        )
    elif mesh.weight_shards > 1 and reshard != "never":
        told.warnings.append(
            f"training.reshard_after_forward = {quote(reshard)} gathers the weights again for "
            "each pipeline micro-batch"
        )
    experimental = replace_fields(
        settings,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatches=pieces,
    )
    training = d.training
    if reshard == "default":
        training = replace_fields(training, reshard_after_forward="never")
    return replace_fields(d, experimental=experimental, training=training), stages, pieces
