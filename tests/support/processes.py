"""Other processes that run the titanlite of this tree."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.support.ranks import start_fork_server
from titanlite.cli import main as cli

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


def titanlite(
    *words: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `titanlite` with these words to its end, as `python("-m", "titanlite", ...)` does.

    The process is a copy of one that has imported torch, which saves two seconds. So it tells
    nothing of imports and of the start of Python.
    """
    start_fork_server()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = multiprocessing.get_context("forkserver").Process(
            target=_command,
            args=([*map(str, words)], str(cwd), environment(**(env or {})), outputs),
        )
        process.start()
        process.join(900)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["titanlite", *map(str, words)], 900)
        texts = [output.read_text() for output in outputs]
    return subprocess.CompletedProcess(["titanlite", *words], process.exitcode, *texts)


def _command(
    words: list[str], folder: str, variables: dict[str, str], outputs: list[Path]
) -> NoReturn:
    """Be `titanlite`, in its own process."""
    os.environ.clear()  # of the process that this one is a copy of
    os.environ.update(variables)
    os.chdir(folder)
    tempfile.tempdir = None  # TMPDIR may be another one
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = ["titanlite", *words]
    sys.exit(cli.main())


def until(condition: Callable[[], object], seconds: float = 300) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


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
