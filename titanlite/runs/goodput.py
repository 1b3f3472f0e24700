"""Where the time of a run went, from the launch of its first attempt to the end of its last.

The goodput is the share of that time that went into steps which the run kept. Times are those of
rank 0. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from titanlite.runs.attempts import Attempt
from titanlite.runs.read import Run
from titanlite.runs.spent import Spent, spent_in

#: Parts of the time, in the order of reports.
PARTS = (
    "start",  # from the launch to the first step, and what that step takes longer than others
    "steps",  # that are kept: the useful time
    "data",  # waits of these steps for their batches
    "saves",  # no step goes on
    "validation",
    "tasks",
    "other",  # samples, profiles, rollbacks, the end
    "lost",  # steps that are trained again, with their waits; a last step that was never done
    "downtime",  # from the end of an attempt to the launch of the next
    "unknown",  # no record has it
)
#: Kind of a pause → its part; others are "other". An unfinished step lasts until its failure is
#: noticed.
_PAUSES = {"save": "saves", "validate": "validation", "evaluate": "tasks", "unfinished": "lost"}
_STEPS = ("first_step", "work", "data")


@dataclass(frozen=True)
class Span:
    """One attempt in time, in seconds since 1970."""

    attempt: Attempt
    #: Its process began, or the record of its first start where that is not known.
    launched: float
    #: Its start was recorded: the model is there, the checkpoint loaded.
    started: float
    #: Its end was recorded, or it gave its last sign of life.
    ended: float
    spent: Spent

    @property
    def first(self) -> int:
        """Steps that were done before it."""
        return int(self.attempt.get("first_step") or 0)


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went."""

    #: Part → seconds; their sum is `wall`.
    seconds: Mapping[str, float]
    wall: float
    #: Steps that were trained, and those of them that were trained again, or must be.
    trained: int
    lost: int

    @property
    def share(self) -> float:
        """Of the time in steps that are kept."""
        return self.seconds["steps"] / self.wall if self.wall > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it as `titanlite runs --json` has it."""
        return {
            "share": self.share,
            "wall_seconds": self.wall,
            "seconds": dict(self.seconds),
            "trained_steps": self.trained,
            "lost_steps": self.lost,
        }


def spans_of(run: Run) -> list[Span]:
    """Return the attempts of a run in time; those without a time are left out."""
    found: list[Span] = []
    known = [one for one in run.attempts if one.get("started") is not None]
    for place, one in enumerate(known):
        following = known[place + 1] if place + 1 < len(known) else None
        started = float(one["started"])
        spent = _spent(run, one, following)
        ended = one.get("ended")
        if ended is None:
            signs = [started, spent.seen or started]
            if following is None and run.alive is not None:
                signs.append(run.alive)
            ended = max(signs)
        launched = one.get("launched") or started
        before = found[-1].ended if found else 0.0
        # A start may wait for the end of the attempt before: its launch overlaps that one.
        began = max(min(launched, started), before)
        found.append(Span(one, began, max(started, began), max(ended, started, began), spent))
    return found


def _spent(run: Run, attempt: Attempt, following: Attempt | None) -> Spent:
    """Return the times of an attempt: of its end, of the start after it, or of its rows."""
    if "seconds" in attempt:
        return Spent(None, int(attempt.get("trained", 0)), attempt["seconds"])
    if following is not None and "killed" in following:
        killed = following["killed"]
        return Spent(killed.get("seen"), killed["trained"], killed["seconds"])
    began = float(attempt["started"])
    until = following["started"] if following is not None else None
    rows = [row for row in run.rows if until is None or row.get("time", 0.0) < until]
    return spent_in(rows, began, int(attempt.get("first_step") or 0))


def goodput_of(run: Run) -> Goodput | None:
    """Return where the time of a run went; None where no attempt is recorded."""
    spans = spans_of(run)
    if not spans:
        return None
    wall = spans[-1].ended - spans[0].launched
    seconds = dict.fromkeys(PARTS, 0.0)
    for before, after in pairwise(spans):
        seconds["downtime"] += after.launched - before.ended
    trained = lost = 0
    for place, span in enumerate(spans):
        again = _trained_again(span, spans[place + 1 :])
        for name, value in _parts(span, again, _usual(span, spans)).items():
            seconds[name] += value
        trained += span.spent.trained
        lost += again
    seconds["unknown"] = wall - sum(seconds.values())
    return Goodput(seconds, wall, trained, lost)


def _trained_again(span: Span, later: Sequence[Span]) -> int:
    """Return how many steps of an attempt are not kept."""
    reached = span.first + span.spent.trained
    end = span.attempt.get("step") if "state" in span.attempt else None
    if isinstance(end, int):
        reached = end
    if later:
        kept = min(reached, *(one.first for one in later))
    elif span.attempt.get("state") == "done":
        kept = reached
    else:
        kept = reached - int(span.attempt.get("lost_steps") or 0)
    # Steps that the guard has rolled back were trained, too.
    kept_steps = max(kept - span.first, 0)
    return max(span.spent.trained - kept_steps, 0)


def _usual(span: Span, spans: Sequence[Span]) -> float | None:
    """Return the mean seconds of a step after the first, of this attempt or else of all."""
    for ones in ([span], spans):
        later = sum(max(one.spent.trained - 1, 0) for one in ones)
        work = sum(one.spent.seconds.get("work", 0.0) for one in ones)
        if later and work:
            return work / later
    return None


def _parts(span: Span, again: int, usual: float | None) -> dict[str, float]:
    """Return the seconds of an attempt by part, all but the unknown ones.

    again: steps that are not kept: they count with the mean of this attempt. usual: seconds of a
    step after the first.
    """
    spent = span.spent
    parts = dict.fromkeys(PARTS, 0.0)
    parts["start"] = span.started - span.launched
    for kind, value in spent.seconds.items():
        if kind not in _STEPS:
            parts[_PAUSES.get(kind, "other")] += value
    first = spent.seconds.get("first_step", 0.0)
    warm_up = 0.0
    if not spent.trained:
        warm_up = first
    elif usual is not None:
        warm_up = max(first - usual, 0.0)
    parts["start"] += warm_up
    work = first - warm_up + spent.seconds.get("work", 0.0)
    data = spent.seconds.get("data", 0.0)
    share = again / spent.trained if spent.trained else 0.0
    parts["lost"] += share * (work + data)
    parts["steps"] = (1 - share) * work
    parts["data"] = (1 - share) * data
    return parts
