"""Training runs as child processes: torchrun, its output in a file, and an end that leaves no
worker behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import titanlite

#: Time for torchrun to end; it gives its workers 10 seconds less.
GRACE_SECONDS = 40

#: The first line of torchrun's own report of a failure, after the output of the workers.
_TORCHRUN = re.compile(r"[WE]\d{4} \S+ \d+ (\S*/)?torch/distributed/")


class Stopped(BaseException):
    """A signal asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped on Ctrl-C, SIGTERM and a closed terminal, unless the signal was ignored before
    (nohup).
    """

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    taken = [
        n
        for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, stop) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def search_path() -> str:
    """Return PYTHONPATH for a child process that imports this titanlite."""
    package = str(Path(titanlite.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))


def run(command: Sequence[str], console: Path, device_type: str) -> int:
    """Run a command, write its output to the file `console`, return its exit code.

    An exception while it runs, such as Stopped, ends the command and its workers first. Raises
    OSError.
    """
    defaults = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS - 10)}
    if device_type == "cpu":
        defaults["OMP_NUM_THREADS"] = "1"
    variables = {
        **defaults,
        **os.environ,
        "PYTHONPATH": search_path(),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }
    # The command gets its own session, so Ctrl-C reaches only this process.
    with (
        console.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except BaseException:  # too slow, or a second signal
                with contextlib.suppress(OSError):
                    for worker in (
                        Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                    ):
                        os.kill(int(worker), signal.SIGKILL)
                process.kill()
            raise


def last_lines(console: Path, count: int = 15) -> list[str]:
    """Return the last lines that the ranks of a run wrote, without torchrun's report of the
    failure.
    """
    lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in lines if line.strip()]
    own = next((i for i, line in enumerate(lines) if i and _TORCHRUN.match(line)), None)
    return lines[:own][-count:]
