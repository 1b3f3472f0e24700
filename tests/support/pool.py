"""Real gloo ranks for tests, kept alive between them: starting two costs a second, reusing them
milliseconds.

    result = pool(2).run(function, *args)     # [function(world, *args) of rank 0, of rank 1]

`function` is a top-level function of a test module. A job that fails on any rank raises here with
every rank's traceback and ends that pool's processes, since a rank left inside a collective is of
no further use. When a process dies or gives no answer, its signal, the stacks of its threads in C
and in Python, and the jobs that it has done are told: memory may have been corrupted by any of
them.

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
import pickle
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.ranks import free_port, start_fork_server
from titanlite.dist.parent_death import end_with_parent

#: Seconds of one wait for answers.
_WAIT = 1.0
#: Seconds in which the other ranks may answer when one has failed.
_AFTER_A_FAILURE = 10
#: Seconds in which the other ranks may answer when one has succeeded: jobs end together.
_AFTER_AN_ANSWER = 180


class RankFailure(AssertionError):
    """One or more ranks raised or did not answer in time."""


def _serve(
    rank: int,
    size: int,
    port: int,
    pipe: Connection,
    environment: dict[str, str],
    stacks: Path,
) -> None:
    file = _write_stacks(stacks)
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
    from titanlite.dist.dist_env import DistEnv

    # A mesh per test would leave its groups behind, each with a thread of gloo's that wakes a
    # hundred times a second.
    cached = functools.cache(torch.distributed.device_mesh.init_device_mesh)
    torch.distributed.device_mesh.init_device_mesh = cached
    torch.set_num_threads(1)
    with DistEnv.open("cpu", init_timeout_seconds=300, rendezvous_seconds=300) as world:
        kept = ProcessState()
        while True:
            try:
                job = _receive(pipe)
            except EOFError:
                os._exit(0)
            function, args, kwargs = job
            os.ftruncate(file, 0)
            kept.restore()
            gc.collect()
            gc.freeze()  # a run collects garbage: let it not look through all that is imported
            try:
                with warnings.catch_warnings():
                    result = function(world, *args, **kwargs)
                _send(pipe, (True, result))
            except BaseException:
                _send(pipe, (False, traceback.format_exc()))


def _send(pipe: Connection, value: Any) -> None:
    """Send a value with its tensors' numbers.

    `Connection.send` moves storages of tensors into shared memory instead: those of a rank that
    goes on, from below what else reads them, and with a thread that serves them.
    """
    pipe.send_bytes(pickle.dumps(value))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _write_stacks(path: Path) -> int:
    """Let this process write its stacks into a file when it dies, those of Python and of C.

    What C writes as an error goes there too, as the C library's last words about a damaged heap.
    """
    import torch

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(file, 2)
    faulthandler.enable(file)
    # After Python's, since it calls the handlers before it.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    # It takes Ctrl-C for fatal.
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
    return file


class RankPool:
    """`size` processes in one gloo world."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        #: The jobs of these processes, each with its test.
        self._jobs: list[str] = []
        #: Each process writes its stacks there.
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
            _send(pipe, (function, args, kwargs))
        answers: dict[int, tuple[bool, Any]] = {}
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        # In seconds that passed here: a machine that was stopped meanwhile has not run the ranks.
        patience = timeout
        while len(answers) < self.size and patience > 0:
            waiting = [pipe for pipe, rank in ranks.items() if rank not in answers]
            ready = wait(waiting, timeout=_WAIT)
            if not ready:
                patience -= _WAIT
            for pipe in ready:
                try:
                    answers[ranks[pipe]] = _receive(pipe)
                except EOFError:
                    answers[ranks[pipe]] = (False, self._death(ranks[pipe]))
                # The others may be stuck, perhaps waiting for this one, which has failed.
                fine = answers[ranks[pipe]][0]
                patience = min(patience, _AFTER_AN_ANSWER if fine else _AFTER_A_FAILURE)
        silent = [rank for rank in range(self.size) if rank not in answers]
        problems = [
            f"rank {rank}:\n{text}" for rank, (fine, text) in sorted(answers.items()) if not fine
        ]
        problems += [self._silence(rank) for rank in silent]
        if problems:
            self.close()
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
        return f"the process died: {how}\n{self._told(rank)}\n{self._past()}"

    def _silence(self, rank: int) -> str:
        """End a process that gives no answer; return all that is known of it."""
        self._signal(signal.SIGABRT, rank)
        self._processes[rank].join(_AFTER_A_FAILURE)
        return f"rank {rank}: no answer\n{self._told(rank)}\n{self._past()}"

    def _told(self, rank: int) -> str:
        """Return what a process has written of its stacks, without addresses and folders."""
        return re.sub(r"\(0x\w+ in (?:.*/)?([^/]+)\)", r"(\1)", self._stacks(rank).read_text())

    def _past(self) -> str:
        """Return the jobs that these processes have had."""
        return "\n  ".join(["its jobs, the last one unfinished:", *self._jobs])

    def _signal(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one process, or to all."""
        for process in self._processes if rank is None else [self._processes[rank]]:
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
    """The pools of a test session, by size, each started when it is first needed."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, size: int) -> RankPool:
        return self._pools.setdefault(size, RankPool(size))

    def close(self, least: int = 1) -> None:
        """End the pools of at least so many ranks; the next job starts them again."""
        for size, pool in self._pools.items():
            if size >= least:
                pool.close()
