"""The order of a pipeline rank's work, as the schedules of `torch.distributed.pipelining` make it.

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator

#: (what, place of the stage among this rank's): "F" forward, "B" backward.
Action = tuple[str, int]


def actions(schedule: str, ranks: int, rank: int, stages: int, pieces: int) -> Iterator[Action]:
    """Yield the forwards and backwards of a pipeline rank with `stages` of its own and `pieces`
    micro-batches of each. The zero-bubble schedules have none here.
    """
    forwards = [("F", stage) for stage in range(stages) for _ in range(pieces)]
    backwards = [("B", stage) for stage in reversed(range(stages)) for _ in range(pieces)]
    ahead = len(forwards)
    if schedule == "1F1B":
        ahead = min(pieces, ranks - rank)
    elif schedule == "Interleaved1F1B":
        each = pieces // max(1, pieces // ranks)
        order = [step // each % stages for step in range(pieces * stages)]
        forwards = [("F", stage) for stage in order]
        backwards = [("B", stages - 1 - stage) for stage in order]
        ahead = min((stages - 1) * each + 2 * (ranks - 1 - rank), pieces * stages)
    yield from forwards[:ahead]
    for number, backward in enumerate(backwards):
        following = forwards[ahead + number : ahead + number + 1]
        yield from [backward, *following] if schedule == "1F1B" else [*following, backward]
