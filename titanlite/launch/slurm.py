"""A batch script for Slurm."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from titanlite.config.errors import Problem, refuse
from titanlite.config.urls import is_url
from titanlite.launch.efa_environment import network_environment
from titanlite.launch.job import Job, LaunchError, limit_seconds, render
from titanlite.runs.rank_logs import FOLDER as LOGS

FILE = "job.sbatch"


def files(job: Job) -> dict[str, str]:
    """Return the batch script by its name in the job's folder. Raises ConfigError."""
    launch = job.launch
    here = Path.cwd()
    run_folder = job.folder.parent
    folders = {Path(os.path.abspath(launch.shared_dir or here)), here, run_folder}
    mounts = sorted(folder for folder in folders if not folders & set(folder.parents))
    refuse(list(_problems(job, mounts)))
    network = {"OMP_NUM_THREADS": "1"}
    if not launch.cpu:
        network = network_environment(job.instance, efa=launch.nodes > 1)
    values = {
        "name": job.name,
        "nodes": launch.nodes,
        "spare": launch.spare_nodes,
        "most": launch.nodes + launch.spare_nodes,
        "gpus": not launch.cpu,
        "ranks": job.ranks,
        "folder": str(here),
        "file": shlex.quote(str(job.folder / FILE)),
        "output": f"{str(job.folder).replace('%', '%%')}/slurm-%j.log",
        "rank_logs": str(run_folder / LOGS),
        "run": str(run_folder),
        "environment": {
            # So that a log shows each step when it is done.
            "PYTHONUNBUFFERED": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
            **network,
            **launch.environment,
        },
        "mounts": ",".join(f"{folder}:{folder}" for folder in mounts),
        "python": "python" if launch.image else sys.executable,
    }
    for name in ("queue", "time_limit", "notice_seconds", "image", "max_restarts"):
        values[name] = getattr(launch, name)
    return {FILE: render("slurm.sbatch.jinja", job, values)}


def _problems(job: Job, mounts: list[Path]) -> Iterator[Problem]:
    launch = job.launch
    checkpoint = job.run.checkpoint
    run_folder = job.folder.parent
    seen = [Path("/")]
    kind = ""
    if launch.shared_dir:
        seen = [Path(os.path.abspath(launch.shared_dir))]
        kind = "launch.shared_dir"
    elif launch.image:
        seen = mounts
        kind = "the container's folders"
    folders = {"job.dump_folder": str(run_folder)}
    if checkpoint.enable_checkpoint and not is_url(checkpoint.folder):
        folders["checkpoint.folder"] = os.path.abspath(checkpoint.folder)
    for key, folder in folders.items():
        if not any(Path(folder).is_relative_to(one) for one in seen):
            message = (
                f"{folder} is outside of {kind}, {', '.join(map(str, seen))}: not all machines "
                "see it"
            )
            hint = (
                f"give an absolute one below {seen[0]} (relative ones begin at {Path.cwd()}), or "
                "set launch.shared_dir to a folder above it that all machines see"
            )
            yield Problem("does-not-fit", key, message, hint)
    if "\\" in str(run_folder):
        message = f"{run_folder} has a backslash: Slurm writes no log into such a folder"
        yield Problem("does-not-fit", "job.dump_folder", message, "take a folder without one")
    for mount in mounts if launch.image else []:
        if set(str(mount)) & set(",:"):
            message = f"{mount} cannot be mounted in a container: a comma or a colon ends its name"
            yield Problem("does-not-fit", "launch.image", message, "take a folder without them")
    limit = limit_seconds(launch.time_limit)
    if limit and 2 * launch.notice_seconds > limit:
        message = (
            f"{launch.notice_seconds} s are more than half of launch.time_limit, "
            f"{launch.time_limit}"
        )
        advice = "Slurm may send the notice up to a minute sooner: leave time to train"
        yield Problem("does-not-fit", "launch.notice_seconds", message, advice)


def advice(job: Job) -> str:
    """Return how to submit the script."""
    return f"submit it with: sbatch {shlex.quote(str(job.folder / FILE))}"


def follow(job: Job, number: str = "JOB") -> list[str]:
    """Return how to follow and stop the job."""
    return [
        f"follow it with: tail -F {shlex.quote(str(job.folder / f'slurm-{number}.log'))}",
        (
            f"stop it with a checkpoint: scontrol update JobId={number} Requeue=0; scancel "
            f"--batch --signal=USR1 {number}"
        ),
    ]


def submit(job: Job) -> str:
    """Submit the script; return what to do next. Raises LaunchError."""
    file = str(job.folder / FILE)
    if shutil.which("sbatch") is None:
        raise LaunchError(
            f"sbatch is not installed here; submit {file} on a machine of the cluster"
        )
    done = subprocess.run(
        ["sbatch", "--parsable", file], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LaunchError(f"sbatch did not take {file}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    told = f"job {number} is submitted: {job.launch.nodes} x {job.ranks} ranks"
    return "\n".join([told, *follow(job, number), f"continue it later: sbatch {shlex.quote(file)}"])
