"""Has chat templates rendered by a process of `titanlite.data.chat_worker`, one for each process
that asks.

It starts with the first conversation and ends with the process that started it. Threads take turns.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from subprocess import DEVNULL

from titanlite.data.chat_worker import SECONDS, Request
from titanlite.data.threads import ending
from titanlite.utils import counted

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from titanlite.data.chat_worker import main; main(int(sys.argv[1]))"
)


class TemplateError(Exception):
    """A template could not be rendered. The message says why."""


class _Worker:
    """The process, and the connection to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.connection, theirs = Pipe()
        number = theirs.fileno()
        paths = json.dumps([os.path.abspath(one) for one in sys.path])
        # Isolated: it imports from the folders of this process, and not from the working directory.
        command = [sys.executable, "-I", "-c", _START, str(number), paths]
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, pass_fds=[number]
            )

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request; b"" if the process ended."""
        try:
            self.connection.send_bytes(request)
            return self.connection.recv_bytes()
        except (EOFError, ConnectionError):
            return b""

    def end(self) -> None:
        self.process.kill()
        self.connection.close()
        self.process.wait()


_lock = threading.Lock()
_workers: list[_Worker] = []


def ask(request: Request) -> tuple[str, str]:
    """Return the kind of an answer and its text, see `titanlite.data.chat_worker`.

    Raises TemplateError where the template takes too long, or its process ends for another reason,
    twice.
    """
    content = pickle.dumps(tuple(request._replace(seconds=SECONDS)))
    with _lock:
        for _ in range(2):
            if ending.is_set():
                raise TemplateError("this process ends")
            worker = _current()
            try:
                answer = worker.ask(content)
            except BaseException:  # an interrupted answer would be taken for the next one
                _workers.clear()
                worker.end()
                raise
            if answer:
                kind, _, text = answer.decode("utf-8", "surrogatepass").partition("\n")
                return kind, text
            _workers.clear()
            code = worker.process.wait()
            worker.connection.close()
            if code == -signal.SIGXCPU:
                raise TemplateError(
                    f"it takes more than {counted(SECONDS, 'seconds')} of processor time"
                )
    how = f"signal {-code}" if code < 0 else f"code {code}"
    raise TemplateError(f"the process that renders it ended with {how}")


def _current() -> _Worker:
    """Return the worker of this process, which a fork does not share."""
    if _workers and _workers[0].owner != os.getpid():
        _workers.clear()
    if not _workers:
        _workers.append(_Worker())
    return _workers[0]


@atexit.register
def _end() -> None:
    for worker in _workers:
        if worker.owner == os.getpid():
            worker.end()
