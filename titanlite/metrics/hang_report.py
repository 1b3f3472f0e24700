"""The report about ranks that stand still: a table, and a sentence that names the rank to blame.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.metrics.rank_state import RankState
from titanlite.runs.text_tables import Table, render

#: Ranks that the table shows.
MAX_ROWS = 32
_NAMED = 8


def table(states: Sequence[RankState], culprits: Sequence[RankState] = ()) -> str:
    """Return one line per rank; of many ranks the culprits and some others."""
    shown = sorted(states, key=lambda s: (s not in culprits, s.rank))[:MAX_ROWS]
    shown.sort(key=lambda s: s.rank)
    rows = []
    for state in shown:
        seconds = f"{state.seconds:.1f}"
        row = (str(state.rank), state.host, str(state.step), state.phase, seconds, state.at())
        rows.append(row)
    head = ("rank", "host", "step", "phase", "seconds", "at")
    lines = render(Table(head, rows, (1, 3, 5)), terminal=False).splitlines()
    if len(states) > len(shown):
        lines.append(f"and {len(states) - len(shown)} more")
    return "\n".join(f"  {line}" for line in lines)


def verdict(states: Sequence[RankState]) -> tuple[list[RankState], str]:
    """Return the ranks to blame (none where none stands out), and a sentence about them.

    The blame goes, in this order, to a rank that raised, does not answer, or has left. Then comes
    one at an earlier place of the program and not in a collective.
    """
    if raised := [s for s in states if s.end == "raised"]:
        first = raised[0]
        return raised, f"{first.name} raised in {first.where}{first.spot}: {first.text}"
    if mute := [s for s in states if not s.end and s.silent]:
        return mute, (
            f"{_who(mute, 'does', 'do')} not answer, last seen in {mute[0].where}: killed (dmesg "
            "tells if the memory was short), stopped (kill -CONT), or cut off from the others"
        )
    left = [s for s in states if s.end == "left"]
    if 0 < len(left) < len(states):
        who, where = _who(left, "has", "have"), left[0].where
        return left, f"{who} left the loop, in {where}, and the others wait for collectives"
    culprits = list(states)
    if len(states) > 1:
        culprits = _behind([s for s in states if not s.end], len(states))
    if culprits:
        slow = max(culprits, key=lambda s: s.seconds)
        others = ": the others wait" if len(states) > 1 else ""
        who = _who(culprits, "has", "have")
        return culprits, f"{who} been in {slow.where} for {slow.seconds:.1f} s{slow.spot}{others}"
    return [], (
        "none of the ranks holds the others up: they wait for a device, or for each other in "
        "different collectives"
    )


def _behind(running: Sequence[RankState], size: int) -> list[RankState]:
    def earliest(states: Sequence[RankState]) -> list[RankState]:
        first = min(((s.step, s.place) for s in states), default=None)
        return [s for s in states if (s.step, s.place) == first]

    free = [s for s in earliest(running) if not s.in_collective]
    free = free or earliest([s for s in running if not s.in_collective])
    if len(free) >= size:  # all at one place, and none in a collective: no rank stands out
        return []
    return free


def _who(states: Sequence[RankState], one: str, many: str) -> str:
    if len(states) == 1:
        return f"{states[0].name} {one}"
    more = f" and {len(states) - _NAMED} more" if len(states) > _NAMED else ""
    return f"ranks {', '.join(str(s.rank) for s in states[:_NAMED])}{more} {many}"
