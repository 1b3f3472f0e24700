"""The events of a pipeline rank's step, for `titanlite.plan.memory`. No torch here.

titanlite/plan/FORMULAS.md derives each size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.features.pipeline.order import actions
from titanlite.plan.events import Alloc, Event

if TYPE_CHECKING:
    from titanlite.plan.step_events import StepEvents


def pipeline_events(step: StepEvents) -> Iterator[Event]:
    """Yield what happens between the state at the start of a step and its update."""
    run = step.run
    stages = step.sizes.stages
    ranks = run.mesh.pipeline
    schedule = run.experimental.pipeline_parallel_schedule
    pieces = run.pipeline.microbatches * run.batch.accumulation
    # A rank has receive buffers for each piece: inputs, and gradients of outputs.
    received = 0
    for stage in stages:
        received += ("tok_embeddings" not in stage) + ("output" not in stage)
    yield Alloc("communication", "received", pieces * received * step.sizes.shape.hidden)
    replayed = pieces
    if schedule not in ("GPipe", "LoopedBFS"):
        replayed = min(pieces, 4 * ranks)
    for kind, index in actions(schedule, ranks, step.sizes.pipeline_rank, len(stages), replayed):
        if kind == "F":
            yield from step.forward(stages[index])
        else:
            yield from step.backward(stages[index], frees=False)
    for group in step.sizes.groups:
        yield from step.groups.free(group)
        yield from step.groups.reduce(group, made=0, ahead=0)
