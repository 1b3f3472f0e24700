"""A task for SkyPilot, which finds machines on clouds and Kubernetes, and replaces lost ones."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from titanlite.config.errors import ConfigError, Problem
from titanlite.config.urls import is_url
from titanlite.tools.launch.instances import network_environment
from titanlite.tools.launch.launch import Job, LaunchError, render
from titanlite.tools.launch.remote import (
    checkpoint_folder,
    relative_paths,
    secrets,
    shown_urls,
    unset_variables,
)

FILE = "task.yaml"
#: The exit code of torchrun after which the same command may continue: EX_TEMPFAIL of sysexits.h.
#: SkyPilot's own kills have others, so it starts no run again whose first error is final.
RESTART_CODE = 75
#: Variables that the machines have by themselves.
_SET = r"SKYPILOT_\w+"
#: The line of the script after the config.
_END_OF_CONFIG = "END OF THE CONFIG"


def files(job: Job) -> dict[str, str]:
    """Return the task by its name in the job's folder. Raises ConfigError."""
    launch = job.launch
    if problems := list(_problems(job)):
        raise ConfigError(problems)
    network = {"OMP_NUM_THREADS": "1"}
    if not launch.cpu:
        # No variables of EFA: SkyPilot installs no drivers of networks.
        network = network_environment(job.instance, efa=False)
    environment = {
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
        **network,
        **launch.environment,
    }
    hidden = secrets(environment)
    values = {
        "name": _name(job),
        "file": shlex.quote(str(job.folder / FILE)),
        "nodes": launch.nodes,
        "ranks": job.ranks,
        "accelerator": _accelerator(job),
        "infra": launch.infra,
        "instance_type": launch.instance_type.removeprefix("ml."),
        "image": launch.image,
        "spot": launch.spot,
        "restart_code": RESTART_CODE,
        "workdir": "" if launch.image else os.getcwd(),
        "buckets": {path: source for source, path in launch.volumes.items() if "://" in source},
        "disks": {path: source for source, path in launch.volumes.items() if "://" not in source},
        "environment": {name: environment[name] for name in environment if name not in hidden},
        "secrets": hidden,
        "run": job.run.job.dump_folder,
        "config": job.config,
        "end_of_config": _END_OF_CONFIG,
    }
    return {FILE: render("skypilot.yaml.jinja", job, values)}


def _name(job: Job) -> str:
    """Return the name of the managed job; it begins with a letter."""
    name = re.sub(r"[^a-z0-9-]+", "-", job.name).strip("-")
    return name if name[:1].isalpha() else f"run-{name}"


def _accelerator(job: Job) -> str:
    """Return SkyPilot's name of the GPU; "": none is named, or the machines have none."""
    launch = job.launch
    if launch.cpu or launch.accelerator or job.instance is None:
        return launch.accelerator
    big = job.instance.gpu == "A100" and job.instance.gpu_memory == 80
    return "A100-80GB" if big else job.instance.gpu


def _problems(job: Job) -> Iterator[Problem]:
    launch = job.launch
    run = job.run
    yield from unset_variables(run.toml, launch.environment, _SET)
    for key in shown_urls(run.toml):
        hint = "write the URL as ${NAME}, a variable of launch.environment"
        yield Problem("", key, "the task shows the login or signature of its URL", hint)
    if not (launch.cpu or _accelerator(job)):
        message = "the kind of GPU is not known"
        yield Problem("", "launch.accelerator", message, "set it, as H100: `sky show-gpus`")
    if launch.cpu and launch.accelerator:
        yield Problem("", "launch.accelerator", "the machines have no GPUs (launch.cpu)")
    for key in ("time_limit", "queue"):
        if getattr(launch, key):
            yield Problem("", f"launch.{key}", "a task of SkyPilot has none", "leave it out")
    if not launch.image and not _is_checkout(Path.cwd()):
        message = "nothing installs titanlite: no image is named"
        hint = "launch from a checkout of titanlite, which SkyPilot copies, or set it"
        yield Problem("", "launch.image", message, hint)
    yield from _place_problems(job)


