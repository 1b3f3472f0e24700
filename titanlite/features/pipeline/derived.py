"""What follows for a run from the keys of its pipeline. No torch here.

Here nothing is checked: `titanlite.features.pipeline.checks` tells what does not fit.
"""

from __future__ import annotations

from msgspec.structs import replace as replace_fields

from titanlite.config.notes import Note, Weight
from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.features.pipeline.stage_layout import stage_count
from titanlite.parallel.schedules import find_schedule
from titanlite.run.config import MeshSizes, PipelineSizes


def cut_run(
    d: Config, microbatches: int, mesh: MeshSizes
) -> tuple[Config, PipelineSizes, list[Note]]:
    """Return the sections of a run with a pipeline, how it cuts them, and what a user should know.

    The sections have the schedule's exact name, the number of pieces, and the default of
    training.reshard_after_forward. microbatches: pieces of each micro-batch.
    """
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
    notes = []
    if mesh.weight_shards > 1 and reshard == "default":
        text = (
            "weights stay gathered for the whole step: each pipeline micro-batch would gather "
            "them again"
        )
        notes.append(Note(Weight.SPEED, text))
    elif mesh.weight_shards > 1 and reshard != "never":
        text = (
            f"training.reshard_after_forward = {quote(reshard)} gathers the weights again for "
            "each pipeline micro-batch"
        )
        notes.append(Note(Weight.SPEED, text, warns=True))
    sections = replace_fields(d, experimental=experimental, training=training)
    sizes = PipelineSizes(stage_count(schedule, mesh.pipeline, points), microbatches)
    return sections, sizes, notes
