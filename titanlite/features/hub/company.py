"""Keeps the other machines of a run until rank 0 has uploaded.

torchrun waits 300 s for the others. Then the machine that serves its store leaves, and torchrun
ends the ranks on all that are left.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from titanlite.callbacks import Callback

if TYPE_CHECKING:
    from torch.distributed import Store

    from titanlite.dist.signals import StopSignal

ALIVE = "titanlite_hub/alive"
DONE = "titanlite_hub/done"
#: Seconds without a sign of rank 0 after which it is lost.
_SILENCE = 60.0


class Company(Callback):
    """Waits on one rank of another machine, as long as rank 0 counts `ALIVE`, for its `DONE`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def on_exit(self, stop: StopSignal) -> None:
        seen = -1
        since = time.monotonic()
        # Of a store whose machine has left.
        with suppress(RuntimeError):
            while not (stop.requested or self._store.check([DONE])):
                count = self._store.add(ALIVE, 0)
                if count != seen:
                    seen = count
                    since = time.monotonic()
                elif time.monotonic() - since > _SILENCE:
                    return
                time.sleep(0.2)
