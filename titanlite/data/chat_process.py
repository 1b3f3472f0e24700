"""Has chat templates rendered by a process of `titanlite.data.chat_worker`, one for each process
that asks.

It starts with the first conversation and ends with the process that started it. Threads take turns.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen

from titanlite.data.chat_worker import SECONDS, Request
from titanlite.utils import counted

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from titanlite.data.chat_worker import main; main(int(sys.argv[1]))"
)
_lock = threading.Lock()
#: The process and the connection to it, once it runs. A fork does not share them.
_workers: list[tuple[Popen[bytes], Connection]] = []
os.register_at_fork(after_in_child=_workers.clear)


class TemplateError(Exception):
    """A template could not be rendered."""


def ask(request: Request) -> tuple[str, str]:
    """Return the kind of an answer and its text.

    Raises TemplateError if the template takes too long, or its process ends otherwise.
    """
    content = pickle.dumps(tuple(request._replace(seconds=SECONDS)))
    with _lock:
        if not _workers:
            _workers.append(_start())
        process, connection = _workers[0]
        try:
            connection.send_bytes(content)
            answer = connection.recv_bytes().decode("utf-8", "surrogatepass")
        except BaseException as error:  # an interrupted answer would be taken for the next one
            _workers.clear()
            connection.close()
            process.kill()
            code = process.wait()
            if not isinstance(error, EOFError | ConnectionError):
                raise
            how = f"the process that renders it ended with code {code}"
            if code == -signal.SIGXCPU:
                how = f"it takes more than {counted(SECONDS, 'seconds')} of processor time"
            raise TemplateError(how) from None
    kind, _, text = answer.partition("\n")
    return kind, text


def _start() -> tuple[Popen[bytes], Connection]:
    ours, theirs = Pipe()
    number = theirs.fileno()
    paths = json.dumps([os.path.abspath(one) for one in sys.path])
    # Isolated: it imports from the folders of this process, and not from the working directory.
    command = [sys.executable, "-I", "-c", _START, str(number), paths]
    with theirs:
        process = Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, pass_fds=[number])
    return process, ours
