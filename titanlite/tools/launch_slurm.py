"""A batch script for Slurm."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from titanlite.config.errors import ConfigError, Problem
from titanlite.runs.logs import FOLDER as LOGS
from titanlite.tools.instances import network_environment
from titanlite.tools.launch import Job, LaunchError, limit_seconds, render

FILE = "job.sbatch"


def files(job: Job) -> dict[str, str]:
    """Return the batch script by its name in the job's folder. Raises ConfigError."""
    launch, here, run_folder = job.launch, os.getcwd(), job.folder.parent
    limit = limit_seconds(launch.time_limit)
    if limit and 2 * launch.notice_seconds > limit:
        message = f"{launch.notice_seconds} s are more than half of launch.time_limit, {launch.time_limit}"
        advice = "Slurm may send the notice up to a minute sooner: leave time to train"
        raise ConfigError([Problem("", "launch.notice_seconds", message, advice)])
    folders = {Path(os.path.abspath(launch.shared_dir or here)), Path(here), run_folder}
    mounts = sorted(folder for folder in folders if not folders & set(folder.parents))
    values = {
        "name": job.name,
        "gpus": not launch.cpu,
        "ranks": job.ranks,
        "folder": here,
        "file": shlex.quote(str(job.folder / FILE)),
        "output": str(job.folder / "slurm-%j.log"),
        "rank_logs": str(run_folder / LOGS),
        "run": str(run_folder),
        "environment": {
            # So that a log shows each step when it is done.
            "PYTHONUNBUFFERED": "1",
            **({"OMP_NUM_THREADS": "1"} if launch.cpu else network_environment(job.instance)),
            **launch.environment,
        },
        "mounts": ",".join(f"{folder}:{folder}" for folder in mounts),
        "python": "python" if launch.image else sys.executable,
    }
    names = ("nodes", "queue", "time_limit", "notice_seconds", "image", "max_restarts")
    return {FILE: render("slurm.sbatch.jinja", {**{name: getattr(launch, name) for name in names}, **values})}


def advice(job: Job) -> str:
    """Return how to submit the script."""
    return f"submit it with: sbatch {shlex.quote(str(job.folder / FILE))}"


def submit(job: Job) -> str:
    """Submit the script; return what to do next. Raises LaunchError."""
    file = str(job.folder / FILE)
    if shutil.which("sbatch") is None:
        raise LaunchError(f"sbatch is not installed here; submit {file} on a machine of the cluster")
    done = subprocess.run(["sbatch", "--parsable", file], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"sbatch did not take {file}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    follow = [
        f"job {number} is submitted: {job.launch.nodes} x {job.ranks} ranks",
        f"follow it with: tail -F {shlex.quote(str(job.folder / f'slurm-{number}.log'))}",
        f"stop it with a checkpoint: scontrol update JobId={number} Requeue=0; scancel --signal=USR1 {number}",
        f"continue it later: sbatch {shlex.quote(file)}",
    ]
    return "\n".join(follow)
