"""Training runs whose ranks start in a second, and faults inside one rank. The drill and the tests share them.

Each rank is a copy of a process that has imported torch (multiprocessing's fork server). Apart from that it is
`train.py` under torchrun: the same environment, the same exit codes. This module does not import torch.

Faults in a save are placed by calls on files, not by functions of the trainer. Python reports these calls as audit
events (docs.python.org/3/library/audit_events.html); only `os.fsync` has none, so it is wrapped.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import titanlite
from titanlite.entry import end_with_parent

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess


@dataclass(frozen=True)
class SaveEvent:
    """A point in a save: just before a call on a file."""

    #: Audit events, or "os.fsync".
    calls: tuple[str, ...]
    #: Pattern of the path, for a rename of "old path -> new path". FOLDER stands for the folder of the save.
    path: str
    #: The event that must have come before.
    after: str = ""
    #: Number of the call among those that match.
    count: int = 1
    #: Half of the file is cut off first, as if the rest had not been written.
    half: bool = False


_RENAME = ("os.rename", "os.link")
#: Points at which a process can be killed, in the order of a save.
SAVE_EVENTS = {
    "folder made": SaveEvent(("os.mkdir",), r"/FOLDER$"),
    "shard begun": SaveEvent(("open",), r"/FOLDER/[^/]*\.distcp"),
    "shard half": SaveEvent(("os.fsync",), r"/FOLDER/[^/]*\.distcp", half=True),
    "shards written": SaveEvent(("open",), r"/FOLDER/\.metadata"),
    "index half": SaveEvent(("os.fsync",), r"/FOLDER/\.metadata", half=True),
    "manifest begun": SaveEvent(("open",), r"/FOLDER/\.?manifest\.json"),
    "manifest half": SaveEvent(("os.fsync",), r"/FOLDER/\.?manifest\.json", half=True),
    "publish": SaveEvent(_RENAME, r"-> .*/FOLDER/manifest\.json$"),
    # From here on the new checkpoint counts, and a start resumes from it.
    "published": SaveEvent(("os.fsync",), r"/(step-\d+|checkpoint)$", after="publish"),
    "prune": SaveEvent(("os.remove", *_RENAME), r"^[^>]*/step-\d+(/manifest\.json)?( ->|$)", after="publish"),
    "prune half": SaveEvent(("os.remove",), r"step-\d+[^/]*/", after="prune", count=2),
}
PUBLISHED = ("published", "prune", "prune half")
#: Pattern of the folder of a save, which may have a temporary name while it is written.
_FOLDER = r"(?:\.partial-)?step-{}(?:-[0-9a-f]+)?"
#: On a full disk files cannot grow beyond this: less than any shard of a tiny model, more than its records.
FULL_BYTES = 1 << 16
_LOADER_ERROR = (errno.EIO, "Input/output error", "a shard of the drill")
#: Text of the error that a loader raises.
LOADER_ERROR = str(OSError(*_LOADER_ERROR))
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "pause": signal.SIGSTOP}


@dataclass(frozen=True)
class Fault:
    """A fault in one rank; the default is none.

    kill, term, pause: the process gets SIGKILL, SIGTERM or SIGSTOP. nan: a gradient becomes NaN, once. full: the disk
    is full. raise, hang: the loader raises LOADER_ERROR, or does not return while the file `mark` exists.
    All but full print "fault: KIND TIME" when they strike; TIME is in seconds since 1970.
    """

    kind: Literal["none", "kill", "term", "pause", "nan", "full", "raise", "hang"] = "none"
    #: When it strikes: at a key of SAVE_EVENTS (signals), in a "save" (full), in a "step" that has its batches (signals
    #: and nan), when the loader reads the "batch" of a step (raise, hang) or begins a "validation" (signals).
    event: str = ""
    #: Number of the step. Of a batch or a validation: its number since the start of the process.
    number: int = 0
    rank: int = 0
    mark: str = ""


NO_FAULT = Fault()


def inject(fault: Fault) -> None:
    """Prepare this process for a fault, before it trains."""
    from titanlite import trainer
    from titanlite.data.loader import TrainLoader, ValidationLoader

    calls, steps = itertools.count(1), {fault.number}

    def count(_: object) -> None:
        if next(calls) == fault.number:
            _strike(fault)

    def look(model: Any, *_: object, step: int, **__: object) -> None:
        if step in steps:
            steps.remove(step)  # after a rollback the step is repeated without the fault
            _strike(fault, model)

    if fault.event in SAVE_EVENTS:
        _watch_files(_save_watch(fault))
    elif fault.event == "save":
        _watch_files(_full_disk(fault.number))
    elif fault.event == "step":
        call_before(trainer, "train_step", look)
    elif fault.event == "batch":
        call_before(TrainLoader, "next_step", count)
    elif fault.event == "validation":
        call_before(ValidationLoader, "__iter__", count)
    else:
        raise ValueError(f"unknown event {fault.event!r}")


def _strike(fault: Fault, model: Any = None) -> None:
    os.write(1, f"fault: {fault.kind} {time.time():.3f}\n".encode())
    if fault.kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
    elif fault.kind == "raise":
        raise OSError(*_LOADER_ERROR)
    elif fault.kind == "nan":
        factors = itertools.chain([float("nan")], itertools.repeat(1.0))
        list(model.parameters())[-1].register_post_accumulate_grad_hook(lambda p: p.grad.mul_(next(factors)))
    while fault.kind == "hang" and os.path.exists(fault.mark):
        time.sleep(0.05)


def call_before(owner: Any, name: str, notify: Callable[..., object]) -> None:
    """Replace a function of a module or class by one that first calls `notify` with the same arguments."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        notify(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, wrapped)


