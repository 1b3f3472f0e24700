"""`titanlite launch`: write the job of a config for a cluster's scheduler, from a template in `deploy/`, and submit it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.config.errors import ConfigError, Problem, nearest
from titanlite.config.run_sections import Launch
from titanlite.derive import RunConfig
from titanlite.fit import check_config
from titanlite.runs.provenance import config_text
from titanlite.tools.cli import FLAGS, Commands
from titanlite.tools.instances import INSTANCES, Instance, network_environment
from titanlite.utils import Style

_TEMPLATES = Path(__file__).parent.parent / "deploy"
#: Folder of a job below job.dump_folder.
FOLDER = "launch"
#: A start that fails sooner is likely to fail again.
_QUICK_SECONDS = 300


class LaunchError(Exception):
    """The scheduler did not take the job."""

    exit_code = exit_codes.ERROR


def add_command(commands: Commands) -> None:
    """Add `titanlite launch` to argparse."""
    parser = commands.add_parser(
        "launch",
        help="write the job of a config for a cluster, and submit it",
        description="Write a job for a scheduler: section [launch] says on which machines, the rest of the config is "
        "checked for their ranks. The job and the resolved config go to launch/ in job.dump_folder, which all machines "
        f"must see. {FLAGS}",
        epilog="docs/launch/ has a page for each system.",
        allow_abbrev=False,
    )
    parser.add_argument("system", choices=["slurm"], help="the scheduler")
    parser.add_argument("file", nargs="?", metavar="CONFIG", help="TOML file; also looked up in train_configs/")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="print the job, and write nothing")
    how.add_argument("--submit", action="store_true", help="also submit it")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, flags: list[str], _: Style) -> tuple[str, int]:
    argv = [*([f"--job.config_file={arguments.file}"] if arguments.file else []), *flags]
    loaded, first = check_config(argv, training=False)
    launch = first.launch
    instance = _instance(launch, loaded.place("launch.instance_type"))
    ranks = launch.gpus_per_node or (instance.gpus if instance else 0)
    if not ranks:
        message = "the number of GPUs of a machine is not known"
        advice = "set it, or launch.instance_type to one of the table in docs/launch/slurm.md"
        raise ConfigError([Problem("", "launch.gpus_per_node", message, advice)])
    run = check_config(argv, launch.nodes * ranks, training=False)[1]
    folder = Path(os.path.abspath(run.job.dump_folder)) / FOLDER
    text = slurm_job(run, instance, ranks, folder)
    if arguments.dry_run:
        return text.rstrip(), exit_codes.DONE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config_text(run.toml))
    job = folder / "job.sbatch"
    job.touch(mode=0o600)  # launch.environment may hold secrets
    job.write_text(text)
    if not arguments.submit:
        return f"written: {job}\nsubmit it with: sbatch {shlex.quote(str(job))}", exit_codes.DONE
    number = _submit(job)
    follow = [
        f"job {number} is submitted: {launch.nodes} x {ranks} ranks",
        f"follow it with: tail -F {shlex.quote(str(folder / f'slurm-{number}.log'))}",
        f"stop it with a checkpoint: scancel --signal=USR1 {number}",
        f"continue it later: sbatch {shlex.quote(str(job))}",
    ]
    return "\n".join(follow), exit_codes.DONE


def _instance(launch: Launch, place: str) -> Instance | None:
    """Return the instance type of section `[launch]`; None: the section names none."""
    if not launch.instance_type:
        return None
    if launch.instance_type not in INSTANCES:
        close = ", ".join(nearest(launch.instance_type, list(INSTANCES), 3))
        advice = f"nearest: {close or 'none'}; or leave it out and set launch.gpus_per_node"
        message = f"no instance type {launch.instance_type!r} is known"
        raise ConfigError([Problem(place, "launch.instance_type", message, advice)])
    return INSTANCES[launch.instance_type]


def slurm_job(run: RunConfig, instance: Instance | None, ranks: int, folder: Path) -> str:
    """Return the batch script of a run. ranks: of each machine. folder: of the job's files."""
    launch, here = run.launch, os.getcwd()
    mounts = dict.fromkeys([os.path.abspath(launch.shared_dir or here), here, str(folder.parent)])
    values = {
        "name": re.sub(r"[^\w.-]+", "-", folder.parent.name),
        "gpus": not launch.cpu,
        "ranks": ranks,
        "folder": here,
        "file": shlex.quote(str(folder / "job.sbatch")),
        "output": str(folder / "slurm-%j.log"),
        "environment": {
            # So that a log shows each step when it is done.
            "PYTHONUNBUFFERED": "1",
            **({"OMP_NUM_THREADS": "1"} if launch.cpu else network_environment(instance)),
            **launch.environment,
        },
        "mounts": ",".join(f"{folder}:{folder}" for folder in mounts),
        "python": "python" if launch.image else sys.executable,
        "config": str(folder / "config.toml"),
        "quick_seconds": _QUICK_SECONDS,
    }
    names = ("nodes", "queue", "time_limit", "notice_seconds", "image", "max_restarts")
    return render("slurm.sbatch", {**{name: getattr(launch, name) for name in names}, **values})


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return a file of `deploy/` with its variables filled in; an unknown one is an error."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string((_TEMPLATES / template).read_text()).render(values)


def _submit(job: Path) -> str:
    """Submit a batch script; return the job's number. Raises LaunchError."""
    if shutil.which("sbatch") is None:
        raise LaunchError(f"sbatch is not installed here; submit {job} on a machine of the cluster")
    done = subprocess.run(["sbatch", "--parsable", str(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"sbatch did not take {job}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
