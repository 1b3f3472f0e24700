"""Runs of one config as child processes, each in its own folder: trained, killed, continued."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite import torchrun
from titanlite.contrib.processes import kill, last_lines, run, start
from titanlite.runs.metrics_jsonl import FILE
from titanlite.runs.read_jsonl import read_lines

CONSOLE = "console.log"
#: Seconds between two looks at a run that is to be killed.
_LOOK = 0.002


class RunFailed(RuntimeError):
    """A child did not end as it should; the text has its last lines."""

    def __init__(self, code: int, console: Path) -> None:
        lines = "\n".join(last_lines(console, 3))
        super().__init__(f"{console} ends with exit code {code}: {lines}")
        self.code = code

    @property
    def exit_code(self) -> int:
        return self.code


@dataclass(frozen=True)
class Bench:
    """A config and its runs in one folder."""

    folder: Path
    ranks: int
    environment: dict[str, str]

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    def train(self, name: str, *flags: str, ranks: int = 0) -> Path:
        """Return the run's folder. Raises RunFailed."""
        self.finish(name, self._words(name, flags), ranks)
        return self.folder / name

    def killed(self, name: str, steps: int) -> Path:
        """Kill all ranks of a run at once when it has logged so many steps. Raises RunFailed."""
        console = self._console(name)
        child = start(torchrun.command(self.ranks, self._words(name)), console, self.environment)
        try:
            while child.poll() is None and len(read_lines(console.with_name(FILE), [])) < steps:
                time.sleep(_LOOK)
        finally:
            kill(child)
        if child.returncode >= 0:
            raise RunFailed(child.returncode, console)
        return console.parent

    def saved(self, name: str, step: int) -> Path:
        """Return the folder of a run's checkpoint."""
        return self.folder / name / "checkpoint" / f"step-{step}"

    def go_on(self, source: str, step: int, name: str, *flags: str, ranks: int = 0) -> Path:
        """Train from a copy of another run's checkpoint, as `train` does."""
        shutil.copytree(self.saved(source, step), self.saved(name, step))
        return self.train(name, *flags, ranks=ranks)

    def finish(self, name: str, words: Sequence[str], ranks: int = 0) -> str:
        """Return a command's output. Raises RunFailed."""
        console = self._console(name)
        command = torchrun.command(ranks or self.ranks, words)
        code = run(command, console, environment=self.environment)
        if code:
            raise RunFailed(code, console)
        return console.read_text()

    def _words(self, name: str, flags: Sequence[str] = ()) -> list[str]:
        own = f"--job.dump_folder={self.folder / name}"
        return ["train", "--job.config_file", str(self.config), own, *flags]

    def _console(self, name: str) -> Path:
        console = self.folder / name / CONSOLE
        console.parent.mkdir(exist_ok=True)
        return console
