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

from titanlite.data.chat_worker import SECONDS, Request, read_message, write_message
from titanlite.data.threads import ending
from titanlite.utils import counted

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from titanlite.data.chat_worker import main; main()"
)


class TemplateError(Exception):
    """A template could not be rendered. The message says why."""


class _Worker:
    """The process, and the pipes to it."""

    def __init__(self) -> None:
        # Isolated: it imports from the folders of this process, and not from the working directory.
        command = [sys.executable, "-I", "-c", _START]
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self._requests.write(
            json.dumps([os.path.abspath(one) for one in sys.path]).encode() + b"\n"
        )

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request; b"" if the process ended."""
        try:
            write_message(self._requests, request)
            return read_message(self._answers)
        except BrokenPipeError:
            return b""

    def end(self) -> int:
        """End the process; return its exit code, negative for a signal."""
        self.process.kill()
        for stream in (self._requests, self._answers):
            try:
                stream.close()
            except OSError:
                continue  # what was not sent yet
        return self.process.wait()

    def ended(self) -> int:
        """Return the exit code of a process that closed its pipes."""
        code = self.process.wait()
        self.end()
        return code


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
            code = worker.ended()
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
