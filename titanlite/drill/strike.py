"""What happens to a rank from within, at a place that a signal from outside could not meet. No torch until then.

The places of a save are found by what it does to files (Python's audit events and fsync), not by functions of the
trainer's: it is the trainer as it is that dies there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

#: Places in a save at which a process can be killed, in their order; and what is on the disk then.
STAGES = {
    "before": "nothing yet",
    "shard begun": "an empty folder",
    "shard half": "half of a shard",
    "shards done": "all shards, no index",
    "index half": "half of the index",
    "manifest": "shards and index, no manifest",
    "manifest half": "half of a manifest under another name",
    "manifest named": "a whole manifest under another name",
    "published": "the new checkpoint; its manifest's name may not be durable",
    "purge": "the new checkpoint, the old one still there",
    "purge half": "the new checkpoint, half of the old one without a manifest",
}
#: The new checkpoint is there from this stage on.
PUBLISHED = ("published", "purge", "purge half")


@dataclass(frozen=True)
class Strike:
    """What is to happen to one rank.

    kill: SIGKILL at `stage` of the save of `step`. full: no file may grow beyond `FULL_BYTES` during that save, as on a
    full disk. nan: the gradient of `step` is not a number, once. die, term, pause: SIGKILL, SIGTERM or SIGSTOP when
    `step` begins. term in validation: SIGTERM when the validation after `step` begins. raise, hang: the loader raises
    `LOADER_ERROR`, or does not return, where it reads the text of `step`.
    """

    kind: Literal["none", "kill", "full", "nan", "die", "term", "pause", "term in validation", "raise", "hang"] = "none"
    step: int = 0
    rank: int = 0
    stage: str = ""
    #: Append a line for each step, {"step", "batch"} with the hash of this rank's batch, to FILE.rank; "" for none.
    batches: str = ""
    #: A file that a loader makes when it raises or hangs; it hangs for as long as there is this file.
    mark: str = ""


_SIGNALS = {"die": signal.SIGKILL, "term": signal.SIGTERM, "pause": signal.SIGSTOP}
#: Less than any shard of a toy, more than its records.
FULL_BYTES = 1 << 16
#: What a loader raises.
_LOADER_FAILURE = (errno.EIO, "Input/output error", "a shard of the drill")
LOADER_ERROR = str(OSError(*_LOADER_FAILURE))


def arm(strike: Strike, rank: int) -> None:
    """In the process of a rank, before it trains."""
    if strike.batches:
        _record_batches(f"{strike.batches}.{rank}")
    if rank != strike.rank:
        return
    if strike.kind == "kill":
        sys.addaudithook(_Killer(strike.stage, strike.step).event)
    elif strike.kind == "full":
        sys.addaudithook(_full_disk(strike.step))
    elif strike.kind == "nan":
        _spoil_gradient(strike.step)
    elif strike.kind == "term in validation":
        _signal_in_validation(strike.step, signal.SIGTERM)
    elif strike.kind in ("raise", "hang"):
        _break_loader(strike.step, Path(strike.mark), raises=strike.kind == "raise")
    elif strike.kind in _SIGNALS:
        _signal_in_step(strike.step, _SIGNALS[strike.kind])


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def _path(value: object) -> str:
    """An audit event's argument as a path; empty where it is none, as a descriptor's number."""
    return os.fsdecode(value) if isinstance(value, str | bytes | os.PathLike) else ""


class _Killer:
    """Kills this process at a stage of the save of one step."""

    def __init__(self, stage: str, step: int) -> None:
        if stage not in STAGES:
            raise ValueError(f"no stage {stage!r}: there are {', '.join(STAGES)}")
        self.stage = stage
        self.folder = f"/step-{step}"
        self._published = ""
        self._deleting: int | None = None
        self._deleted = 0
        self._fsync = os.fsync
        os.fsync = self.fsync  # type: ignore[assignment]  # the only call of a save that no audit event tells of

    def event(self, name: str, args: tuple[Any, ...]) -> None:
        """An audit hook: called before what it is about."""
        if name in ("os.mkdir", "open"):
            self._opened(name, _path(args[0]))
        elif name == "os.rename":
            self._renamed(_path(args[0]), _path(args[1]))
        elif name == "os.remove" and self._published and _path(args[0]).endswith("/manifest.json"):
            self._at("purge")
        elif name == "shutil.rmtree" and self._published:
            self._deleting = threading.get_ident()
        elif name == "os.remove" and self._deleting == threading.get_ident():
            self._deleted += 1
            if self._deleted == 2:
                self._at("purge half")

    def _at(self, stage: str) -> None:
        if stage == self.stage:
            _die()

    def _opened(self, name: str, path: str) -> None:
        if self._published and path == self._published:
            self._at("published")  # the folder is opened to make the rename durable
        file = os.path.basename(path)
        if name == "os.mkdir" and path.endswith(self.folder):
            self._at("before")
        if f"{self.folder}/" not in path:
            return
        if file.endswith(".distcp"):
            self._at("shard begun")
        elif file.startswith(".metadata"):
            self._at("shards done")
        elif file.startswith("manifest"):
            self._at("manifest")

    def _renamed(self, source: str, target: str) -> None:
        if target.endswith(f"{self.folder}/manifest.json"):
            self._at("manifest named")
            self._published = os.path.dirname(target)

    def fsync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        name = os.path.basename(path)
        for stage, there in (
            ("shard half", name.endswith(".distcp")),
            ("index half", name.startswith(".metadata")),
            ("manifest half", name.startswith("manifest")),
        ):
            if there and stage == self.stage and f"{self.folder}/" in path:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                _die()
        self._fsync(file)


def _full_disk(step: int) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook under which files stop growing from the save of `step` on, until that of another step begins."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error to handle, as a full disk's

    def event(name: str, args: tuple[Any, ...]) -> None:
        path = _path(args[0]) if name in ("os.mkdir", "open") else ""
        if found := re.search(r"/step-(\d+)(/|$)", path):
            limit = FULL_BYTES if int(found[1]) == step else soft
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    return event


def _signal_in_step(step: int, number: signal.Signals) -> None:
    """A signal to this process when it has the data of `step`."""
    from titanlite.step import TrainStep

    real = TrainStep.__call__

    def train_step(self: TrainStep, batches: Any, number_: int, *rest: Any) -> Any:
        if number_ == step:
            os.kill(os.getpid(), number)
        return real(self, batches, number_, *rest)

    TrainStep.__call__ = train_step  # type: ignore[method-assign, assignment]


def _signal_in_validation(step: int, number: signal.Signals) -> None:
    """A signal to this process when it is to fetch the first batch of the validation after `step`."""
    from titanlite.trainer import Trainer

    real = Trainer.validate

    def validate(self: Trainer) -> None:
        batches: Any = self.parts.validation

        def struck() -> Iterator[Any]:
            os.kill(os.getpid(), number)
            yield from batches

        if self.step == step:
            self.parts.validation = struck()  # type: ignore[assignment]
        try:
            real(self)
        finally:
            self.parts.validation = batches

    Trainer.validate = validate  # type: ignore[method-assign]


def _break_loader(step: int, mark: Path, raises: bool) -> None:
    """What reads this rank's text, ahead of the training or not, raises or hangs at `step`."""
    from titanlite.data.loader import TrainLoader
    from titanlite.data.skip_ranges import count

    real = TrainLoader.next_step

    def next_step(self: TrainLoader) -> Any:
        served = self.position - count(0, self.position, self.skip)
        if served // self.global_batch_size + 1 == step:
            mark.touch()
            if raises:
                raise OSError(*_LOADER_FAILURE)
            while mark.exists():
                time.sleep(0.05)
        return real(self)

    TrainLoader.next_step = next_step  # type: ignore[method-assign]


def _spoil_gradient(step: int) -> None:
    """The last of this rank's parameters gets a gradient of NaN in the first backward of `step`."""
    from titanlite.step import TrainStep

    real, done = TrainStep.__call__, False

    def train_step(self: TrainStep, batches: Any, number: int, *rest: Any) -> Any:
        nonlocal done
        if number != step or done:
            return real(self, batches, number, *rest)
        done = True
        weight: Any = list(self.model.parameters())[-1]
        hook = weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(float("nan")))
        try:
            return real(self, batches, number, *rest)
        finally:
            hook.remove()

    TrainStep.__call__ = train_step  # type: ignore[method-assign, assignment]


def _record_batches(path: str) -> None:
    """Write down what each step trains on."""
    from titanlite.data.loader import batch_hash
    from titanlite.step import TrainStep

    real = TrainStep.__call__

    def train_step(self: TrainStep, batches: Any, number: int, *rest: Any) -> Any:
        line = json.dumps({"step": number, "batch": batch_hash(batches)}) + "\n"
        with contextlib.suppress(OSError), open(path, "a") as file:
            file.write(line)
        return real(self, batches, number, *rest)

    TrainStep.__call__ = train_step  # type: ignore[method-assign, assignment]