#: Called with a call on files, a path (of a rename "old path -> new path") and, for "os.fsync", a file descriptor.
_Notify = Callable[[str, str, int], None]


def _watch_files(notify: _Notify) -> None:
    """Call `notify` before each call that creates, writes, syncs, renames or removes a file."""

    def hook(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            notify(call, _path(arguments[0]), -1)
        elif call in ("os.mkdir", "os.remove"):
            notify(call, _path(arguments[0], arguments[-1]), -1)
        elif call in _RENAME:
            notify(call, f"{_path(arguments[0])} -> {_path(arguments[1])}", -1)

    def synced(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        notify("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"), descriptor)

    sys.addaudithook(hook)
    call_before(os, "fsync", synced)


def _path(value: object, folder: int = -1) -> str:
    """Return a path of an audit event. folder: descriptor of the folder that it is relative to; -1: none."""
    path = os.fsdecode(value) if isinstance(value, str | bytes | os.PathLike) else ""
    return path if folder < 0 else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)


def _save_watch(fault: Fault) -> _Notify:
    """Strike at an event of the save of step `fault.number`."""
    seen: Counter[str] = Counter()

    def notify(call: str, path: str, descriptor: int) -> None:
        for name, event in SAVE_EVENTS.items():
            pattern = event.path.replace("FOLDER", _FOLDER.format(fault.number))
            if call in event.calls and (not event.after or seen[event.after]) and re.search(pattern, path):
                seen[name] += 1
                if name == fault.event and seen[name] == event.count:
                    if event.half:
                        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                    _strike(fault)

    return notify


