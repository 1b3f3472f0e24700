"""Commands as child processes: their output in a file, and an end that leaves nothing behind that
they started. The commands are torchrun and the rows of benchmarks/gpu.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import titanlite
from titanlite import exit_codes
from titanlite.dist.parent_death import end_with_parent
from titanlite.utils import new_file, say

#: Time for torchrun to end; it gives its workers 10 seconds less.
GRACE_SECONDS = 40

#: The first line of torchrun's own report of a failure, after the output of the workers.
_TORCHRUN = re.compile(r"[WE]\d{4} \S+ \d+ (\S*/)?torch/distributed/")


class Stopped(SystemExit):
    """A signal asked this process to stop. Nobody needs to catch it: it is the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_codes.after_signal(number))
        self.name = signal.Signals(number).name


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped on Ctrl-C, SIGTERM and a closed terminal, unless the signal was ignored before
    (nohup).
    """

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def training_environment(grace: float = GRACE_SECONDS) -> dict[str, str]:
    """Return the variables of a command that runs this titanlite, and writes to a file.

    grace: seconds that the command has to end.
    """
    package = str(Path(titanlite.__file__).resolve().parents[1])
    paths = filter(None, (package, os.environ.get("PYTHONPATH")))
    return {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(grace - 10)),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }


def start(
    command: Sequence[str],
    console: Path,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a folder, with its output in the file `console`.

    Call it from the main thread. On Linux the command is asked to end when this process dies.
    Raises OSError.
    """
    parent = os.getpid()

    def prepare() -> None:
        # Shells let commands in the background ignore it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        end_with_parent(signal.SIGTERM, parent)

    # The command gets a session for itself, so Ctrl-C reaches only this process.
    with new_file(console) as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment,
            start_new_session=True,
            preexec_fn=prepare,
        )


def run(
    command: Sequence[str],
    console: Path,
    *,
    environment: Mapping[str, str] | None = None,
    grace: float = GRACE_SECONDS,
) -> int:
    """Run a command as `start` does, to its end; return its exit code.

    An exception meanwhile, such as Stopped, ends the command first, within `grace` seconds. If two
    signals come, the first one is raised. Raises OSError.
    """
    process = start(command, console, environment)
    try:
        return process.wait()
    except BaseException:
        # A second signal ends the command sooner, but the first one is the reason.
        with contextlib.suppress(Stopped):
            end(process, grace=grace)
        raise


def end(
    process: subprocess.Popen[Any],
    ask: signal.Signals = signal.SIGTERM,
    grace: float = GRACE_SECONDS,
) -> None:
    """Ask a command to end within `grace` seconds.

    Then, or on a second signal, kill it and all that it started, and raise the signal.
    """
    process.send_signal(ask)
    try:
        process.wait(grace)
    except BaseException as error:
        kill(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a command, if it still runs, and all that it started, at once."""
    if process.poll() is None:
        for pid in [*_descendants(process.pid), process.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _descendants(pid: int) -> list[int]:
    """Return what a process started, the youngest first, in other sessions too."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    found = []
    for child in map(int, children):
        found += [*_descendants(child), child]
    return found


def last_lines(console: Path, count: int = 15) -> list[str]:
    """Return the last lines of a run's ranks, without torchrun's report of the failure."""
    lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in lines if line.strip()]
    # The first line may be one that the ranks wrote through the same logger.
    for number, line in enumerate(lines):
        if number and _TORCHRUN.match(line):
            return lines[:number][-count:]
    return lines[-count:]


def tell(text: str) -> None:
    """Write progress to standard error: standard output holds the table."""
    say(f"{datetime.now():%H:%M:%S} {text}")
