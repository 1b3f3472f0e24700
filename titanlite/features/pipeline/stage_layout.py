"""Layout of a pipeline: modules and rank of each stage.

This module imports no torch.

    layout = split_stages(spec.pipeline_costs(args, seq_len), degree, "1F1B")
    layout.stages[0]        # ("tok_embeddings", "layers.0", …)

A model is cut between its embedding, blocks, last norm and head.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanlite.config.errors import nearest
from titanlite.dist import ParallelismError
from titanlite.models.spec import Cost
from titanlite.parallel.schedules import SCHEDULES


def stage_count(schedule: str, degree: int, split_points: Sequence[str]) -> int:
    """Return the stages of the whole pipeline: as the split points make them, else one or two per
    rank.
    """
    if split_points:
        return len(split_points) + 1
    return degree * (1 if SCHEDULES[schedule].stages == "one" else 2)


@dataclass(frozen=True)
class StageLayout:
    """The stages of a pipeline."""

    #: Names of modules by stage, in the order they run.
    stages: tuple[tuple[str, ...], ...]
    #: Rank in the pipeline by stage.
    ranks: tuple[int, ...]
    #: Costs of the modules of the whole model, in the order they run.
    costs: tuple[tuple[str, Cost], ...]

    def on(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    @property
    def trained(self) -> list[str]:
        """Modules that have parameters, in the order they run."""
        return [name for name, cost in self.costs if cost.parameters]


def split_stages(
    costs: Mapping[str, Cost], degree: int, schedule: str, split_points: Sequence[str] = ()
) -> StageLayout:
    """Divide a model into the stages of `schedule`. Raises ParallelismError.

    costs: the modules before which a pipeline may be cut, in the order they run. split_points:
    modules that start a stage, all but the first; empty: stages of even cost.
    """
    names = list(costs)
    count = stage_count(schedule, degree, split_points)
    bounds = [0]
    for point in split_points:
        if point not in names:
            close = "".join(f" (did you mean {name}?)" for name in nearest(point, names))
            raise ParallelismError(
                f"no stage can start at {point!r}{close}: the model's pieces are {names[0]}, "
                f"{names[1]} to {names[-3]}, {', '.join(names[-2:])}"
            )
        cut = names.index(point)
        if cut <= bounds[-1]:
            raise ParallelismError(
                f"{point} does not come after {names[bounds[-1]]}, where the stage before it "
                "starts. Name the modules that start all stages but the first, in the order they "
                "run"
            )
        bounds.append(cut)
    if not split_points:
        bounds += balance_stages(list(costs.values()), count)
    bounds.append(len(names))
    stages = tuple(tuple(names[first:last]) for first, last in itertools.pairwise(bounds))
    for stage in stages:
        if not any(costs[name].parameters for name in stage):
            raise ParallelismError(
                f"a stage of {' and '.join(stage)} alone has no parameters: nothing to train"
            )
    if SCHEDULES[schedule].stages == "v":
        ranks = tuple(min(stage, len(stages) - 1 - stage) for stage in range(len(stages)))
    else:
        ranks = tuple(stage % degree for stage in range(len(stages)))
    return StageLayout(stages, ranks, tuple(costs.items()))


def balance_stages(costs: Sequence[Cost], stages: int) -> list[int]:
    """Return where each stage but the first begins, for stages of the most even cost.

    The largest FLOPs of a stage are as few as possible, since all others wait for it. Among equal
    layouts the largest count of parameters is smallest: the embedding costs memory alone.

    costs: of the embedding, the blocks, the last norm and the head. Raises ParallelismError for too
    few blocks.
    """
    blocks = range(1, len(costs) - 2)
    if len(blocks) < stages:
        raise ParallelismError(
            f"{len(blocks)} blocks cannot be divided into {stages} stages: each needs one at least"
        )
    # A stage begins with a block. Modules before the first block belong to the first stage, those
    # after the last block to the last stage.
    pieces = [range(start, end) for start, end in itertools.pairwise([*blocks, len(costs)])]
    pieces[0] = range(pieces[0].stop)
    flops = tuple(sum(costs[i].flops for i in piece) for piece in pieces)
    weights = tuple(sum(costs[i].parameters for i in piece) for piece in pieces)
    most = _smallest_maximum(flops, flops, stages)[0]
    _, firsts = _smallest_maximum(weights, flops, stages, limit=most)
    return [blocks[first] for first in firsts]


@functools.lru_cache(maxsize=256)  # a search of settings asks again and again
def _smallest_maximum(
    sizes: tuple[int, ...], limited: tuple[int, ...], stages: int, limit: float = math.inf
) -> tuple[float, tuple[int, ...]]:
    """Return the smallest largest sum of `sizes` over contiguous stages, and where all but the
    first begin.

    No stage's sum of `limited` may be above `limit`.
    """
    total, bound = ([0, *itertools.accumulate(numbers)] for numbers in (sizes, limited))

    @functools.cache
    def best(end: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return the same for the pieces before `end`."""
        if not stages:
            return (math.inf if end else 0), ()
        found: tuple[float, tuple[int, ...]] = (math.inf, ())
        for start in range(stages - 1, end):
            if bound[end] - bound[start] <= limit:
                before, begins = best(start, stages - 1)
                largest = max(before, total[end] - total[start])
                if largest < found[0]:
                    found = largest, (*begins, start)
        return found

    largest, begins = best(len(sizes), stages)
    return largest, begins[1:]
