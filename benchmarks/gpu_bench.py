"""How benchmarks/gpu.py runs a command: output in a file, an end within the budget, and nothing
left on the GPU.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.contrib import processes

ROOT = Path(__file__).resolve().parents[1]
#: What a command has to end its own children. A ladder gives torchrun 40 seconds, torchrun its
#: workers 30.
PATIENCE_SECONDS = 60
#: With less of the budget left nothing is begun.
LEAST_SECONDS = 5


class Failed(Exception):
    """A piece has no figures; the message tells why."""


class OutOfTime(Exception):
    """The budget is spent; what the piece has so far stays."""


@dataclass
class Result:
    """What a piece found."""

    rows: list[dict[str, Any]]
    #: Why some of it is missing.
    problems: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """The settings of one call, and its clock."""

    folder: Path
    #: Tiny shapes.
    toy: bool
    #: Time by time.monotonic; infinite without a budget.
    deadline: float
    #: What `gpu_probe.py` says of the device: `gpu`, `memory_bytes`, `peak_flops` and what figures
    #: hold for.
    about: Mapping[str, Any] = field(default_factory=dict)
    #: Real shapes, two blocks of them and few steps.
    dry: bool = False
    #: Runs of each level of a ladder; None: as many as the ladder wants.
    repeats: int | None = None

    @property
    def short(self) -> bool:
        """Whether it measures nothing."""
        return self.toy or self.dry

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.deadline - time.monotonic()

    def call(self, command: Sequence[str], log: Path) -> int:
        """Run a command with its output in `log`; its exit code.

        Raises OutOfTime when the budget ends it.

        Whatever ends the waiting, the command is asked first to end what it has started.
        """
        if self.left < LEAST_SECONDS:
            raise OutOfTime
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Unlike SIGTERM, SIGINT lets a piece end its own children.
            return processes.run(
                command,
                log,
                folder=ROOT,
                seconds=None if self.deadline == float("inf") else max(self.left, 0.1),
                ask=signal.SIGINT,
                grace=PATIENCE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise OutOfTime from None


def last_line(log: Path) -> str:
    """What a command said why it failed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if line.startswith("error:")), None)
    if start is not None:
        return " ".join(lines[start:])[:400]
    wrong = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*Error\b", line)]
    return (wrong or lines or ["no output"])[-1][:400]


def out_of_memory(text: str) -> bool:
    """Whether a command's output says that the GPU has too little memory."""
    return "out of memory" in text.lower() or "OutOfMemoryError" in text


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(aside, path)
