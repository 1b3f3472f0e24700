"""Checks of a pipeline: its schedule, its stages, its micro-batches, the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import divisors
from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.dist import ParallelismError
from titanlite.features.pipeline.stage_layout import split_stages
from titanlite.parallel.schedules import SCHEDULES, find_schedule
from titanlite.run.interactions import needs_whole_backward

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

DEGREE = "experimental.pipeline_parallel_degree"
SCHEDULE = "experimental.pipeline_parallel_schedule"
POINTS = "experimental.pipeline_parallel_split_points"
PIECES = "experimental.pipeline_parallel_microbatches"


def rank_problems(d: Config, run: RunConfig) -> Iterator[Problem]:
    """Check the pieces of a batch, and the stages of the schedule. d: the sections as written."""
    pieces = run.pipeline.microbatches
    size = d.training.batch_size
    if size % pieces:
        source = "" if d.experimental.pipeline_parallel_microbatches else f", that of {DEGREE},"
        message = f"is {pieces}{source} which does not divide training.batch_size = {size}"
        fitting = ", ".join(map(str, divisors(size)))
        hint = f"these divide it: {fitting}; or set training.batch_size to a multiple of {pieces}"
        yield Problem("divide", PIECES, message, hint)
    name = find_schedule(d.experimental.pipeline_parallel_schedule)
    if name is None:
        return
    yield from _point_problems(name, len(d.experimental.pipeline_parallel_split_points), run)
    if not SCHEDULES[name].splits_backward:
        return
    for reason, remedy in needs_whole_backward(d):
        message = (
            f"{quote(name)} splits each backward into one for inputs and one for weights, and "
            f"{reason}"
        )
        hint = f'"1F1B" and "Interleaved1F1B" do not split it; or set {remedy}'
        yield Problem("conflict", SCHEDULE, message, hint)


def _point_problems(schedule: str, points: int, run: RunConfig) -> Iterator[Problem]:
    degree = run.mesh.pipeline
    stages = run.pipeline.stages
    kind = SCHEDULES[schedule].stages
    if kind == "one":
        fits = stages == degree
        wanted = f"one stage per rank: {degree - 1} split points"
    elif kind == "loop":
        fits = stages % degree == 0 and stages > degree
        wanted = f"two or more stages per rank, as by {2 * degree - 1} points"
    else:
        fits = stages == 2 * degree
        wanted = f"two stages per rank: {2 * degree - 1} split points"
    if not points or fits:
        return
    message = (
        f"{points} split points make {stages} stages, but {quote(schedule)} on {degree} pipeline "
        f"ranks needs {wanted}"
    )
    hint = "give as many, or none: then titanlite divides the model evenly"
    yield Problem("divide", POINTS, message, hint)


def microbatch_problems(run: RunConfig) -> Iterator[Problem]:
    """Check how many micro-batches a step has."""
    degree = run.mesh.pipeline
    pieces = run.pipeline.microbatches
    name = run.experimental.pipeline_parallel_schedule
    total = pieces * run.batch.accumulation
    rounds = max(1, total // degree)
    number = (
        f"is {pieces}, so {total} micro-batches per step ({pieces} * accumulation "
        f"{run.batch.accumulation})"
    )
    if name == "1F1B" and total < degree:
        message = f"{number}, and 1F1B needs one for each of the {degree} stages at least"
        yield Problem(
            "batch", PIECES, message, f'give {degree} or more, or take the schedule "GPipe"'
        )
    if name.startswith("Interleaved") and total % rounds:
        message = f"{number}; {name} runs them in {rounds} rounds of equal size over {degree} ranks"
        yield Problem("batch", PIECES, message, f"give a multiple of {degree}")


def model_problems(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Check that the model can be cut into the stages."""
    if run.spec.pipeline_costs is None:
        return
    if getattr(args, "tied", False):
        message = "embedding and head share one weight, and a pipeline has them on different ranks"
        hint = (
            "set model.overrides.tied = false for two weights, or divide the model by other degrees"
        )
        yield Problem("divide", DEGREE, message, hint)
        return
    points = run.experimental.pipeline_parallel_split_points
    try:
        # No stage depends on the size of a vocabulary that is the tokenizer's, which is not read
        # yet.
        costs = run.spec.pipeline_costs(replace(args, vocab_size=args.vocab_size or 1), 1)
        schedule = run.experimental.pipeline_parallel_schedule
        split_stages(costs, run.mesh.pipeline, schedule, points)
    except ParallelismError as error:
        hint = "" if points else "take a smaller degree, or a schedule with one stage per rank"
        yield Problem("divide", POINTS if points else DEGREE, str(error), hint)
