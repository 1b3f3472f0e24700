"""Memory that is freed is used again without page faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_FAULTS = """
import ctypes, json, resource, torch
from titanlite.parallel.host_memory import keep_freed_memory
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        kept = [torch.zeros(10 << 20) for _ in range(2)]  # 40 MiB: more than malloc keeps
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
plain, done, = faults(), keep_freed_memory()
faults()
kept = faults()
sbrk = ctypes.CDLL(None).sbrk
sbrk.restype = ctypes.c_void_p
before = sbrk(0)
torch.empty(3 << 30, dtype=torch.uint8)  # freed at once; no page of it is touched
print(json.dumps([done, plain, kept, sbrk(0) - before]))
"""


def _measure(**environment: str) -> list[int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
    command = [sys.executable, "-c", _FAULTS]
    return json.loads(subprocess.run(command, env={**clean, **environment}, check=True, capture_output=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    done, plain, kept, grown = _measure()
    assert done
    assert plain > 1_000  # 80 MiB at a time are 20,480 pages, fewer where they are huge
    assert kept < plain / 50
    assert grown > 2 << 30  # however much it is, the end of the heap stays


@pytest.mark.slow
def test_a_users_own_settings_are_left_alone() -> None:
    assert _measure(MALLOC_ARENA_MAX="4")[0] is False
