"""Uploads of a run while it trains: each is a `titanlite push` of the lowest priority.

No step waits for an export or for the network, and no failure of an upload ends the run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.callbacks import Callback, RunEnd
from titanlite.checkpoint.manifest import step_of
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.contrib.hub.upload import MAIN
from titanlite.contrib.processes import end
from titanlite.runs import HUB
from titanlite.utils import is_dotted, logger

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint
    from titanlite.dist.signals import StopSignal
    from titanlite.trainer import Trainer

#: Seconds that rank 0 waits for uploads when the run is done.
_LONGEST_WAIT = 3600.0
#: Seconds that a push has to end when it is asked to.
_GRACE = 5.0


class HubUploads(Callback):
    """Uploads checkpoints as they are saved, from a thread of rank 0.

    model_name: of the config; a dotted one names code of the user.
    """

    def __init__(self, section: Checkpoint, folder: Path, model_name: str) -> None:
        self._section = section
        self._folder = folder / HUB
        self._trusts_code = is_dotted(model_name)
        self._pool = ThreadPoolExecutor(1, "titanlite-hub")
        self._newest: Future[None] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        #: Commands that have not succeeded.
        self._missing: list[str] = []

    def on_start(self, trainer: Trainer) -> None:
        # A killed push may have left files here.
        shutil.rmtree(self._folder, ignore_errors=True)

    def on_save(self, trainer: Trainer, step: int, folder: AnyPath, seconds: float) -> None:
        section = self._section
        is_last = step == trainer.steps
        is_multiple = not section.hub_every or step % section.hub_every == 0
        if is_last or is_multiple or section.is_milestone(step):
            words = ["titanlite", "push", str(folder), section.hub, "--branch", f"step-{step}"]
            if is_last:
                words += ["--branch", MAIN]
            if section.hub_dtype and step_of(folder) is not None:
                words += ["--dtype", section.hub_dtype]
            if self._trusts_code:
                words.append("--trust-code")
            self._missing.append(shlex.join(words))
            self._newest = self._pool.submit(self._push, words)

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        if end.state != "done":
            self._stop()

    def on_exit(self, stop: StopSignal) -> None:
        logger.info(f"waiting for uploads to {self._section.hub}, at most {_LONGEST_WAIT:.0f} s")
        deadline = time.monotonic() + _LONGEST_WAIT
        while self._newest is not None and not self._newest.done():
            if stop.requested or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            end(self._process, grace=_GRACE)
        if self._missing:
            lead = f"not uploaded to {self._section.hub}; these commands do it:"
            logger.warning("\n  ".join([lead, *self._missing]))
            self._missing = []

    def _push(self, words: list[str]) -> None:
        command = [sys.executable, "-m", *words, "--folder", str(self._folder)]
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
        text = shlex.join(words)
        if self._process.returncode:
            logger.warning(f"{text} failed: {said.rpartition('error: ')[2]}")
        else:
            self._missing.remove(text)
            logger.info(f"uploaded: {said.rpartition('https://')[2]}")
        self._process = None
