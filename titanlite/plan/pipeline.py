"""The order of a pipeline rank's work, as the schedules of `torch.distributed.pipelining` make it. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

#: ("F" or "B", place of the stage among this rank's).
Action = tuple[str, int]


def actions(schedule: str, ranks: int, rank: int, stages: int, pieces: int) -> Iterator[Action]:
    """Yield the forwards and backwards of pipeline rank `rank`; `stages` of its own, `pieces` micro-batches of each.

    A backward in two halves counts as one at the second, which frees the activations.
    """
    if schedule == "1F1B":
        ahead = min(pieces, ranks - rank)
        yield from _alternating([0] * pieces, [0] * pieces, ahead, forward_first=False)
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, pieces // ranks)
        each, factor = pieces // rounds, 2 if schedule == "Interleaved1F1B" else 1
        ahead = min((stages - 1) * each + factor * (ranks - 1 - rank), pieces * stages)
        order = [step // each % stages for step in range(pieces * stages)]
        # The zero-bubble schedule delays gradients of weights by as many micro-batches as there are ranks before.
        late = rank if schedule == "InterleavedZeroBubble" else 0
        yield from _alternating(order, [stages - 1 - stage for stage in order], min(ahead + late, len(order)), True)
    elif schedule == "ZBVZeroBubble":
        # At most 2 * ranks halves are under way: of the first stage those of the warm-up, then one for one.
        ahead = min(pieces, 2 * ranks - 1 - rank)
        yield from ((("F", 0)) for _ in range(ahead))
        first = ahead
        for done in range(pieces):
            yield from (("F", 1), ("B", 1))
            if first < pieces and done >= ranks - rank - 1:
                yield ("F", 0)
                first += 1
            if done >= ranks - rank - 1:
                yield ("B", 0)
        yield from (("B", 0) for _ in range(min(pieces, ranks - rank - 1)))
    else:  # GPipe, LoopedBFS
        yield from (("F", stage) for stage in range(stages) for _ in range(pieces))
        yield from (("B", stage) for stage in reversed(range(stages)) for _ in range(pieces))


def _alternating(
    forwards: Sequence[int], backwards: Sequence[int], ahead: int, forward_first: bool
) -> Iterator[Action]:
    yield from (("F", stage) for stage in forwards[:ahead])
    for i, stage in enumerate(backwards):
        following = [("F", forwards[ahead + i])] if ahead + i < len(forwards) else []
        yield from [*following, ("B", stage)] if forward_first else [("B", stage), *following]
