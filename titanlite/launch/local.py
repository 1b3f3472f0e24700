"""A script that starts a run by torchrun on this machine, or on each of several."""

from __future__ import annotations

import os
import shlex
import sys
from typing import NoReturn

from titanlite.launch.efa_environment import network_environment
from titanlite.launch.job import CONFIG, Job, LaunchError, render
from titanlite.runs import ATTEMPTS
from titanlite.runs.lock import FILE as LOCK_FILE
from titanlite.runs.metrics_jsonl import FILE as METRICS_FILE

FILE = "run.sh"


def files(job: Job) -> dict[str, str]:
    """Return the script by its name in the job's folder."""
    launch = job.launch
    values = {
        "name": job.name,
        "nodes": launch.nodes,
        "ranks": job.ranks,
        "folder": os.getcwd(),
        "file": shlex.quote(str(job.folder / FILE)),
        "environment": {
            # Time for a checkpoint after SIGTERM, before torchrun kills its ranks.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
            **({} if launch.cpu else network_environment(job.instance, efa=launch.nodes > 1)),
            **launch.environment,
        },
        "python": sys.executable,
        "config": str(job.folder / CONFIG),
        "stopped": str(job.folder / "stopped"),
        "lock": str(job.folder.parent / LOCK_FILE),
        "metrics": str(job.folder.parent / METRICS_FILE),
        "attempts": str(job.folder.parent / ATTEMPTS),
        "max_restarts": launch.max_restarts,
    }
    return {FILE: render("local.sh.jinja", job, values)}


def advice(job: Job) -> str:
    """Return how to start the script."""
    start = f"bash {shlex.quote(str(job.folder / FILE))}"
    if job.launch.nodes == 1:
        return f"start it with: {start}"
    return (
        f"start it on each machine: {start} NUMBER ADDRESS, with NUMBER from 0, and the address "
        "of machine 0"
    )


def submit(job: Job) -> NoReturn:
    """Become the script. Raises LaunchError for a run of several machines."""
    if job.launch.nodes > 1:
        raise LaunchError(f"launch local starts nothing on other machines; {advice(job)}")
    os.execv("/bin/bash", ["bash", str(job.folder / FILE)])
