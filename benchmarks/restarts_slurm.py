"""What a restart takes under Slurm: from the SIGKILL of one rank to the first step after it.

    python benchmarks/restarts_slurm.py --out benchmarks/results/restarts_slurm

A real Slurm with eight nodes runs on this machine, as in tests/launch (root, slurmctld, slurmd and
munge). Jobs of `titanlite launch slurm` train the debug model on two nodes with one rank each, one
of them with a spare node. Both start their ranks again in their allocation.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.launch.slurm_cluster import Cluster, cluster, missing  # noqa: E402
from tests.launch.slurm_jobs import processes, read_log, submit, until_step  # noqa: E402
from titanlite.runs.jsonl import read_metrics  # noqa: E402
from titanlite.utils import read_lines  # noqa: E402

#: Kind of job → its flags, and what the log says when it begins again.
JOBS: dict[str, tuple[list[str], str]] = {
    "without a spare node": (["--launch.queue=main"], "== start "),
    "with a spare node": (
        ["--launch.queue=spares", "--launch.spare_nodes=1"],
        "== start ",
    ),
}
PHASES = (
    "all ranks have ended, on both nodes",
    "the job begins again",
    "the process of rank 0 begins",
    "its first step is done",
)
COMMON = [
    "--checkpoint.interval=2",
    "--training.steps=100000",
    "--launch.environment.STEP_SECONDS=0.2",
]


def restart(slurm: Cluster, folder: Path, flags: list[str], again: str) -> list[float]:
    """Kill rank 1 of a new job; return the seconds of each phase."""
    job = submit(slurm, folder, *COMMON, *flags)
    until_step(folder, 5)
    ended = "== the ranks ended with code"
    begun = _count(folder, job, again)
    os.kill(_process(job), signal.SIGKILL)
    ends = [time.time()]
    ends.append(_until(lambda: _count(folder, job, ended) > 0))
    ends.append(_until(lambda: _count(folder, job, again) > begun))
    _until(lambda: len(_starts(folder)) > 1)
    launched = _starts(folder)[1]["launched"]
    _until(lambda: _first_row(folder, launched) > 0)
    ends += [launched, _first_row(folder, launched)]
    slurm.run("scancel", "--full", job)
    slurm.wait(job, "CANCELLED", "COMPLETED", "FAILED")
    return [after - before for before, after in pairwise(ends)]


def _process(job: str) -> int:
    """Return the process of rank 1: the one below torchrun."""
    for pid in processes(f"SLURM_JOB_ID={job}", "RANK=1"):
        return pid
    raise SystemExit("rank 1 is not there")


def _count(folder: Path, job: str, text: str) -> int:
    return read_log(folder, job).count(text)


def _starts(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "attempts.jsonl") if "launched" in line]


def _first_row(folder: Path, after: float) -> float:
    times = (row["time"] for row in read_metrics(folder / "metrics.jsonl"))
    return next((moment for moment in times if moment > after), 0.0)


def _until(ask: Callable[[], bool]) -> float:
    """Return the time at which the answer is yes."""
    end = time.monotonic() + 600
    while not ask():
        if time.monotonic() > end:
            raise SystemExit("the job has not come so far in 10 minutes")
        time.sleep(0.05)
    return time.time()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="restarts of each kind, in turn")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.md")
    arguments = parser.parse_args()
    if lacks := missing():
        raise SystemExit(f"this machine lacks {', '.join(lacks)}")
    found: dict[str, list[list[float]]] = {kind: [] for kind in JOBS}
    load = os.getloadavg()[0]
    temporary = tempfile.TemporaryDirectory(prefix="restarts-")
    with temporary as root, cluster(Path(root) / "slurm") as slurm:
        version = slurm.run("sinfo", "--version").strip()
        for number in range(arguments.repeats):
            for kind, (flags, again) in JOBS.items():
                folder = Path(root) / f"{len(kind)}-{number}"
                found[kind].append(restart(slurm, folder, flags, again))
                print(f"{kind}: {sum(found[kind][-1]):.1f} s", file=sys.stderr)
    lines = _page(found, f"{os.cpu_count()} cores, load {load:.1f} before, {version}")
    print("\n".join(lines))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _page(found: dict[str, list[list[float]]], machine: str) -> list[str]:
    repeats = len(next(iter(found.values())))
    import torch

    lines = ["# Restarts under Slurm", ""]
    lines.append(
        f"{machine}; Python {platform.python_version()}, torch {torch.__version__}; two nodes on "
        f"this machine with a rank each; {repeats} kills of rank 1 of each kind; medians, and "
        "ranges in parentheses; `python benchmarks/restarts_slurm.py`."
    )
    lines += ["", f"| phase, s | {' | '.join(found)} |", "|---" * (1 + len(found)) + "|"]
    for number, name in enumerate(PHASES):
        cells = [_cell([one[number] for one in found[kind]]) for kind in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    wholes = [_cell([sum(one) for one in found[kind]]) for kind in found]
    lines.append(f"| **from the kill to the first step** | {' | '.join(wholes)} |")
    return lines


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


if __name__ == "__main__":
    main()
