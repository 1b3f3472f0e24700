"""Training runs that are quick to start and may be harmed: real processes, real signals, real files.

A process that has imported torch once (multiprocessing's fork server) makes each rank as a copy of itself, so a start
takes a second instead of many. From there on a rank is `train.py` under torchrun: the same environment, the same exit
codes, an output of its own. No torch here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import titanlite
from titanlite.drill.strike import Strike, arm
from titanlite.parent import end_with_parent

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

#: Of one start; a toy takes seconds, on a busy machine perhaps minutes.
PATIENCE_SECONDS = 300.0
#: For the other ranks to notice by themselves that one is gone.
GRACE_SECONDS = 60.0
_POLL_SECONDS = 0.005
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class RanksError(RuntimeError):
    """The ranks did not do what was waited for; the text has the end of their output."""


def prepare() -> None:
    """Let the fork server begin to import torch, which takes seconds; returns at once. Later calls do nothing.

    One thread per rank: several ranks share the cores.
    """
    package = str(Path(titanlite.__file__).resolve().parents[1])
    added = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "NO_COLOR": "1",
        "CUDA_VISIBLE_DEVICES": "",  # a rehearsal is for CPUs, and a GPU cannot be forked
    }
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload(["titanlite.drill.preload"])
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Ranks:
    """One start of `train.py` on `count` ranks of this machine; a context manager that leaves none of them behind.

    arguments: of `train.py`. console: the file that all they print is appended to. strike: what happens to them from
    within, see `titanlite.drill.strike`.
    """

    def __init__(self, arguments: Sequence[str], count: int, console: Path, strike: Strike | None = None) -> None:
        prepare()
        self.console = console
        self._offset = console.stat().st_size if console.exists() else 0
        context = multiprocessing.get_context("forkserver")
        port = _free_port()
        self.processes: list[ForkServerProcess] = []
        for rank in range(count):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            arguments_of = (list(arguments), variables, str(console), strike)
            self.processes.append(context.Process(target=_rank, args=arguments_of, daemon=True))
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def pid(self, rank: int) -> int:
        found = self.processes[rank].pid
        assert found is not None
        return found

    def send(self, number: signal.Signals, rank: int | None = None) -> None:
        """A signal to one rank, or to all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all ranks that are alive, and wait for their ends."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def output(self) -> str:
        """All that this start has printed."""
        try:
            with self.console.open("rb") as file:
                file.seek(self._offset)
                return _ESCAPE.sub("", file.read().decode(errors="replace"))
        except FileNotFoundError:
            return ""

    def until(self, pattern: str, seconds: float = PATIENCE_SECONDS) -> re.Match[str]:
        """Wait for a line. Raises RanksError when all ranks end without it, or when it takes too long."""
        deadline = time.monotonic() + seconds
        while True:
            ended = all(process.exitcode is not None for process in self.processes)
            if found := re.search(pattern, self.output(), re.MULTILINE):
                return found
            if ended or time.monotonic() > deadline:
                why = "ended without" if ended else f"did not come in {seconds:.0f} s to"
                raise RanksError(f"the run {why} {pattern!r}\n{self.tail()}")
            time.sleep(_POLL_SECONDS)

    def until_stopped(self, rank: int, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until a rank stands still (SIGSTOP). Raises RanksError when it does not."""
        deadline = time.monotonic() + seconds
        while self.processes[rank].exitcode is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                # The name in parentheses may itself hold spaces and parentheses.
                if Path(f"/proc/{self.pid(rank)}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    return
            time.sleep(_POLL_SECONDS)
        raise RanksError(f"rank {rank} did not stop\n{self.tail()}")

    def wait(self, seconds: float = PATIENCE_SECONDS, grace: float = GRACE_SECONDS) -> list[int]:
        """Exit codes by rank, negative for a signal. Raises RanksError, and kills them, when it takes too long.

        grace: seconds that the others have once one has failed; then they are killed, as torchrun does.
        """
        deadline = time.monotonic() + seconds
        failed: float | None = None
        while any(process.exitcode is None for process in self.processes):
            now = time.monotonic()
            if failed is None and any(process.exitcode for process in self.processes):
                failed = now
            if failed is not None and now - failed > grace:
                self.kill()
            elif now > deadline:
                self.kill()
                raise RanksError(f"the run did not end within {seconds:.0f} s\n{self.tail()}")
            time.sleep(_POLL_SECONDS)
        return [process.exitcode for process in self.processes]  # type: ignore[misc]

    def tail(self, lines: int = 12) -> str:
        return "\n".join(f"    {line}" for line in self.output().splitlines()[-lines:])


def train(
    arguments: Sequence[str],
    count: int,
    console: Path,
    strike: Strike | None = None,
    seconds: float = PATIENCE_SECONDS,
    grace: float = GRACE_SECONDS,
) -> tuple[list[int], str]:
    """One start to its end: exit codes by rank, and what was printed. Raises RanksError when there is no end."""
    with Ranks(arguments, count, console, strike) as ranks:
        return ranks.wait(seconds, grace), ranks.output()


def _rank(arguments: list[str], variables: dict[str, str], console: str, strike: Strike | None) -> NoReturn:
    """The life of one rank, in its own process."""
    os.setsid()  # Ctrl-C at the terminal is for the rehearsal, which then ends its ranks
    end_with_parent(signal.SIGKILL)
    output = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    sys.argv = ["train.py", *arguments]
    if strike is not None:
        arm(strike, int(variables["RANK"]))
    from titanlite import main

    main.main()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
