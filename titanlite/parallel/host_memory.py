"""How the C library hands out memory to a process that trains on the CPU."""

from __future__ import annotations

import ctypes
import os

#: Options of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_OWN_SETTINGS = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed for the next step, for the rest of the process; whether that was possible.

    glibc gives large blocks back to the system when they are freed and asks for them again, a page fault for every
    4 KiB: hundreds of thousands in a step of a small model. What a step needs, the next one needs too. Does nothing
    without glibc, or where the user has chosen an allocator or its settings.
    """
    if any(name.startswith(_OWN_SETTINGS) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # macOS, musl, Windows
        return False
    # Without blocks of their own from mmap, large tensors come from the heap, whose end is not trimmed.
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
