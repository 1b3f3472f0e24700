"""Spare processes: a restart by torchrun finds Python, torch and titanlite imported.

torchrun keeps a spare for each of its ranks. It has the command and the environment of the rank,
imports what a run imports, and waits. At a restart it gets the new variables and the rank's output,
and becomes the rank. A spare is a child of torchrun as a rank is: signals and exit codes are alike.

The imports of a spare happen before the restart, so what they read must be the same: a rank whose
other variables have changed starts without a spare. So does one whose spare has ended, or has
imported what was installed anew since.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from titanlite.exit_codes import ROUND
from titanlite.runs import provenance

#: What torchrun changes from start to start. No import reads it.
_CHANGING = {
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    ROUND,
}
#: What each run imports. FSDP needs torch's compiler.
_MODULES = (
    "titanlite.main",
    "titanlite.assembly",
    "titanlite.trainer",
    "titanlite.parallel.run_store",
    "titanlite.start.saves",
    "titanlite.checkpoint.manager",
    "titanlite.checkpoint.load",
    "titanlite.plan.start_rows",
    "torch._dynamo",
)
#: torchrun's limit of restarts, in the environment of each rank.
_MOST = "TORCHELASTIC_MAX_RESTARTS"
_BYTES = 2**16


class _Spare:
    """A process that waits to become a rank of one command."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._fixed = _fixed(environment)
        self._channel, theirs = socket.socketpair()
        words = [sys.executable, "-u", "-m", __name__, str(theirs.fileno()), *command[2:]]
        with theirs:
            self.process = subprocess.Popen(
                words,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def become(
        self, command: Sequence[str], environment: Mapping[str, str], output: Sequence[int]
    ) -> bool:
        """Let the process be a rank; return False if it cannot. output: its descriptors 1 and 2."""
        is_same = command == self._command and _fixed(environment) == self._fixed
        if not is_same or self.process.poll() is not None:
            self.end()
            return False
        message = json.dumps([time.time(), dict(environment)]).encode()
        try:
            with self._channel:
                sent = socket.send_fds(self._channel, [message], output)
                self._channel.sendall(message[sent:])
        except OSError:
            # It ends at this moment.
            self.end()
            return False
        return True

    def end(self) -> None:
        """End the process."""
        self._channel.close()
        self.process.kill()
        self.process.wait()


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _CHANGING}


def _is_python(command: Sequence[str]) -> bool:
    """Return whether this is torchrun's command for a module or a script of Python."""
    if command[:2] != (sys.executable, "-u"):
        return False
    return command[2] == "-m" or not command[2].startswith("-")


class _Spares:
    """The spares of one torchrun, by local rank. popen: starts a rank without a spare."""

    def __init__(self, seconds: int, popen: Callable[..., Any]) -> None:
        self._seconds = seconds
        self._popen = popen
        self._due = 0.0
        self._wanted: dict[int, tuple[Sequence[str], Mapping[str, str]]] = {}
        self._found: dict[int, _Spare] = {}

    def start(self, handler: Any, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        """Return the process of a rank, as the method of torch's handler does."""
        self._due = time.monotonic() + self._seconds
        rank = handler.local_rank_id
        self._wanted.pop(rank, None)
        if int(environment["TORCHELASTIC_RESTART_COUNT"]) < int(environment[_MOST]):
            self._wanted[rank] = (command, environment)
        elif environment[_MOST] == "0" and rank == 0:
            print("TITANLITE_SPARES does nothing without --max-restarts", file=sys.stderr)
        spare = self._found.pop(rank, None)
        files = (handler._stdout, handler._stderr)
        output = [number if file is None else file.fileno() for number, file in enumerate(files, 1)]
        if spare is not None and spare.become(command, environment, output):
            return spare.process
        return self._popen(handler, command, environment)

    def prepare(self) -> None:
        """Start the spares that are due. torchrun calls it again and again while ranks run."""
        if time.monotonic() < self._due:
            return
        for rank, (command, environment) in self._wanted.items():
            if rank in self._found or not _is_python(command):
                continue
            try:
                self._found[rank] = _Spare(command, environment)
            except OSError as error:
                # The ranks train on. Their next start tries again.
                print(f"warning: no spare processes are kept: {error}", file=sys.stderr)
                self._due = math.inf
                return

    def end(self) -> None:
        for spare in self._found.values():
            spare.end()


@contextlib.contextmanager
def spares(seconds: int) -> Iterator[None]:
    """Let torchrun, which runs inside, keep spares. seconds: from a start of ranks to theirs."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    handler: Any = SubprocessHandler
    context: Any = SubprocessContext
    kept = _Spares(seconds, handler._popen)
    poll = context._poll

    def poll_and_prepare(ranks: Any) -> Any:
        result = poll(ranks)
        if result is None:
            kept.prepare()
        return result

    def popen(of_rank: Any, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        return kept.start(of_rank, command, environment)

    handler._popen = popen
    context._poll = poll_and_prepare
    try:
        yield
    finally:
        kept.end()


def main() -> None:
    """Be a spare, and then a rank."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    command = sys.argv[2:]
    is_module = command[0] == "-m"
    if not is_module and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(command[0]).resolve().parent)
    _import()
    stamps = _stamps()
    with channel:
        message, output, _, _ = socket.recv_fds(channel, _BYTES, 2)
        while part := channel.recv(_BYTES):
            message += part
    if not message:
        # torchrun has ended.
        return
    for number, file in enumerate(output, 1):
        os.dup2(file, number)
        os.close(file)
    began, environment = json.loads(message)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    if _stamps() != stamps:
        _begin_anew(command)
    _watch_variables(command)
    # Times of the run begin with the restart.
    provenance.launched = lambda: began
    sys.argv = command[is_module:]
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


def _watch_variables(command: Sequence[str]) -> None:
    """Let the rank begin anew without a spare if code of the user has set variables: torch's
    compiler reads some when it is imported, which a rank does after it has connected.
    """
    from titanlite.parallel import dist_env

    connect = dist_env.connect_store
    before = _fixed(os.environ)

    def check_and_connect(*arguments: Any, **options: Any) -> Any:
        if _fixed(os.environ) != before:
            _begin_anew(command)
        return connect(*arguments, **options)

    dist_env.connect_store = check_and_connect


def _begin_anew(command: Sequence[str]) -> NoReturn:
    """Be the rank without what a spare has imported."""
    os.execv(sys.executable, [sys.executable, "-u", *command])


def _stamps() -> dict[str, int]:
    """Return when files of the imports changed: all of titanlite, the first of each package."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and ("." not in name or name.startswith("titanlite.")):
            with contextlib.suppress(OSError):
                found[file] = os.stat(file).st_mtime_ns
    return found


def _import() -> None:
    """Import what each run does, before code of the user."""
    # As in `titanlite.main.run`.
    gc.disable()
    # The rank meets the same error.
    with contextlib.suppress(Exception):
        for name in _MODULES:
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    main()
