"""One run as a user starts it: torchrun, its output in a file, and an end that leaves no worker behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import titanlite
from titanlite.ladder.levels import LadderError

#: torchrun gives its workers 30 seconds to end.
_PATIENCE_SECONDS = 40
#: Lines of a failed run that are shown.
LAST_LINES = 15

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
#: Where torchrun begins to tell of the failure in its own words, after what the workers said.
_TORCHRUN = re.compile(r"[WE]\d{4} \S+ \d+ (\S*/)?torch/distributed/")


class Stopped(BaseException):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within, Ctrl-C, SIGTERM and a closed terminal raise Stopped, unless they were ignored before (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    taken = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command of a training run on this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    return [*torchrun, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "-m", "titanlite.app", *arguments]


def environment(device_type: str) -> dict[str, str]:
    """Of every run: this titanlite, output as it comes, on CPUs one thread per rank unless another number is set."""
    package = str(Path(titanlite.__file__).resolve().parents[1])
    found = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    if device_type == "cpu":
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


@dataclass(frozen=True)
class Machine:
    """What the runs are measured on."""

    #: "cpu" or "cuda".
    device_type: str
    #: The device's name, for people.
    device: str
    #: GPUs that torch sees.
    gpus: int
    #: Why the GPUs have no float8 products, and what to do; empty where they have them, and on a CPU.
    no_float8: tuple[str, str] | None = None

    def hardware(self, ranks: int) -> dict[str, Any]:
        return {"device": self.device, "ranks": ranks, "cores": os.cpu_count()}


_PROBE = """
import json, torch
from titanlite.config.errors import ConfigError
from titanlite.config.plans import Float8Plan
from titanlite.observe.flops import device_name
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
lacking = None
if gpus:
    from titanlite.parallel.float8 import check_float8
    try:
        check_float8(Float8Plan(enable=True))
    except ConfigError as error:
        lacking = error.problems[0].message, error.problems[0].hint
print(json.dumps([device_name(torch.device("cuda", 0) if gpus else torch.device("cpu")), gpus, lacking]))
"""


def probe() -> Machine:
    """This machine. Raises LadderError.

    It is looked at by a process of its own: one that has looked at a GPU keeps some of its memory.
    """
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, env=environment("cuda"))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise LadderError(f"torch cannot be asked for this machine's devices: {last}")
    name, gpus, lacking = json.loads(done.stdout.strip().splitlines()[-1])
    return Machine("cuda" if gpus else "cpu", name, gpus, tuple(lacking) if lacking else None)


def run(command: Sequence[str], console: Path, variables: Mapping[str, str]) -> int:
    """Run a command to its end, all its output in the file `console`; its exit code.

    Whatever interrupts the waiting ends the command and its workers first. Raises OSError.
    """
    with console.open("wb") as output:
        # A session of its own: Ctrl-C comes to us alone, and we end it in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(variables),
            start_new_session=True,
        )
        try:
            return process.wait()
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to end its workers; when that takes too long, or on a second signal, kill all of them."""
    process.terminate()
    try:
        process.wait(_PATIENCE_SECONDS)
    except BaseException as error:
        for worker in _children(process.pid):
            with contextlib.suppress(OSError):
                os.kill(worker, signal.SIGKILL)
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def last_lines(console: Path, count: int = LAST_LINES) -> list[str]:
    """The last lines that the run's ranks wrote, without torchrun's own account of the failure."""
    try:
        lines = _ESCAPE.sub("", console.read_text(encoding="utf-8", errors="replace")).splitlines()
    except OSError:
        return []
    own = next((i for i, line in enumerate(lines) if _TORCHRUN.match(line) and any(map(str.strip, lines[:i]))), None)
    said = [line for line in lines[:own] if line.strip()]
    return (said or lines)[-count:]
