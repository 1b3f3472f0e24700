"""Small runs as jobs of a real Slurm, for the tests of `titanlite launch slurm`."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.launch.slurm_cluster import Cluster
from tests.support.processes import titanlite, until
from tests.support.tiny import TWO_LAYERS
from titanlite.runs.read_jsonl import read_lines

STEPS = 30
RUN = [
    "--job.config_file=debug_model.toml",
    f"--training.steps={STEPS}",
    "--training.batch_size=2",
    "--metrics.log_freq=1",
    "--no-validation.enable",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=100",
    *TWO_LAYERS,
]
LAUNCH = [
    "--launch.nodes=2",
    "--launch.gpus_per_node=1",
    "--launch.cpu",
    "--job.callbacks=tests.launch.slow_steps:SlowSteps",
]
ENDS = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")


def submit(slurm: Cluster, folder: Path, *more: str) -> str:
    """Submit a job; return its number."""
    words = ["slurm", *RUN, *LAUNCH, f"--job.dump_folder={folder}", "--submit", *more]
    done = titanlite("launch", *words, env=slurm.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1]


def read_log(folder: Path, job: str) -> str:
    return (folder / "launch" / f"slurm-{job}.log").read_text()


def until_step(folder: Path, step: int) -> None:
    file = folder / "metrics.jsonl"
    until(
        lambda: file.exists() and any(row.get("step", 0) >= step for row in read_lines(file)), 600
    )


def lose(slurm: Cluster, node: str, job: str) -> None:
    """End the daemon of a node and all processes of a job there, as a power failure does: first of
    all those that would report it.
    """
    daemon = slurm.daemons[node]
    daemon.kill()
    daemon.wait()
    found = _processes(f"SLURM_JOB_ID={job}", f"SLURMD_NODENAME={node}")
    supervisors = set()
    for pid in found:
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes():
                supervisors.add(parent)
    for pid in [*supervisors, *found]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(*variables: str) -> list[int]:
    """Return the processes that have these environment variables."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if set(variables) <= set(file.read_bytes().decode(errors="replace").split("\0")):
                found.append(int(file.parent.name))
    return found
