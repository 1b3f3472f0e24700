"""Faults inside the process of one rank, for tests and benchmarks.

A fault in a save names a call on files, not a function of the trainer. Python reports these calls
as audit events (docs.python.org/3/library/audit_events.html); only `os.fsync` has none, so it is
wrapped.
"""

from __future__ import annotations

import importlib
import os
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class SaveEvent(NamedTuple):
    """A point in a save: just before a call on a file."""

    #: Audit event, or "os.fsync".
    call: str
    #: Pattern of the path, for a rename of "old path -> new path". STEP stands for the step of the
    #: save.
    path: str
    #: The event that must have come before.
    after: str = ""
    #: Number of the call among those that match.
    nth: int = 1


#: Points at which a process can be killed, in the order of a save. At a name with "half", half of
#: the file is cut off first. So the rest seems not written.
SAVE_EVENTS = {
    "folder made": SaveEvent("os.mkdir", r"/step-STEP$"),
    "shard half": SaveEvent("os.fsync", r"/step-STEP/[^/]*\.distcp"),
    "index half": SaveEvent("os.fsync", r"/step-STEP/\.metadata"),
    "publish": SaveEvent("os.rename", r"-> .*/step-STEP/manifest\.json$"),
    "published": SaveEvent("os.fsync", r"/(step-\d+|checkpoint)$", after="publish"),
    # An old checkpoint's folder gets another name first, then its files go.
    "prune": SaveEvent("os.rename", r"/step-\d+ -> .*/\.deleted-step-\d+", after="publish"),
    "prune half way": SaveEvent("os.remove", r"/\.deleted-step-\d+[^/]*/", after="prune", nth=2),
}
#: The new checkpoint is there at these events.
PUBLISHED = ("published", "prune", "prune half way")
#: The same of a local save, whose folder is `rank-R/step-N`.
LOCAL_EVENTS = {
    "local part half": SaveEvent("os.fsync", r"/rank-\d+/step-STEP/\w+\.safetensors"),
    "local publish": SaveEvent("os.rename", r"-> .*/rank-\d+/step-STEP/manifest\.json$"),
    "local published": SaveEvent("os.fsync", r"/rank-\d+/step-STEP$", after="local publish"),
    "local prune": SaveEvent(
        "os.remove", r"/rank-\d+/step-\d+/manifest\.json", after="local publish"
    ),
}
_EVENTS = {**SAVE_EVENTS, **LOCAL_EVENTS}
#: On a full disk files cannot grow beyond this. It is less than any shard of a tiny model, and more
#: than its records.
FULL_BYTES = 1 << 16


@dataclass(frozen=True)
class Fault:
    """A fault in one rank; the default is none.

    kill: the process gets SIGKILL. full: the disk is full. memory: the backward, or the start of
    `build`, runs out of the GPU's memory.
    """

    kind: Literal["none", "kill", "full", "memory"] = "none"
    #: When it strikes: at a key of SAVE_EVENTS or LOCAL_EVENTS (kill), in a "save" (full), in a
    #: "step" that has its batches (kill, memory), in "build" (memory).
    event: str = ""
    #: Number of the step.
    number: int = 0
    rank: int = 0


NO_FAULT = Fault()


def inject(fault: Fault) -> None:
    """Prepare this process for a fault, before it trains."""

    def look(step: int, model: Any, _: object) -> None:
        if step == fault.number:
            _strike(fault, model)

    if fault.event in _EVENTS:
        _watch_files(_save_watch(fault))
    elif fault.event == "save":
        _watch_files(_full_disk(fault.number))
    elif fault.event == "step":
        before_steps(look)
    elif fault.event == "build":
        call_before(
            importlib.import_module("titanlite.assembly.rank_checks"), "check_ranks", _run_out
        )
    else:
        raise ValueError(f"unknown event {fault.event!r}")


def _strike(fault: Fault, model: Any = None) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "memory":
        list(model.parameters())[-1].register_post_accumulate_grad_hook(_run_out)


def _run_out(*_: object, **__: object) -> None:
    from torch import OutOfMemoryError

    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def call_before(owner: Any, name: str, notify: Callable[..., object]) -> None:
    """Replace a function of a module or class by one that first calls `notify` with the same
    arguments.
    """
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        notify(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, wrapped)


def before_steps(notify: Callable[[int, Any, Any], object]) -> None:
    """Call notify(step, model, batches) before each training step of this process, when its batches
    are there.
    """
    from titanlite.step import TrainStep

    def adapted(train_step: TrainStep, batches: Any, step: int, *_: Any) -> None:
        notify(step, train_step.model, batches)

    call_before(TrainStep, "__call__", adapted)


#: Called with a call on files, a path (of a rename "old path -> new path") and, for "os.fsync", a
#: file descriptor.
_Notify = Callable[[str, str, int], None]


def _watch_files(notify: _Notify) -> None:
    """Call `notify` before each call that creates, writes, syncs, renames or removes a file."""

    def hook(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "open":
            flags = arguments[2]
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                notify(call, str(arguments[0]), -1)
        elif call in ("os.mkdir", "os.remove"):
            # The last argument is the descriptor of a folder that the path is below, or -1.
            folder = "" if arguments[-1] < 0 else os.readlink(f"/proc/self/fd/{arguments[-1]}")
            notify(call, os.path.join(folder, str(arguments[0])), -1)
        elif call == "os.rename":
            notify(call, f"{arguments[0]} -> {arguments[1]}", -1)

    def synced(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        notify("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"), descriptor)

    sys.addaudithook(hook)
    call_before(os, "fsync", synced)


def _save_watch(fault: Fault) -> _Notify:
    """Strike at an event of the save of step `fault.number`."""
    seen: Counter[str] = Counter()

    def notify(call: str, path: str, descriptor: int) -> None:
        for name, event in _EVENTS.items():
            pattern = event.path.replace("STEP", str(fault.number))
            is_time = not event.after or seen[event.after] > 0
            if call == event.call and is_time and re.search(pattern, path):
                seen[name] += 1
                if name == fault.event and seen[name] == event.nth:
                    if name.endswith(" half"):
                        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                    _strike(fault)

    return notify


def _full_disk(step: int) -> _Notify:
    """Limit the size of files from the save of `step` until that of another step."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A write then fails with an error, as on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def notify(call: str, path: str, _: int) -> None:
        found = re.search(r"/step-(\d+)/", path)
        if call == "open" and found:
            limit = FULL_BYTES if int(found[1]) == step else soft
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    return notify
