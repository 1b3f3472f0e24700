"""What is known of every rank when a run stands still: a table, and a sentence about who is to blame. No torch.

Nobody is to blame for waiting in a collective: there the others are waited for. So it is, in this order, who raised,
who does not answer, who has left, and who is at an earlier place of the program than the others. Among those at the
same place it is who is not in a collective.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

#: Rows of a table. What is said of further ranks is how many they are, by step and phase.
MAX_ROWS = 32
#: Frames of a stack that a row shows.
_FRAMES = 2
_NAMED = 8

End = Literal["", "raised", "lost", "left"]


@dataclass(frozen=True)
class RankState:
    """One rank: where it is, or was when it was last heard of."""

    rank: int
    host: str = "?"
    pid: int = 0
    step: int = 0
    #: Calls of `StallWatch.phase` in this step: ranks run the same program, so who has fewer of them is behind.
    place: int = 0
    phase: str = "start"
    #: Time in this phase.
    seconds: float = 0.0
    #: Frames of the main thread, innermost first, as "file.py:12 function".
    stack: tuple[str, ...] = ()
    in_collective: bool = False
    #: "": it runs. "raised": with `text`; "lost": a collective failed there; "left": ended in order.
    end: End = ""
    text: str = ""
    #: Seconds since it was last heard of, of a rank that was asked and did not answer.
    silent: float | None = None
    #: What the system says of the process of such a rank, where that can be seen: "gone", or a letter as in `ps`.
    process: str = ""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str | bytes) -> RankState:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "stack": tuple(fields["stack"])})

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})" if self.pid else f"rank {self.rank}"

    @property
    def where(self) -> str:
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    def at(self) -> str:
        """The last column of the table."""
        if self.end:
            return {"raised": self.text.partition("\n")[0], "lost": "lost its peers", "left": "has left"}[self.end]
        if self.silent is not None:
            heard = "never heard of" if not self.pid else f"last heard of {_seconds(self.silent)} ago"
            return f"no answer, {heard}"
        return " < ".join(self.stack[:_FRAMES])


def table(states: Sequence[RankState], culprits: Sequence[RankState] = ()) -> str:
    """One line per rank; of many ranks the culprits and some others."""
    shown = list(states)
    if len(shown) > MAX_ROWS:
        named = {state.rank for state in culprits}
        shown = sorted(states, key=lambda state: (state.rank not in named, state.rank))[:MAX_ROWS]
    rows = [("rank", "host", "step", "phase", "seconds", "at")]
    for s in sorted(shown, key=lambda state: state.rank):
        rows.append((str(s.rank), s.host, str(s.step), s.phase, f"{s.seconds:.1f}", s.at()))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for rank, host, step, phase, seconds, at in rows:
        line = f"  {rank:>{widths[0]}}  {host:<{widths[1]}}  {step:>{widths[2]}}  {phase:<{widths[3]}}  "
        lines.append(f"{line}{seconds:>{widths[4]}}  {at}".rstrip())
    left = Counter(state.where for state in states if state not in shown)
    lines += [f"  and {number} more in {where}" for where, number in left.most_common()]
    return "\n".join(lines)


def verdict(states: Sequence[RankState]) -> tuple[list[RankState], str]:
    """The ranks to blame (none where none stands out), and a sentence about them."""
    for pick, describe in ((_raised, _say_raised), (_mute, _say_mute), (_gone, _say_gone)):
        if found := pick(states):
            return found, describe(found)
    if len(states) == 1:
        (alone,) = states
        return [alone], f"{alone.name} has been in {alone.where} for {_seconds(alone.seconds)}{_spot(alone)}"
    found = _behind(states)
    if found:
        return found, _say_behind(found, len(states))
    where = {state.where for state in states}
    place = f"in {where.pop()}" if len(where) == 1 else "in collectives"
    return [], (
        f"every rank is {place} and none holds the others up: they wait for a device, or for each other in different "
        "collectives"
    )


def process_state(pid: int) -> str:
    """What the system says of a process of this machine: "gone", its letter as in `ps`, or "" where it is silent."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        # The name before the state stands in brackets and may itself hold some.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return "gone" if state in "ZX" else state


def _raised(states: Sequence[RankState]) -> list[RankState]:
    return [s for s in states if s.end == "raised"]


def _mute(states: Sequence[RankState]) -> list[RankState]:
    return [s for s in states if not s.end and s.silent is not None]


def _gone(states: Sequence[RankState]) -> list[RankState]:
    found = [s for s in states if s.end == "left"]
    return found if len(found) < len(states) else []


def _behind(states: Sequence[RankState]) -> list[RankState]:
    running = [s for s in states if not s.end]
    lowest = _lowest(running)
    free = [s for s in lowest if not s.in_collective]
    if not free:
        free = _lowest([s for s in running if not s.in_collective])
    # All of them at one place, and none in a collective: that says nothing about any.
    return free if len(free) < len(states) else []


def _lowest(states: Sequence[RankState]) -> list[RankState]:
    first = min(((s.step, s.place) for s in states), default=None)
    return [s for s in states if (s.step, s.place) == first]


def _say_raised(found: list[RankState]) -> str:
    first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{first.name}{more} raised in {first.where}{_spot(first)}: {first.text}"


def _say_mute(found: list[RankState]) -> str:
    first = found[0]
    heard = "was never heard of" if not first.pid else f"was last heard of {_seconds(first.silent or 0)} ago"
    if len(found) > 1:
        hosts = sorted({s.host for s in found})
        return (
            f"{_names(found)} on {', '.join(hosts[:_NAMED])} do not answer: they have ended, are frozen, or are cut off"
        )
    if first.process == "gone":
        why = (
            "has ended without a word: something killed it. If it was the kernel, short of memory, its log says so "
            "(dmesg)"
        )
    elif first.process in ("T", "t"):
        why = f"is stopped, by SIGSTOP or a debugger: kill -CONT {first.pid} lets it go on"
    elif first.process == "D":
        why = "is stuck in the kernel, in most cases in a disk or a network file system"
    elif first.process:
        why = "runs but does not answer: it is in a call that keeps Python's lock"
    else:
        why = "does not answer: it has ended, is frozen, or is cut off from the others"
    last = f" in {first.where}" if first.pid else ""
    return f"{first.name} {why}. It {heard}{last}"


def _say_gone(found: list[RankState]) -> str:
    verb = "has" if len(found) == 1 else "have"
    return f"{_names(found)} {verb} left the loop, in {found[0].where}, and the others wait for collectives with it"


def _say_behind(found: list[RankState], size: int) -> str:
    first = max(found, key=lambda s: s.seconds)
    if len(found) == 1:
        return (
            f"{first.name} has been in {first.where} for {_seconds(first.seconds)}{_spot(first)}: the others wait for "
            "it"
        )
    return (
        f"{_names(found)} have been in {first.where} for up to {_seconds(first.seconds)}{_spot(first)}: the other "
        f"{size - len(found)} wait for them"
    )


def _names(states: Sequence[RankState]) -> str:
    ranks = [str(s.rank) for s in states]
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:_NAMED])}{more}"


def _spot(state: RankState) -> str:
    return f", at {state.stack[0]}" if state.stack else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
