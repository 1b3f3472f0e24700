"""Training runs as child processes: torchrun, its output in a file, and an end that leaves no worker behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import titanlite

#: torchrun gives its workers 30 seconds to end.
GRACE_SECONDS = 40

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
#: torchrun's own report of a failure begins here, after the output of the workers.
_TORCHRUN = re.compile(r"[WE]\d{4} \S+ \d+ (\S*/)?torch/distributed/")


class Stopped(BaseException):
    """A signal asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped on Ctrl-C, SIGTERM and a closed terminal, unless the signal was ignored before (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    taken = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def training_command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command line of a training run with `ranks` processes on this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    return [
        *torchrun,
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        "localhost:0",
        "-m",
        "titanlite",
        "train",
        *arguments,
    ]


def training_environment(device_type: str) -> dict[str, str]:
    """The environment of a run: this titanlite, unbuffered plain output, one thread per rank on a CPU by default."""
    package = str(Path(titanlite.__file__).resolve().parents[1])
    found = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    if device_type == "cpu":
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


def run(command: Sequence[str], console: Path, variables: Mapping[str, str]) -> int:
    """Run a command, write its output to the file `console`, return its exit code.

    An exception while it runs, such as Stopped, ends the command and its workers first. Raises OSError.
    """
    with console.open("wb") as output:
        # The command gets its own session, so Ctrl-C reaches only this process.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(variables),
            start_new_session=True,
        )
        try:
            return process.wait()
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to torchrun; kill it and its workers after the grace period, or on a second signal."""
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except BaseException as error:
        for worker in _children(process.pid):
            with contextlib.suppress(OSError):
                os.kill(worker, signal.SIGKILL)
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def last_lines(console: Path, count: int = 15) -> list[str]:
    """The last lines that the ranks of a run wrote, without torchrun's report of the failure."""
    try:
        lines = _ESCAPE.sub("", console.read_text(encoding="utf-8", errors="replace")).splitlines()
    except OSError:
        return []
    own = next((i for i, line in enumerate(lines) if _TORCHRUN.match(line) and any(map(str.strip, lines[:i]))), None)
    written = [line for line in lines[:own] if line.strip()]
    return (written or lines)[-count:]
