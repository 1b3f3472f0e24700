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

#: Kernels of `scaled_dot_product_attention` on GPUs, in the order in which they are tried, by the
#: names of `SDPBackend`. A GPU of `CUDNN_FIRST`, or a chosen kernel, has another first.
KERNELS = ("flash", "cudnn", "efficient", "math")
#: Compute capabilities whose forward and backward are faster by cuDNN than by flash: Ada by 16 %
#: (pytorch PR 192799; even in transformers PR 48163), Hopper by 70 to 130 % (transformers PR
#: 48163), Blackwell, where a whole 8B step gains 12 % (torchtitan PR 1196, B200). Not A100 (flash
#: is 14 % faster, pytorch PR 192799) and 12.0 (14 %, transformers PR 48163). 8.6 is disputed.
CUDNN_FIRST = ((8, 9), (9, 0), (10, 0), (10, 3))


def kernel_order(device_type: str, first: str = "auto") -> AbstractContextManager[object]:
    """Let attention on GPUs try the kernel `first`, or this GPU's fastest, then the others."""
    if device_type != "cuda":
        return nullcontext()
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if first == "auto":
        first = "cudnn" if torch.cuda.get_device_capability() in CUDNN_FIRST else "flash"
    names = sorted(KERNELS, key=lambda name: name != first)
    order = [getattr(SDPBackend, f"{name.upper()}_ATTENTION", SDPBackend.MATH) for name in names]
    # Otherwise torch puts cuDNN first at the first call, on Hopper and Blackwell.
    os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
    # Around the whole run: at each call it would cost tens of microseconds.
    return sdpa_kernel(order, set_priority=True)


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
