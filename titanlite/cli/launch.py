"""`titanlite launch`: write a config's job for a scheduler, from a template in `deploy/`, and
submit it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from titanlite import exit_codes
from titanlite.cli.argument_parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.config.checks import broken, closed_urls, missing_files
from titanlite.config.errors import ConfigError, Problem, nearest, refuse, unfit
from titanlite.config.toml import loads
from titanlite.launch.job import CONFIG, Job, LaunchError
from titanlite.plan.hardware import INSTANCES
from titanlite.resolve.load import check_config, unnamed_tokenizer
from titanlite.utils import REMOVED, say

How = Literal["print", "write", "submit"]
#: Folder of a job below job.dump_folder.
FOLDER = "launch"
#: Keys of [model] that make it another one.
_MODEL = ("name", "flavor", "overrides")
#: System → its module, with `files(job)`, `advice(job)` and `submit(job)`; some also have
#: `warnings(job)`.
_SYSTEMS = {
    "local": "titanlite.launch.local",
    "slurm": "titanlite.launch.slurm",
    "kubernetes": "titanlite.launch.kubernetes",
}


def add_command(commands: Commands) -> None:
    """Add `titanlite launch` to argparse."""
    parser = new_command(
        commands,
        _run,
        "launch",
        "write the job of a config for a cluster, and submit it",
        "Write a job for a scheduler: section [launch] says on which machines. The "
        "rest of the config is checked for their ranks. The job and the resolved "
        "config go to launch/ in job.dump_folder, which all machines must see. "
        f"{FLAGS}",
        "docs/launch/ has a page for each system, docs/config-keys.md every key of "
        "[launch], as --launch.nodes 2 --launch.spare_nodes 1.",
    )
    parser.add_argument("system", choices=list(_SYSTEMS), help="the scheduler")
    add_files(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--dry-run",
        action="store_true",
        help="print the job and write nothing (default: write its files)",
    )
    how.add_argument("--submit", action="store_true", help="submit the job when it is written")
    # A printed job has to work.
    parser.set_defaults(verbatim=True)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    how: How = "write"
    if arguments.dry_run:
        how = "print"
    elif arguments.submit:
        how = "submit"
    argv = [*files_of(arguments), *arguments.flags]
    return launch(arguments.system, argv, how), exit_codes.DONE


def launch(name: str, argv: list[str], how: How) -> str:
    """Make a system's job; return it, or what to do next. Raises ConfigError.

    argv: flags of `train.py`.
    """
    job = prepare(argv)
    if name != "slurm" and job.launch.spare_nodes:
        hint = "leave it out; what the system itself does with a lost machine is in docs/launch"
        raise unfit("launch.spare_nodes", f"{name} has no such jobs, only Slurm has", hint)
    system: Any = import_module(_SYSTEMS[name])
    files: dict[str, str] = system.files(job)
    warnings = list(getattr(system, "warnings", lambda _: [])(job))
    if not job.run.checkpoint.enable_checkpoint:
        warnings.append(
            "checkpoints are off (checkpoint.enable_checkpoint): each restart begins at step 0"
        )
    for warning in warnings:
        say(f"warning: {warning}")
    if how == "print":
        return "\n".join(files.values()).rstrip()
    write(job, files)
    if how == "submit":
        return str(system.submit(job))
    return f"written: {', '.join(str(job.folder / name) for name in files)}\n{system.advice(job)}"


def prepare(argv: list[str]) -> Job:
    """Check a config for the ranks of its section [launch]. Raises ConfigError.

    argv: flags of `train.py`.
    """
    loaded, first = check_config(argv, training=False, defer=True)
    problems = broken(loaded, [closed_urls])
    launch = first.launch
    place = loaded.place("launch.environment")
    for name, value in launch.environment.items():
        if value == REMOVED:
            key = f"launch.environment.{name}"
            message = f"{REMOVED!r} stands for a secret that launch/{CONFIG} does not have"
            advice = f"set it again, or launch from the first config: --{key} VALUE"
            problems.append(Problem("does-not-fit", key, message, advice, place))
    if problems:
        raise ConfigError(problems)
    for problem in broken(loaded, [missing_files]):
        # The machines replace variables.
        if "${" not in problem.message:
            say(f"warning: not there: {problem}")
    instance = None
    if launch.instance_type:
        # SageMaker and HyperPod write a prefix.
        name = launch.instance_type.removeprefix("ml.")
        instance = INSTANCES.get(name)
        if instance is None:
            key = "launch.instance_type"
            close = ", ".join(nearest(name, list(INSTANCES), 3))
            advice = f"nearest: {close or 'none'}; or leave it out and set launch.gpus_per_node"
            message = f"no instance type {launch.instance_type!r} is known"
            problem = Problem("does-not-fit", key, message, advice, loaded.place(key))
            raise ConfigError([problem])
    ranks = launch.gpus_per_node or (instance.gpus if instance else 0)
    if not ranks:
        message = "the number of GPUs of a machine is not known"
        advice = "set it, or launch.instance_type to one of the table in docs/launch/README.md"
        raise unfit("launch.gpus_per_node", message, advice)
    if instance and ranks > instance.gpus and not launch.cpu:
        message = (
            f"{ranks}, but {launch.instance_type} has {instance.gpus} GPU(s): a GPU has one rank "
            "at most"
        )
        key = "launch.gpus_per_node"
        raise ConfigError([Problem("does-not-fit", key, message, where=loaded.place(key))])
    run = check_config(argv, launch.nodes * ranks, training=False, defer=True)[1]
    refuse(unnamed_tokenizer(loaded, run))
    folder = Path(os.path.abspath(run.job.dump_folder)) / FOLDER
    return Job(run, instance, ranks, folder)


def write(job: Job, files: Mapping[str, str]) -> None:
    """Write the job's files and config for their owner alone, as they may hold secrets.

    The folder is closed to others, too: schedulers write logs there with any mode.
    """
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        job.folder.chmod(0o700)
    except OSError as error:
        raise LaunchError(
            f"cannot make {job.folder} ({error.strerror}); --dry-run prints the job instead"
        ) from error
    # A damaged one counts as none.
    models = []
    with suppress(FileNotFoundError, ValueError, KeyError, AttributeError):
        for text in ((job.folder / CONFIG).read_text("utf-8"), job.config):
            model = loads(text)["model"]
            models.append([model.get(key) for key in _MODEL])
    if models and models[0] != models[-1]:
        name, flavor, _ = models[0]
        message = f"{job.folder} holds the job of another model, {name} {flavor}"
        hint = "give each model a folder of its own, or remove that one"
        raise unfit("job.dump_folder", message, hint)
    for name, text in {CONFIG: job.config, **files}.items():
        file = job.folder / name
        file.unlink(missing_ok=True)  # an older file may be open to others
        file.touch(mode=0o600)
        file.write_text(text, encoding="utf-8")
