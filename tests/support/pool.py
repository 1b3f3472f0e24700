"""Real gloo ranks for tests, kept alive between them: starting two costs a second, reusing them
milliseconds.

    result = pool(2).run(function, *args)     # [function(world, *args) of rank 0, of rank 1]

`function` is a top-level function of a test module. A job that fails on any rank raises here with
every rank's traceback and ends that pool's processes, since a rank left inside a collective is of
no further use. When a process dies, its signal, its threads' Python stacks and the jobs that it has
done are told: memory may have been corrupted by any of them.

Before each job `tests.support.process_state` puts back what an earlier one may have changed.
Between two jobs the processes are stopped: each process group has threads of gloo's that wake a
hundred times a second, and the pools together would keep half a core busy doing nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from titanlite.start.signals import end_with_parent
from titanlite.tools.drill.ranks import start_fork_server

#: Seconds in which the other ranks may answer when one has failed.
_AFTER_A_FAILURE = 10


class RankFailure(AssertionError):
    """One or more ranks raised or did not answer in time."""


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(
    rank: int,
    size: int,
    port: int,
    pipe: Connection,
    environment: dict[str, str],
    stacks: Path,
) -> None:
    faulthandler.enable(stacks.open("w"))
    gc.freeze()  # imports of the fork server
    end_with_parent(signal.SIGKILL)  # a stopped process does not notice that its parent is gone
    os.environ.clear()  # of the process that this one is a copy of
    os.environ.update(
        environment,
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed.device_mesh

    from tests.support.process_state import ProcessState
    from titanlite.parallel.dist_env import DistEnv

    # A mesh per test would leave its groups behind, each with a thread of gloo's that wakes a
    # hundred times a second.
    cached = functools.cache(torch.distributed.device_mesh.init_device_mesh)
    torch.distributed.device_mesh.init_device_mesh = cached
    torch.set_num_threads(1)
    with DistEnv.open("cpu", init_timeout_seconds=300, rendezvous_seconds=300) as world:
        kept = ProcessState()
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                os._exit(0)
            function, args, kwargs = job
            kept.restore()
            gc.collect()
            gc.freeze()  # a run collects garbage: let it not look through all that is imported
            try:
                with warnings.catch_warnings():
                    result = function(world, *args, **kwargs)
                pipe.send((True, result))
            except BaseException:
                pipe.send((False, traceback.format_exc()))


class RankPool:
    """`size` processes in one gloo world."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        #: The jobs of these processes, each with its test.
        self._jobs: list[str] = []
        #: Each process writes its stacks there when it dies.
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _start(self) -> None:
        start_fork_server()  # the ranks are copies of a process that has imported torch
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="titanlite-pool-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            environment = dict(os.environ)
            arguments = (rank, self.size, port, theirs, environment, self._stacks(rank))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 900, **kwargs: Any
    ) -> list[Any]:
        """Call function(world, *args, **kwargs) on every rank; the results by rank."""
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        self._jobs.append(f"{function.__name__} in {test}")
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while len(answers) < self.size:
            waiting = [pipe for pipe, rank in ranks.items() if rank not in answers]
            for pipe in wait(waiting, timeout=max(deadline - time.monotonic(), 0)):
                try:
                    answers[ranks[pipe]] = pipe.recv()
                except EOFError:
                    answers[ranks[pipe]] = (False, self._death(ranks[pipe]))
            failed = [rank for rank, (fine, _) in answers.items() if not fine]
            if failed and time.monotonic() < deadline - _AFTER_A_FAILURE:
                # The others may be stuck waiting for the one that failed.
                deadline = time.monotonic() + _AFTER_A_FAILURE
            if time.monotonic() >= deadline:
                break
        silent = [rank for rank in range(self.size) if rank not in answers]
        problems = [
            f"rank {rank}:\n{text}" for rank, (fine, text) in sorted(answers.items()) if not fine
        ]
        if silent or problems:
            self.close()
            problems += [f"rank {rank}: no answer" for rank in silent]
            raise RankFailure("\n".join(problems))
        self._signal(signal.SIGSTOP)
        return [answers[rank][1] for rank in range(self.size)]

    def _stacks(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"rank-{rank}")

    def _death(self, rank: int) -> str:
        """Return all that is known of a process that has ended."""
        process = self._processes[rank]
        process.join(_AFTER_A_FAILURE)
        code = process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
        jobs = []
        for job, repeated in groupby(self._jobs):
            times = len(list(repeated))
            jobs.append(f"  {job}" if times == 1 else f"  {job}, {times} times")
        before = ["its jobs, the last one unfinished:", *jobs]
        return "\n".join([f"the process died: {how}", self._stacks(rank).read_text(), *before])

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []
        self._pipes = []
        self._jobs = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Pools:
    """The pools of a test session, by size, each started when it is first used."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, size: int) -> RankPool:
        return self._pools.setdefault(size, RankPool(size))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
