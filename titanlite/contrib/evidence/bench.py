"""Runs of one config as child processes, each in its own folder: trained, killed, copied."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from titanlite import exit_codes, torchrun
from titanlite.checkpoint.manifest import step_folder
from titanlite.contrib.processes import kill, last_lines, run, start, training_environment
from titanlite.runs.lines import read_lines

CONSOLE = "console.log"
#: Seconds between two looks at a run that is to be killed, and until it must have begun.
_LOOK = 0.002
_SECONDS = 900.0


class RunFailed(RuntimeError):
    """A child ended with another exit code than 0."""

    def __init__(self, name: str, code: int, console: Path) -> None:
        lines = last_lines(console, 3)
        super().__init__(f"{name} ended with exit code {code}: {' '.join(lines)}")
        self.is_refused = code == exit_codes.CONFIG


class Bench:
    """Where the runs of a config are, and how they start."""

    def __init__(self, folder: Path, config: Path, ranks: int, device: str) -> None:
        self.folder = folder
        self.config = config
        self.ranks = ranks
        self._environment: Mapping[str, str] = training_environment(device)

    def train(self, name: str, *flags: str, ranks: int | None = None) -> Path:
        """Train a run to its end; return its folder. Raises RunFailed."""
        own = self.folder / name
        self._finish(name, self._words(own, flags), ranks)
        return own

    def evaluate(self, checkpoint: Path) -> Path:
        """Measure a checkpoint by `titanlite eval`; return the file with its output."""
        words = ["eval", str(checkpoint), "--json"]
        return self._finish("evaluation", words, None)

    def train_until_killed(self, name: str, steps: int) -> Path:
        """Start a run, and kill all its ranks at once when it has logged so many steps.

        Raises RunFailed where it has ended before.
        """
        own = self.folder / name
        console = self._console(name)
        child = start(self._command(self._words(own, ()), None), console, self._environment)
        deadline = time.monotonic() + _SECONDS
        try:
            while child.poll() is None and len(read_lines(own / "metrics.jsonl", [])) < steps:
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK)
        finally:
            kill(child)
        if child.returncode >= 0:
            raise RunFailed(name, child.returncode, console)
        return own

    def copy(self, source: Path, step: int, name: str) -> Path:
        """Copy one checkpoint of a run to a new run; return that checkpoint's folder."""
        new = step_folder(self.folder / name / "checkpoint", step)
        shutil.copytree(step_folder(source / "checkpoint", step), new)
        return new

    def _words(self, own: Path, flags: Sequence[str]) -> list[str]:
        files = ["--job.config_file", str(self.config)]
        return ["train", *files, f"--job.dump_folder={own}", *flags]

    def _command(self, words: Sequence[str], ranks: int | None) -> list[str]:
        ranks = ranks or self.ranks
        if ranks > 1:
            return torchrun.command(ranks, words)
        return [sys.executable, "-m", "titanlite", *words]

    def _finish(self, name: str, words: Sequence[str], ranks: int | None) -> Path:
        console = self._console(name)
        code = run(self._command(words, ranks), console, environment=self._environment)
        if code:
            raise RunFailed(name, code, console)
        return console

    def _console(self, name: str) -> Path:
        self.folder.joinpath(name).mkdir(parents=True, exist_ok=True)
        return self.folder / name / CONSOLE
