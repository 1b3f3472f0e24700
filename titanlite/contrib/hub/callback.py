"""Uploads of a run while it trains: each is a `titanlite push` of the lowest priority, so no step
waits for an export or for the network, and no failure of them ends the run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titanlite.callbacks import Callback, RunEnd
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import last_hf_step, step_of, steps_in
from titanlite.checkpoint.milestones import is_milestone
from titanlite.checkpoint.paths import AnyPath
from titanlite.contrib.hub.upload import MAIN, open_repository, titles
from titanlite.contrib.hub.weights import commit_title, weights_at
from titanlite.runs import HUB
from titanlite.utils import is_dotted, logger

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint
    from titanlite.dist.signals import StopSignal
    from titanlite.trainer import Trainer

#: Tries of an upload that fails, before the end of the run.
_TRIES = 3
#: Seconds that rank 0 waits for uploads when the run is done.
_LONGEST_WAIT = 3600.0
#: Seconds that a push has to end when it is asked to.
_GRACE = 5.0


class Upload(NamedTuple):
    """A checkpoint that is to be on the hub."""

    step: int
    folder: AnyPath
    title: str
    branches: tuple[str, ...]


class HubUploads(Callback):
    """Uploads checkpoints as they are saved, from a thread of rank 0.

    folder: of the run. root: of its checkpoints. model_name: of the config; a dotted one names code
    of the user.
    """

    def __init__(self, section: Checkpoint, folder: Path, root: AnyPath, model_name: str) -> None:
        self._section = section
        self._folder = folder
        self._root = root
        self._trusts_code = is_dotted(model_name)
        self._pool = ThreadPoolExecutor(1, "titanlite-hub")
        self._newest: Future[None] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self._last_step = 0
        self._arrived: set[Upload] = set()
        self._failures: Counter[Upload] = Counter()

    def on_start(self, trainer: Trainer) -> None:
        # A killed push may have left files here.
        shutil.rmtree(self._folder / HUB, ignore_errors=True)
        self._last_step = trainer.steps
        self._submit()

    def on_save(self, trainer: Trainer, step: int, folder: AnyPath, seconds: float) -> None:
        self._last_step = trainer.steps
        self._submit()

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        if end.state == "done":
            self._failures.clear()
            self._submit()
        else:
            self._stop()

    def on_exit(self, stop: StopSignal) -> None:
        logger.info(f"waiting for uploads to {self._section.hub}, at most {_LONGEST_WAIT:.0f} s")
        deadline = time.monotonic() + _LONGEST_WAIT
        while self._newest is not None and not self._newest.done():
            if stop.requested or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        self._stop()

    def _submit(self) -> None:
        self._newest = self._pool.submit(self._upload_all)

    def _stop(self) -> None:
        """End the push under way, and tell what is missing on the hub."""
        self._stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
        missing: list[Upload] = []
        with suppress(OSError):
            missing = [one for one in self._wanted() if one not in self._arrived]
        if missing:
            lines = [shlex.join(self._command(upload)) for upload in missing]
            lead = f"not uploaded to {self._section.hub}; a resumed run, or these commands, do it:"
            logger.warning("\n  ".join([lead, *lines]))

    def _wanted(self) -> list[Upload]:
        """Return all checkpoints that are to be uploaded, and are there."""
        found = []
        every = self._section.hub_every
        for step in sorted({*steps_in(self._root), last_hf_step(self._root)}):
            is_last = step == self._last_step
            is_multiple = not every or step % every == 0
            if step > 0 and (
                is_multiple or is_last or is_milestone(step, self._section.milestones)
            ):
                # One that cannot be read cannot be uploaded.
                with suppress(CheckpointError):
                    folder = weights_at(self._root, step)
                    branches = (f"step-{step}", MAIN) if is_last else (f"step-{step}",)
                    found.append(Upload(step, folder, commit_title(folder), branches))
        return found

    # In the thread

    def _upload_all(self) -> None:
        """Upload what is wanted and not on the hub. The next checkpoint tries again what fails."""
        repository = self._section.hub
        try:
            wanted = [one for one in self._wanted() if one not in self._arrived]
            if not wanted:
                return
            api = open_repository(repository, self._section.hub_private)
            for upload in wanted:
                if self._stopped or self._failures[upload] >= _TRIES:
                    continue
                known = [upload.title in titles(api, repository, one) for one in upload.branches]
                problem = "" if all(known) else self._push(upload)
                if problem:
                    self._failures[upload] += 1
                    logger.warning(f"{upload.title} is not on {repository}: {problem}")
                else:
                    self._arrived.add(upload)
                    branches = ", ".join(upload.branches)
                    logger.info(f"{upload.title}, is on {repository}, {branches}")
        # Whatever it is, training goes on.
        except Exception as error:
            logger.warning(f"nothing was uploaded to {repository}, training continues: {error}")

    def _command(self, upload: Upload) -> list[str]:
        """Return the command of an upload, for people too."""
        section = self._section
        words = ["titanlite", "push", str(self._folder), section.hub, "--step", str(upload.step)]
        for branch in upload.branches:
            words += ["--branch", branch]
        is_exported = step_of(upload.folder) is None
        if section.hub_dtype and not is_exported:
            words += ["--dtype", section.hub_dtype]
        is_average = MAIN in upload.branches and section.model_weights_only
        if section.hub_ema and not (is_exported or is_average):
            words.append("--ema")
        if self._trusts_code:
            words.append("--trust-code")
        return words

    def _push(self, upload: Upload) -> str:
        """Run `titanlite push` to its end; return why it failed, "" if it did not."""
        command = [sys.executable, "-m", *self._command(upload)]
        command += ["--folder", str(self._folder / HUB)]
        if nice := shutil.which("nice"):
            command = [nice, "-n", "19", *command]
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **quiet, "CUDA_VISIBLE_DEVICES": ""},
        )
        if self._stopped:
            self._process.terminate()
        said = self._process.communicate()[0].strip()
        code = self._process.returncode
        self._process = None
        return f"{said.rpartition('error: ')[2]} (code {code})" if code else ""
