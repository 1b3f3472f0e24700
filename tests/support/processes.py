"""Other processes that run the titanlite of this tree."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Words for Python that start a script on two ranks.
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nproc_per_node=2",
    "--rdzv_backend=c10d",
    "--rdzv_endpoint=localhost:0",
]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that runs this titanlite, on one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}


def python(
    *words: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 900,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words to its end. env: variables beside `environment`'s."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment(**(env or {})),
        **{
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "timeout": timeout,
            **more,
        },
    )


def ended(pid: int, seconds: float = 300) -> bool:
    """Wait until a process ends; return False after `seconds`.

    A zombie that no one waits for has ended too.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
