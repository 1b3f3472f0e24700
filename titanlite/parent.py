"""A process that does not outlive the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent has ended, however that was.

    Linux only: nothing happens elsewhere. What counts as parent is the thread that started this process.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the kernel knew
            os.kill(os.getpid(), number)


def stop_with_torchrun() -> None:
    """Workers of a torchrun that was killed save a checkpoint and stop. Without torchrun nothing happens."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)
