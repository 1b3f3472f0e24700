"""Whether a push goes on, by its log and by what the kernel counts for its process."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

#: Seconds after which a push that does nothing is given up.
PATIENCE = 600.0
#: A process that waits for the network takes some processor time, too.
_CPU_SECONDS = 10


class Progress:
    """Tells whether uploads stand still. log: of the push under way."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._state: object = None
        self._since = time.monotonic()

    def stands_still(self, pid: int | None, left: int) -> bool:
        """Return whether nothing has changed for `PATIENCE`. left: uploads that are not done."""
        state = (left, pid, self._read(), work_of(pid))
        if state != self._state:
            self._state = state
            self._since = time.monotonic()
        return time.monotonic() - self._since > PATIENCE

    def line(self) -> str:
        """Return what the push said last; "" where it said nothing."""
        return self._read().rstrip().rpartition("\n")[2]

    def _read(self) -> str:
        with suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace")
        return ""


def work_of(pid: int | None) -> object:
    """Return what changes as long as a process reads, sends or computes.

    Where the kernel does not tell, that is the time: nobody can say that it does nothing.
    """
    if pid is None:
        return None
    try:
        counts = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    ticks = int(fields[11]) + int(fields[12])
    return counts, ticks // (_CPU_SECONDS * os.sysconf("SC_CLK_TCK"))
