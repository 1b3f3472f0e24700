"""A training job for SageMaker: a Python script that describes it to the SDK, whose package
`sagemaker` it needs.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys

from titanlite.config.errors import ConfigError, Problem
from titanlite.config.urls import is_url
from titanlite.launch.instances import network_environment
from titanlite.launch.job import CONFIG, Job, LaunchError, limit_seconds, render
from titanlite.launch.remote import (
    checkpoint_folder,
    relative_paths,
    secrets,
    shown_urls,
    unset_variables,
)

FILE = "sagemaker_job.py"
#: SageMaker copies it to S3 and back; each machine has its own.
RUN_FOLDER = "/opt/ml/checkpoints"
_INPUT = "/opt/ml/input/data"
#: Variables that the container has by itself.
_SET = r"SM_\w+|TRAINING_JOB_(NAME|ARN)|AWS_REGION"
TENSORBOARD = "/opt/ml/output/tensorboard"
_NUMBER = r"([0-9.]+(?:e[-+]?[0-9]+)?)"
#: Regular expressions of log lines by metrics.log_style. A number with thousands separators is none
#: for SageMaker.
METRICS = {
    "titan": {
        "step": r"step: +([0-9]+) ",
        "loss": rf"step: .* loss: +{_NUMBER}",
        "grad_norm": rf"grad_norm: +{_NUMBER}",
        "learning_rate": rf" lr: +{_NUMBER}",
        "mfu": rf"mfu: +{_NUMBER}%",
    },
    "aws_fsdp": {
        "step": "Batch ([0-9]+) Loss",
        "loss": rf"Loss: {_NUMBER}",
        "samples_per_second": rf"Speed: {_NUMBER} samples/sec",
        "learning_rate": rf" lr: {_NUMBER}",
    },
}
#: SageMaker's own default of one hour would end most runs; a longer run needs a quota.
_FIVE_DAYS = 5 * 86400
#: It kills a job this many seconds after SIGTERM.
_SECONDS_TO_END = 120
#: The API's limit.
_RETRIES = 30


def files(job: Job) -> dict[str, str]:
    """Return the script by its name in the job's folder.

    Raises ConfigError for a job that cannot work there.
    """
    launch = job.launch
    _check(job)
    fabric = job.instance if launch.nodes > 1 else None
    arguments = [f"--job.dump_folder={RUN_FOLDER}"]
    if tensorboard := TENSORBOARD if job.run.metrics.enable_tensorboard else "":
        arguments.append(f"--metrics.save_tb_folder={tensorboard}")
    values = {
        "name": re.sub("[^a-z0-9]+", "-", job.name),
        "nodes": launch.nodes,
        "ranks": job.ranks,
        "file": shlex.quote(str(job.folder / FILE)),
        "folder": str(job.folder),
        "config": CONFIG,
        "arguments": arguments,
        "image": launch.image,
        "role": launch.role,
        "instance_type": f"ml.{launch.instance_type.removeprefix('ml.')}",
        "max_run": limit_seconds(launch.time_limit) or _FIVE_DAYS,
        "max_wait": limit_seconds(launch.spot_wait),
        "checkpoint_s3": launch.checkpoint_s3.rstrip("/"),
        "run_folder": RUN_FOLDER,
        "retries": min(launch.max_restarts, _RETRIES),
        "environment": {
            "PYTHONUNBUFFERED": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SECONDS_TO_END - 10),
            **({"OMP_NUM_THREADS": "1"} if launch.cpu else network_environment(fabric)),
            **launch.environment,
        },
        "metrics": METRICS[job.run.metrics.log_style],
        "tensorboard": tensorboard,
        "channels": launch.channels,
    }
    return {FILE: render("sagemaker.py.jinja", job, values)}


def _check(job: Job) -> None:
    launch = job.launch
    checkpoint = job.run.checkpoint
    needed = {
        "launch.image": (
            launch.image,
            "the image of deploy/Dockerfile in ECR: docs/launch/sagemaker.md",
        ),
        "launch.instance_type": (launch.instance_type, "as p5.48xlarge"),
        "launch.checkpoint_s3": (
            launch.checkpoint_s3,
            "as s3://BUCKET/RUN, to which SageMaker copies the run folder",
        ),
    }
    problems = [
        Problem("does-not-fit", key, "SageMaker needs it", hint)
        for key, (value, hint) in needed.items()
        if not value
    ]
    problems += unset_variables(job.run.toml, launch.environment, _SET)
    mounts = {f"SM_CHANNEL_{name.upper()}": f"{_INPUT}/{name}" for name in launch.channels}
    folder = checkpoint_folder(job.run.toml, RUN_FOLDER, mounts | launch.environment)
    kept: tuple[str, ...] = (f"{_INPUT}/",)
    if launch.nodes == 1:
        kept += (f"{RUN_FOLDER}/",)
    if checkpoint.enable_checkpoint and not is_url(folder) and not f"{folder}/".startswith(kept):
        message = f"{folder} is a folder of each machine alone: no machine has the whole checkpoint"
        hint = (
            'name one that all machines see: checkpoint.folder = "s3://BUCKET/RUN", or a folder '
            "on FSx for Lustre"
        )
        if launch.nodes == 1:
            message = f"{folder} ends with the machine"
            hint = (
                f'take a folder below {RUN_FOLDER}, as checkpoint.folder = "checkpoint", or one '
                "on S3"
            )
        problems.append(Problem("does-not-fit", "checkpoint.folder", message, hint))
    wait = limit_seconds(launch.spot_wait)
    if wait is not None and wait < (limit_seconds(launch.time_limit) or _FIVE_DAYS):
        problems.append(
            Problem(
                "does-not-fit",
                "launch.spot_wait",
                "is shorter than launch.time_limit, which it includes",
            )
        )
    if problems:
        raise ConfigError(problems)


def warnings(job: Job) -> list[str]:
    """Return warnings of paths and secrets."""
    hint = "the container has only the config; use a channel, ${SM_CHANNEL_NAME}, or S3"
    names = ", ".join(f"launch.environment.{name}" for name in secrets(job.launch.environment))
    shown = [f"DescribeTrainingJob shows {names} to all of its callers"] if names else []
    urls = [
        f"the job's copy in S3 shows the login or signature in {key}"
        for key in shown_urls(job.run.toml)
    ]
    return [*relative_paths(job.run.toml, hint), *shown, *urls]


def advice(job: Job) -> str:
    """Return how to start the script."""
    return (
        f"start it with: python {shlex.quote(str(job.folder / FILE))} (pip install "
        '"sagemaker>=3.27,<4")'
    )


def submit(job: Job) -> str:
    """Run the script; return what to do next. Raises LaunchError."""
    if (
        importlib.util.find_spec("sagemaker") is None
        or importlib.util.find_spec("sagemaker.train") is None
    ):
        raise LaunchError(
            f"the SDK of SageMaker 3 is not installed: nothing is submitted; {advice(job)}"
        )
    file = str(job.folder / FILE)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    said = f"{done.stdout}\n{done.stderr}"
    if done.returncode:
        raise LaunchError(f"{file} failed:\n{said.strip()}")
    found = re.search(r"Training Job Name: *([A-Za-z0-9-]+)", said)
    name = found[1] if found else "JOB"
    follow = [
        f"training job {name} is submitted: {job.launch.nodes} x {job.ranks} ranks",
        (
            "follow it with: aws logs tail /aws/sagemaker/TrainingJobs --log-stream-name-prefix "
            f"{name} --follow"
        ),
        f"stop it with a checkpoint: aws sagemaker stop-training-job --training-job-name {name}",
        f"continue it later: python {shlex.quote(file)}",
    ]
    return "\n".join(follow)
