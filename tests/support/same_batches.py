"""The same batches on any number of ranks and over resumes, for text of any kind."""

from __future__ import annotations

import json
from collections.abc import Callable

from titanlite.data.loader import TrainLoader
from titanlite.data.rows import Rows

#: Sequences of a step; all numbers of ranks below divide them.
SIZE = 12
STEPS = 5

#: Tokens and labels of the sequences of a step, sorted.
Step = list[tuple[list[int], list[int]]]


def loaders_of(make: Callable[[], Rows], ranks: int) -> list[TrainLoader]:
    """The loaders of all ranks, each over rows of its own."""
    return [TrainLoader(make(), SIZE, 1, rank, ranks) for rank in range(ranks)]


def next_step(loaders: list[TrainLoader]) -> Step:
    """The sequences of the next step, over all ranks."""
    found: Step = []
    for loader in loaders:
        for batch in loader.next_step():
            found += zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
    return sorted(found)


def check_ranks_and_resumes(make: Callable[[], Rows]) -> list[Step]:
    """Assert that 1, 2 and 3 ranks serve the same steps, also from a state of any of them after any
    step. Return the steps.
    """
    one = loaders_of(make, 1)
    wanted = [next_step(one) for _ in range(STEPS)]
    assert len({json.dumps(step) for step in wanted}) == STEPS
    for before, after in ((1, 2), (2, 3), (3, 1)):
        loaders = loaders_of(make, before)
        for stop in range(STEPS):
            states = json.loads(json.dumps([loader.state_dict() for loader in loaders]))
            rows = loaders[0].dataset.merge_states([state.get("rows", {}) for state in states])
            resumed = loaders_of(make, after)
            for loader in resumed:
                loader.load_state_dict({**states[0], "rows": rows} if rows else states[0])
            left = wanted[stop : stop + 2]
            assert [next_step(resumed) for _ in left] == left
            assert next_step(loaders) == wanted[stop]
    return wanted
