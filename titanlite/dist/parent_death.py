"""The end of a process when its parent has ended."""

from __future__ import annotations

import contextlib
import os
import signal


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Let the kernel (Linux only) send this process a signal when its parent thread has ended.

    `parent` is its process id, for a process that starts slowly: the parent may have ended before.
    """
    import ctypes

    parent = parent or os.getppid()
    # PR_SET_PDEATHSIG of prctl(2).
    set_signal_of_parents_death = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_signal_of_parents_death, number)
        # It ended before the call.
        if os.getppid() != parent:
            os.kill(os.getpid(), number)