def _is_checkout(folder: Path) -> bool:
    """Return whether `pip install -e .` in the folder installs titanlite."""
    project = folder / "pyproject.toml"
    return project.is_file() and 'name = "titanlite"' in project.read_text(encoding="utf-8")


def _place_problems(job: Job) -> Iterator[Problem]:
    """Yield what is wrong with the buckets, the run folder and the folder of checkpoints."""
    launch = job.launch
    folder = job.run.job.dump_folder
    for source, path in launch.volumes.items():
        if not PurePosixPath(path).is_absolute() or "$" in path + source:
            message = f"{source!r} = {path!r} is not a bucket or a volume, and a folder"
            yield Problem("", "launch.volumes", message, 'as in {"s3://bucket/runs" = "/runs"}')
    if not _is_below(folder, launch.volumes.values()):
        message = f"{folder!r} ends with the machine: it is on none of launch.volumes"
        hint = 'set launch.volumes, as {"s3://bucket/runs" = "/runs"}, and a folder below /runs'
        yield Problem("", "job.dump_folder", message, hint)
    checkpoints = checkpoint_folder(job.run.toml, folder, launch.environment)
    if not job.run.checkpoint.enable_checkpoint or is_url(checkpoints):
        return
    shared = [path for source, path in launch.volumes.items() if "://" not in source]
    if launch.nodes > 1 and not _is_below(checkpoints, shared):
        message = f"{checkpoints!r}: a mounted bucket shows the files of other machines too late"
        hint = 'name the bucket itself, as checkpoint.folder = "s3://bucket/runs/a/checkpoint"'
        yield Problem("", "checkpoint.folder", message, hint)
    elif not _is_below(checkpoints, launch.volumes.values()):
        message = f"{checkpoints!r} ends with the machine: it is on none of launch.volumes"
        yield Problem("", "checkpoint.folder", message, "take a folder below one of them, or a URL")


def _is_below(folder: str, paths: Collection[str]) -> bool:
    """Return whether an absolute folder lies below one of the paths."""
    place = PurePosixPath(posixpath.normpath(folder))
    return any(place.is_relative_to(path) for path in paths)


def warnings(job: Job) -> list[str]:
    """Return warnings of paths."""
    return relative_paths(job.run.toml, "the machines look for it in the working folder")


def advice(job: Job) -> str:
    """Return how to submit the task, and whose values the environment must have."""
    words = ["sky", "jobs", "launch", *_secret_flags(job), str(job.folder / FILE)]
    return f"submit it with: {shlex.join(words)}"


def _secret_flags(job: Job) -> list[str]:
    """Return the flags that take the values of secrets from the environment: no file holds them."""
    return [word for name in secrets(job.launch.environment) for word in ("--secret", name)]


def _with_secrets(job: Job) -> dict[str, str]:
    """Return the environment of `sky`. A value of the config goes before one that is set here.

    Raises LaunchError for a secret without a value.
    """
    environment = dict(os.environ)
    for name in secrets(job.launch.environment):
        value = job.launch.environment[name] or environment.get(name)
        if not value:
            raise LaunchError(f"{name} has no value: export it, and submit again")
        environment[name] = value
    return environment


def submit(job: Job) -> str:
    """Submit the task as a managed job; return what to do next. Raises LaunchError."""
    if shutil.which("sky") is None:
        hint = 'pip install "skypilot[aws]" in a separate environment'
        raise LaunchError(f"sky is not installed here ({hint}); {advice(job)}")
    file = str(job.folder / FILE)
    words = ["sky", "jobs", "launch", "--yes", "--detach-run", *_secret_flags(job), file]
    environment = _with_secrets(job)
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    said = f"{done.stdout}\n{done.stderr}".strip()
    if done.returncode:
        raise LaunchError(f"sky did not take {file}:\n{said}")
    found = re.search(r"[Jj]ob ID: *(\d+)", said)
    number = found[1] if found else "JOB"
    follow = [
        f"managed job {number} is submitted: {job.launch.nodes} x {job.ranks} ranks",
        f"follow it with: sky jobs logs {number}",
        f"end it: sky jobs cancel {number}",
        f"continue it later: {advice(job).partition(': ')[2]}",
    ]
    return "\n".join(follow)
