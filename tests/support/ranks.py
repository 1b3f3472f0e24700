"""Training runs on this machine whose ranks start in a second, for tests and benchmarks.

Each rank is a copy of a process that has imported torch (multiprocessing's fork server). Apart from
that it is `train.py` under torchrun: the same environment, the same exit codes. This module does
not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tests.support.faults import NO_FAULT, Fault, inject
from titanlite.dist.parent_death import end_with_parent

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

#: Limit of one start. A tiny run takes seconds, on a busy machine perhaps minutes.
TIMEOUT_SECONDS = 900.0
#: Time that the other ranks have to end when one has failed; then they are killed, as torchrun
#: does.
GRACE_SECONDS = 60.0


class RanksError(RuntimeError):
    """A run did not end, or not as expected; the text has the end of its output."""


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_fork_server() -> None:
    """Let the fork server import torch in the background. Later calls do nothing.

    Its copies have one thread each, since they share the cores, and no GPU, which cannot be forked.
    """
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    os.environ.update(NO_COLOR="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    try:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["titanlite.assembly.build", "titanlite.trainer", __name__])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """One start of `train.py` on `count` ranks of this machine.

    As a context manager it kills all ranks at its end.

    arguments: of `train.py`. console: file to which the output of all ranks is appended. main:
    module with the function `main` to call, such as "titanlite.cli.main" for a command of
    `titanlite`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        count: int,
        console: Path,
        fault: Fault = NO_FAULT,
        main: str = "titanlite.main",
    ) -> None:
        start_fork_server()
        console.touch()
        self.console = console
        self._offset = console.stat().st_size
        # The fork server has the environment of its start.
        launch = {name: value for name, value in os.environ.items() if name.startswith("HF_")}
        launch |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
        launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes: list[ForkServerProcess] = []
        for rank in range(count):
            variables = {**launch, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))}
            own = fault if rank == fault.rank else NO_FAULT
            words = (main, list(arguments), variables, str(console), own)
            process = multiprocessing.get_context("forkserver").Process(
                target=_run_rank, args=words, daemon=True
            )
            process.start()
            self.processes.append(process)

    def send(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self, *_: object) -> None:
        """Kill all ranks and wait for their ends."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.join()

    __exit__ = kill

    def output(self) -> str:
        """Return the output of this start."""
        return self.console.read_bytes()[self._offset :].decode(errors="replace")

    def wait(self, seconds: float = TIMEOUT_SECONDS, grace: float = GRACE_SECONDS) -> list[int]:
        """Return the exit codes by rank, negative for a signal. Raises RanksError after
        `seconds`.
        """
        deadline = time.monotonic() + seconds
        failed = False
        while alive := [process.sentinel for process in self.processes if process.exitcode is None]:
            if not connection.wait(alive, max(0.0, deadline - time.monotonic())):
                self.kill()
                check(failed, f"the run did not end within {seconds:.0f} s", self.output())
            elif not failed and any(process.exitcode for process in self.processes):
                deadline = time.monotonic() + grace
                failed = True
        return [process.exitcode for process in self.processes]  # type: ignore[misc]


def check(passed: bool, problem: str, text: str = "") -> None:
    """Raise RanksError with the problem and the last lines of an output."""
    if not passed:
        raise RanksError("\n    ".join([problem, *text.splitlines()[-12:]]))


def train(
    arguments: Sequence[str],
    count: int,
    console: Path,
    fault: Fault = NO_FAULT,
    main: str = "titanlite.main",
) -> tuple[list[int], str]:
    """Run the ranks to their end. Return exit codes by rank, and the output. Raises RanksError."""
    with Ranks(arguments, count, console, fault, main) as ranks:
        return ranks.wait(), ranks.output()


def _run_rank(
    main: str, arguments: list[str], variables: dict[str, str], console: str, fault: Fault
) -> NoReturn:
    """Be one rank, in its own process."""
    os.setsid()  # Ctrl-C at the terminal reaches the test only, which then ends its ranks
    end_with_parent(signal.SIGKILL)
    output = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    sys.argv = ["train.py", *arguments]
    if fault != NO_FAULT:
        inject(fault)
    sys.exit(importlib.import_module(main).main())
