"""Where a rank is, as the hang watchdog publishes it. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: Frames of a stack that a report shows.
_SHOWN_FRAMES = 2


@dataclass(frozen=True)
class RankState:
    """Where one rank was in its last heartbeat."""

    rank: int
    host: str = "?"
    pid: int = 0
    step: int = 0
    #: Calls of `HangWatchdog.phase` in this step: ranks run the same program, so a rank with fewer
    #: calls is behind.
    place: int = 0
    phase: str = "start"
    #: Seconds in this phase.
    seconds: float = 0.0
    #: Frames of the main thread, innermost first, as "file.py:12 function".
    stack: tuple[str, ...] = ()
    in_collective: bool = False
    #: "": it runs. "raised": with `text`; "lost": a collective failed there; "left": it ended in
    #: order.
    end: Literal["", "raised", "lost", "left"] = ""
    text: str = ""
    #: Sends no heartbeat any more.
    silent: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> RankState:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "stack": tuple(fields["stack"])})

    @property
    def name(self) -> str:
        if not self.pid:
            return f"rank {self.rank}"
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    @property
    def where(self) -> str:
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    @property
    def spot(self) -> str:
        return f", at {self.stack[0]}" if self.stack else ""

    def at(self) -> str:
        if self.end:
            return {
                "raised": self.text.partition("\n")[0],
                "lost": "lost its peers",
                "left": "has left",
            }[self.end]
        if self.silent:
            return "no answer"
        return " < ".join(self.stack[:_SHOWN_FRAMES])
