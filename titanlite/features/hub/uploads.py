"""What a run uploads while it trains: each upload is a `titanlite push` with the lowest priority.

A thread of rank 0 starts the processes, one at a time. A failed upload is told once, and tried
again later. Nothing here delays a step or ends a run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import titanlite
from titanlite.callbacks import Callback, RunEnd
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf_files import HF_CONFIG
from titanlite.checkpoint.manifest import FILE, hf_folder, parse_manifest, step_folder, steps_in
from titanlite.checkpoint.milestones import is_milestone
from titanlite.checkpoint.paths import AnyPath
from titanlite.features.hub.branches import TRACKER, keep_id, own_id
from titanlite.features.hub.company import ALIVE, DONE
from titanlite.features.hub.progress import PATIENCE, Progress
from titanlite.features.hub.record import pushed, waiting
from titanlite.runs import HUB
from titanlite.runs.read import RunError, read_run
from titanlite.utils import counted, human_time, is_dotted, logger, new_file

if TYPE_CHECKING:
    from torch.distributed import Store

    from titanlite.config.sections import Checkpoint
    from titanlite.dist.signals import StopSignal
    from titanlite.trainer import Trainer

#: Seconds until a failed upload is tried again; doubled each time, up to the second.
_FIRST_WAIT = 60.0
_LONGEST_WAIT = 1800.0
#: While so many exports wait for another try, no other checkpoint is exported.
_MOST_EXPORTS = 2
#: Seconds that a push has to end when it is asked to.
_GRACE = 5.0
#: How often the end of a run looks whether it was asked to stop, in seconds.
_LOOK = 0.2
#: How often it tells how far the uploads are, in seconds.
_TELL_SECONDS = 30.0
#: Variables of a launcher, which mean nothing to a push.
_OF_LAUNCHERS = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "TITANLITE_")
_OF_RANKS = ("RANK", "WORLD_SIZE")
_LOG = "push.log"
MAIN = "main"


@dataclass
class Upload:
    """A checkpoint that is to be uploaded."""

    step: int
    branches: tuple[str, ...]
    failures: int = 0
    #: By `time.monotonic`.
    due: float = 0.0
    problem: str = ""

    @property
    def words(self) -> list[str]:
        """What names it to `titanlite push`."""
        found = ["--step", str(self.step)]
        for branch in self.branches:
            found += ["--branch", branch]
        return found


class HubUploads(Callback):
    """Uploads checkpoints as they are saved, from rank 0.

    folder: of the run. root: of its checkpoints. model_name: of the config; a dotted one names code
    of the user. store: tells other machines that this one uploads.
    """

    def __init__(
        self,
        section: Checkpoint,
        folder: Path,
        root: AnyPath,
        model_name: str,
        store: Store | None,
    ) -> None:
        self._section = section
        self._repository = section.hub
        self._folder = folder
        self._root = root
        self._trusts_code = is_dotted(model_name)
        self._store = store
        self._changed = threading.Condition()
        self._waiting: list[Upload] = []
        self._current: Upload | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: list[Upload] = []
        #: The run is over: nothing is tried later.
        self._ending = False
        self._stopped = False
        #: Checkpoints of earlier attempts are still looked for.
        self._is_looking = False
        self._last_step = 0

    # Moments of the run

    def on_start(self, trainer: Trainer) -> None:
        self._last_step = trainer.steps
        loaded = trainer.loaded
        resumed = loaded is not None and loaded.origin == "resume"
        done = trainer.step if resumed else 0
        self._name_run(trainer, loaded.folder if loaded is not None and resumed else None)
        self._is_looking = done > 0
        thread = threading.Thread(
            target=self._work, args=(done,), name="titanlite-hub", daemon=True
        )
        thread.start()

    def _name_run(self, trainer: Trainer, folder: AnyPath | None) -> None:
        """Let manifests tell whose checkpoints they are: the run may go on without this folder.

        folder: of the checkpoint that the run resumes from; None: it begins.
        """
        manifest = None
        record = None
        with contextlib.suppress(CheckpointError, RunError, OSError):
            record = read_run(self._folder, partial=True)
            manifest = parse_manifest(folder) if folder is not None else None
        name = own_id(self._folder if folder is not None else None, manifest, record)
        try:
            keep_id(self._folder, name)
        except OSError as error:
            logger.warning(f"cannot note the name of the run for {self._repository}: {error}")
        others = trainer.parts.trackers
        trainer.parts = replace(trainer.parts, trackers=lambda: {**others(), TRACKER: name})

    def on_save(self, trainer: Trainer, step: int, folder: AnyPath, seconds: float) -> None:
        self._last_step = trainer.steps
        if self._is_wanted(step):
            self._add(step)

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """End the uploads and name the missing ones; those of a run that is done go on."""
        with self._changed:
            self._ending = True
            for upload in self._waiting:
                upload.due = 0.0
            self._changed.notify_all()
        if end.state == "done":
            atexit.register(self._wait)
            return
        self._stop()
        self._tell(end.state)

    def on_exit(self, stop: StopSignal) -> None:
        self._wait(lambda: stop.requested)

    def _wait(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait for the uploads as long as they make progress, and name the missing ones."""
        atexit.unregister(self._wait)
        progress = Progress(self._folder / HUB / _LOG)
        tell = time.monotonic()
        while (left := self._left()) and not is_stopped():
            self._show(ALIVE)
            process = self._process
            if progress.stands_still(None if process is None else process.pid, left):
                logger.warning(f"the upload has done nothing for {human_time(PATIENCE)}: it ends")
                break
            if time.monotonic() >= tell:
                tell += _TELL_SECONDS
                text = f"waiting for {counted(left, 'uploads')} to {self._repository}"
                logger.info(": ".join(filter(None, [text, progress.line()])))
            with self._changed:
                self._changed.wait(_LOOK)
        self._stop()
        self._tell("done")
        self._show(DONE)

    def _show(self, sign: str) -> None:
        if self._store is not None:
            # Of a store whose machine has left.
            with contextlib.suppress(RuntimeError):
                self._store.add(sign, 1)

    def _left(self) -> int:
        """Return the number of uploads that are not done, or not found yet."""
        with self._changed:
            return len(self._waiting) + (self._current is not None) + self._is_looking

    def _stop(self) -> None:
        """End the push under way, and the thread."""
        with self._changed:
            self._stopped = True
            process = self._process
            self._changed.notify_all()
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()

    def _tell(self, state: str) -> None:
        """Name the missing uploads, and the command for them. state: of the run at its end."""
        with self._changed:
            left = [*self._failed, *self._waiting]
            if self._current is not None:
                left.insert(0, self._current)
        if not left:
            return
        lines = [f"not uploaded to {self._repository}:"]
        for upload in sorted(left, key=lambda one: one.step):
            lines.append(f"  {shlex.join(self.command(upload))}")
            if upload.problem:
                lines[-1] += f"  # {upload.problem}"
        if state == "preempted":
            lines[0] = f"not uploaded to {self._repository}, and the resumed run goes on with it:"
        logger.warning("\n".join(lines))

    # What is uploaded

    def command(self, upload: Upload) -> list[str]:
        """Return the command of an upload, for people too."""
        section = self._section
        words = ["titanlite", "push", str(self._folder), self._repository, *upload.words]
        if section.hub_private:
            words.append("--private")
        is_last = upload.step == self._last_step
        if not (is_last and section.last_save_in_hf) and section.hub_dtype:
            words += ["--dtype", section.hub_dtype]
        if section.hub_ema and not (is_last and section.model_weights_only):
            words.append("--ema")
        if self._trusts_code:
            words.append("--trust-code")
        return words

    def _is_wanted(self, step: int) -> bool:
        every = self._section.hub_every
        if step == 0:
            return False
        is_multiple = not every or step % every == 0
        is_kept = is_milestone(step, self._section.milestones)
        return is_multiple or is_kept or step == self._last_step

    def _branches(self, step: int) -> tuple[str, ...]:
        branch = f"step-{step}"
        return (branch, MAIN) if step == self._last_step else (branch,)

    def _add(self, step: int) -> None:
        with self._changed:
            # A step that was computed again after a rollback.
            self._waiting = [upload for upload in self._waiting if upload.step != step]
            self._waiting.append(Upload(step, self._branches(step)))
            self._changed.notify_all()

    def _add_earlier(self, done: int) -> None:
        """Add checkpoints of earlier attempts that are not uploaded. done: steps of them."""
        work = self._folder / HUB
        known = pushed(work, self._repository)
        saved = waiting(work)
        for step in filter(self._is_wanted, steps_in(self._root)):
            # Of one that cannot be read nothing can be uploaded.
            with contextlib.suppress(CheckpointError, OSError):
                saved[step] = parse_manifest(step_folder(self._root, step))
        for step, manifest in sorted(saved.items()):
            if step > done:
                continue
            branches = self._branches(step)
            if any((step, manifest.created, branch) not in known for branch in branches):
                self._add(step)

    # The thread

    def _work(self, done: int) -> None:
        try:
            if done:
                self._add_earlier(done)
                self._is_looking = False
            while (upload := self._next()) is not None:
                self._finish(upload, self._push(upload))
        # Whatever it is, training goes on.
        except Exception as error:
            logger.error(f"nothing more is uploaded to {self._repository}: {error}")
            with self._changed:
                self._is_looking = False
                if self._current is not None:
                    self._waiting.insert(0, self._current)
                    self._current = None
                self._failed += self._waiting
                self._waiting = []

    def _next(self) -> Upload | None:
        """Return the next upload when its time has come; None: the run is over."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                now_possible = self._possible()
                due = [upload for upload in now_possible if upload.due <= now]
                if due:
                    self._waiting.remove(due[0])
                    self._current = due[0]
                    return due[0]
                times = [upload.due - now for upload in now_possible]
                self._changed.wait(min(times) if times else None)
        return None

    def _possible(self) -> list[Upload]:
        """Return the uploads that may be tried: exports of those that fail must not fill the disk
        on which checkpoints are saved.
        """
        exported = waiting(self._folder / HUB)
        failing = [upload for upload in self._waiting if upload.failures]
        if sum(upload.step in exported for upload in failing) < _MOST_EXPORTS:
            return self._waiting
        return [upload for upload in self._waiting if upload.step in exported]

    def _push(self, upload: Upload) -> str:
        """Upload a checkpoint; return why it could not be, "" where it was."""
        if not self._is_there(upload.step):
            return "its checkpoint was deleted before its turn: see checkpoint.hub_every"
        began = time.monotonic()
        log = self._folder / HUB / _LOG
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            code = self._run(upload, log)
        except OSError as error:
            return f"no process can be started: {error}"
        if code == 0:
            branches = " and ".join(upload.branches)
            took = human_time(time.monotonic() - began)
            logger.info(f"step {upload.step} is on {self._repository}, {branches}, after {took}")
            return ""
        return _reason(log, code)

    def _run(self, upload: Upload, log: Path) -> int:
        """Run `titanlite push` to its end; return its exit code. Raises OSError."""
        words = [sys.executable, "-m", *self.command(upload), "--of-run", str(os.getpid())]
        if MAIN not in upload.branches:
            # The comparison reads all weights twice more, beside the training.
            words.append("--no-verify")
        if (nice := shutil.which("nice")) is not None:
            words = [nice, "-n", "19", *words]
        with new_file(log) as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )
        with self._changed:
            self._process = process
            if self._stopped:
                process.terminate()
        code = process.wait()
        with self._changed:
            self._process = None
        return code

    def _is_there(self, step: int) -> bool:
        """Return whether there is something to upload; also where a store does not answer."""
        try:
            if (step_folder(self._root, step) / FILE).is_file():
                return True
            if (hf_folder(self._root, step) / HF_CONFIG).is_file():
                return True
        except OSError:
            return True
        return step in waiting(self._folder / HUB)

    def _finish(self, upload: Upload, problem: str) -> None:
        """Take note of the end of an upload, and try it later if it failed."""
        with self._changed:
            # One that the end of the run cut short stays where it is, to be told.
            if not self._stopped:
                upload.problem = problem
                if problem:
                    self._retry(upload)
            if not (self._stopped and problem):
                self._current = None
            self._changed.notify_all()

    def _retry(self, upload: Upload) -> None:
        upload.failures += 1
        is_gone = not self._is_there(upload.step)
        if self._ending or is_gone:
            self._failed.append(upload)
        else:
            wait = min(_FIRST_WAIT * 2 ** (upload.failures - 1), _LONGEST_WAIT)
            upload.due = time.monotonic() + wait
            self._waiting.append(upload)
        if upload.failures == 1:
            later = "" if self._ending or is_gone else "; it is tried again later"
            logger.warning(
                f"step {upload.step} was not uploaded to {self._repository}: {upload.problem}. "
                f"Training continues{later}"
            )


def _environment() -> dict[str, str]:
    """Return the variables of a push: those of this process, without ranks and GPUs."""
    found = {}
    for name, value in os.environ.items():
        if not name.startswith(_OF_LAUNCHERS) and name not in _OF_RANKS:
            found[name] = value
    package = str(Path(titanlite.__file__).resolve().parents[1])
    search: Sequence[str] = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **found,
        "PYTHONPATH": os.pathsep.join(search),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_COLOR": "1",
    }


def _reason(log: Path, code: int) -> str:
    """Return what a push said last, without its lead."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        said = errors or [line for line in lines if line.strip()]
        if said:
            return said[-1].removeprefix("error: ").strip()
    if code < 0:
        return f"titanlite push was ended by {signal.Signals(-code).name}"
    return f"titanlite push ended with {code}"
