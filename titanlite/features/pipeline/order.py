"""The order of a pipeline rank's work, as the schedules of `torch.distributed.pipelining` make it.

No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

#: (what, place of the stage among this rank's): "F" forward, "B" backward, or its halves "I"
#: (gradients of inputs) and "W" (of weights).
Action = tuple[str, int]


def actions(schedule: str, ranks: int, rank: int, stages: int, pieces: int) -> Iterator[Action]:
    """Yield the forwards and backwards of a pipeline rank with `stages` of its own and `pieces`
    micro-batches of each.
    """
    if schedule == "1F1B":
        ahead = min(pieces, ranks - rank)
        yield from _alternating([0] * pieces, [0] * pieces, ahead, forward_first=False)
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, pieces // ranks)
        each, factor = pieces // rounds, 2 if schedule == "Interleaved1F1B" else 1
        ahead = min((stages - 1) * each + factor * (ranks - 1 - rank), pieces * stages)
        order = [step // each % stages for step in range(pieces * stages)]
        # The zero-bubble schedule delays gradients of weights by as many micro-batches as there are
        # ranks before.
        late = rank if schedule == "InterleavedZeroBubble" else None
        yield from _alternating(order, [stages - 1 - stage for stage in order], ahead, True, late)
    elif schedule == "ZBVZeroBubble":
        done = Counter[Action]()
        for action in _zbv(ranks, rank, max(2 * ranks - 1, pieces)):
            done[action] += 1
            if done[action] <= pieces:
                yield action
    else:  # GPipe, LoopedBFS
        yield from (("F", stage) for stage in range(stages) for _ in range(pieces))
        yield from (("B", stage) for stage in reversed(range(stages)) for _ in range(pieces))


def _alternating(
    forwards: Sequence[int],
    backwards: Sequence[int],
    ahead: int,
    forward_first: bool,
    late: int | None = None,
) -> Iterator[Action]:
    """late: each backward's second half follows after so many first ones."""
    kind = "B" if late is None else "I"
    yield from (("F", stage) for stage in forwards[:ahead])
    for i, stage in enumerate(backwards):
        work = [(kind, stage)]
        if ahead + i < len(forwards):
            following = ("F", forwards[ahead + i])
            work = [following, (kind, stage)] if forward_first else [(kind, stage), following]
        yield from work
        if late is not None and i >= late:
            yield ("W", backwards[i - late])
    yield from (("W", stage) for stage in backwards[len(backwards) - (late or 0) :])


def _zbv(ranks: int, rank: int, pieces: int) -> Iterator[Action]:
    """In `ScheduleZBVZeroBubble` the rank's second stage goes the way back."""
    yield from [("F", 0)] * (2 * (ranks - rank) - 1)
    yield from [("F", 1), ("F", 0)] * rank
    yield from [("F", 1), ("I", 1), ("W", 1)] * (ranks - rank)
    left = pieces - 2 * ranks + rank + 1
    for i in range(pieces - ranks):
        yield from [("F", 0)] * (i < left)
        yield from [("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)]
    yield from [("I", 0), ("I", 1)] * rank
    yield from [("I", 0), ("W", 0)] * (ranks - rank)
    yield from [("W", 1)] * rank
    yield from [("W", 0)] * rank