def _full_disk(step: int) -> _Notify:
    """Limit the size of files from the save of `step` until that of another step."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails with an error, as on a full disk
    folder = re.compile("/" + _FOLDER.format(r"(\d+)") + "(/|$)")

    def notify(call: str, path: str, _: int) -> None:
        if call in ("os.mkdir", "open") and (found := folder.search(path)):
            limit = FULL_BYTES if int(found[1]) == step else soft
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    return notify


#: Limit of one start. A tiny run takes seconds, on a busy machine perhaps minutes.
TIMEOUT_SECONDS = 300.0
#: Time that the other ranks have to end when one has failed; then they are killed, as torchrun does.
GRACE_SECONDS = 60.0
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class RanksError(RuntimeError):
    """The ranks did not end, or did not print an expected line; the text has the end of their output."""


def start_fork_server() -> None:
    """Let the fork server import torch in the background. Later calls do nothing.

    Its copies have one thread each, since they share the cores, and no GPU, which cannot be forked.
    """
    package = str(Path(titanlite.__file__).resolve().parents[1])
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (package, before.get("PYTHONPATH"))))
    os.environ.update(NO_COLOR="1", CUDA_VISIBLE_DEVICES="")
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload(["titanlite.app", __name__])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """One start of `train.py` on `count` ranks of this machine. As a context manager it kills all ranks at its end.

    arguments: of `train.py`. console: file to which the output of all ranks is appended. main: module with the function
    `main` to call, such as "titanlite.cli" for a command of `titanlite`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        count: int,
        console: Path,
        fault: Fault = NO_FAULT,
        main: str = "titanlite.app",
    ) -> None:
        start_fork_server()
        console.touch()
        self.console, self._offset = console, console.stat().st_size
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launch = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.processes: list[ForkServerProcess] = []
        for rank in range(count):
            variables = {name: str(value) for name, value in {**launch, "RANK": rank, "LOCAL_RANK": rank}.items()}
            words = (main, list(arguments), variables, str(console), fault if rank == fault.rank else NO_FAULT)
            process = multiprocessing.get_context("forkserver").Process(target=_run_rank, args=words, daemon=True)
            process.start()
            self.processes.append(process)

    def __exit__(self, *_: object) -> None:
        self.kill()

    def send(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """Kill all ranks and wait for their ends."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def output(self) -> str:
        """Return the output of this start."""
        return _COLORS.sub("", self.console.read_bytes()[self._offset :].decode(errors="replace"))

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of the output, indented."""
        return "\n".join(f"    {line}" for line in self.output().splitlines()[-lines:])

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a pattern in the output. Raises RanksError when all ranks end without it, or after the timeout."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            ended = all(process.exitcode is not None for process in self.processes)
            if found := re.search(pattern, self.output(), re.MULTILINE):
                return found
            if ended or time.monotonic() > deadline:
                raise RanksError(f"the run {'ended' if ended else 'went on'} without {pattern!r}\n{self.tail()}")
            time.sleep(0.005)

    def wait(self, seconds: float = TIMEOUT_SECONDS, grace: float = GRACE_SECONDS) -> list[int]:
        """Return the exit codes by rank, negative for a signal. Raises RanksError after `seconds`."""
        deadline, failed = time.monotonic() + seconds, False
        while alive := [process.sentinel for process in self.processes if process.exitcode is None]:
            if not connection.wait(alive, max(0.0, deadline - time.monotonic())):
                self.kill()
                if not failed:
                    raise RanksError(f"the run did not end within {seconds:.0f} s\n{self.tail()}")
            elif not failed and any(process.exitcode for process in self.processes):
                deadline, failed = time.monotonic() + grace, True
        return [process.exitcode for process in self.processes]  # type: ignore[misc]


def train(
    arguments: Sequence[str], count: int, console: Path, fault: Fault = NO_FAULT, main: str = "titanlite.app"
) -> tuple[list[int], str]:
    """Run the ranks to their end. Return exit codes by rank, and the output. Raises RanksError."""
    with Ranks(arguments, count, console, fault, main) as ranks:
        return ranks.wait(), ranks.output()


def _run_rank(main: str, arguments: list[str], variables: dict[str, str], console: str, fault: Fault) -> NoReturn:
    """Be one rank, in its own process."""
    os.setsid()  # Ctrl-C at the terminal reaches the drill only, which then ends its ranks
    end_with_parent(signal.SIGKILL)
    output = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    sys.argv = ["train.py", *arguments]
    if fault != NO_FAULT:
        inject(fault)
    sys.exit(importlib.import_module(main).main())
