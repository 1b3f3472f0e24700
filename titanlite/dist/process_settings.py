"""Settings of a rank's process: malloc, the order of attention kernels."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
from contextlib import AbstractContextManager, nullcontext

from titanlite.dist import ParallelismError

#: Kernels of `scaled_dot_product_attention` on GPUs, in the order in which they are tried: names of
#: `SDPBackend`.
KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def kernel_order(device_type: str) -> AbstractContextManager[object]:
    """Let attention on GPUs try its kernels in the order of `KERNELS`."""
    if device_type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # Around the whole run: at each call it would cost tens of microseconds.
    return sdpa_kernel([getattr(SDPBackend, name) for name in KERNELS], set_priority=True)


#: For GLIBC_TUNABLES. They do as `keep_freed_memory`, and cache no small blocks. These lie in the
#: remainders of aligned requests, and holes between them are too small for the next tensor. Huge
#: pages: 3 s of a start for 2 % speed.
TUNABLES = ":".join(
    f"glibc.malloc.{setting}"
    for setting in ("mmap_max=0", f"trim_threshold={2**62}", "mxfast=0", "tcache_count=0")
)


def chose_malloc() -> bool:
    """Return whether the user has chosen or set the host's allocator."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory from now on; return whether that was possible.

    glibc returns large freed blocks to the system: hundreds of thousands of page faults (4 KiB
    each) in a CPU step. Without glibc, or after `chose_malloc`, it does nothing.
    """
    import ctypes

    if chose_malloc():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # macOS, musl, Windows
        return False
    # Options of mallopt(3) in glibc's malloc.h.
    trim_threshold = -1
    mmap_max = -4
    # Without blocks of their own from mmap, large tensors come from the heap, whose end is not
    # trimmed.
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, -1))
