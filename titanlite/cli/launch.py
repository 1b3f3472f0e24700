"""`titanlite launch`: write a config's job for a scheduler, from a template in `deploy/`, and
submit it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from titanlite import exit_codes
from titanlite.assembly.early_text_check import name_problems
from titanlite.cli.argument_parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.config.checks import broken, closed_urls, missing_files, placed
from titanlite.config.errors import Problem, refuse, unfit
from titanlite.config.load import find_config, read
from titanlite.launch.job import CONFIG, Job, LaunchError, files_of_job, machine_of
from titanlite.resolve.load import resolve, unnamed_tokenizer
from titanlite.utils import REMOVED, say

How = Literal["print", "write", "submit"]
#: Folder of a job below job.dump_folder.
FOLDER = "launch"
#: System → its module, with `files(job)`, `advice(job)` and `submit(job)`; some also have
#: `warnings(job)` and `follow(job)`.
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
        for line in getattr(system, "follow", lambda _: [])(job):
            say(line)
        return "\n".join(files.values()).rstrip()
    write(job, files)
    if how == "submit":
        return str(system.submit(job))
    return f"written: {', '.join(str(job.folder / name) for name in files)}\n{system.advice(job)}"


def prepare(argv: list[str]) -> Job:
    """Check a config for the ranks of its section [launch]. Raises ConfigError.

    argv: flags of `train.py`.
    """
    loaded, found = read(argv, defer=True)
    refuse(found)
    problems = broken(loaded, [closed_urls])
    launch = loaded.sections.launch
    place = loaded.place("launch.environment")
    for name, value in launch.environment.items():
        if value == REMOVED:
            key = f"launch.environment.{name}"
            message = f"{REMOVED!r} stands for a secret that launch/{CONFIG} does not have"
            advice = f"set it again, or launch from the first config: --{key} VALUE"
            problems.append(Problem("does-not-fit", key, message, advice, place))
    refuse(problems)
    instance, ranks = machine_of(loaded)
    if not ranks:
        message = "the number of GPUs of a machine is not known"
        advice = "set it, or launch.instance_type to one of the table in docs/launch/README.md"
        raise unfit("launch.gpus_per_node", message, advice)
    loaded, run = resolve(loaded, launch.nodes * ranks, texts=True)
    for problem in broken(loaded, [missing_files]):
        # The machines replace variables.
        if "${" not in problem.message:
            say(f"warning: not there: {problem}")
    refuse([*unnamed_tokenizer(loaded, run), *placed(loaded, name_problems(run))])
    folder = Path(os.path.abspath(run.job.dump_folder)) / FOLDER
    files = [os.path.abspath(find_config(name) or name) for name in run.job.config_file]
    if files == [str(folder / CONFIG)]:
        files = files_of_job(folder) or files
    return Job(run, instance, ranks, folder, files)


def write(job: Job, files: Mapping[str, str]) -> None:
    """Write the job's files and config for their owner alone, as they may hold secrets.

    The folder is closed to others, too: schedulers write logs there with any mode.
    """
    top = os.path.join(*job.folder.parts[:2])
    for key, place in {"job.dump_folder": top, "launch.shared_dir": job.launch.shared_dir}.items():
        if place and not os.path.exists(place):
            message = f"{place} does not exist: this machine does not mount it"
            raise unfit(key, message, "launch where it is mounted; --dry-run prints the job here")
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        job.folder.chmod(0o700)
    except OSError as error:
        raise LaunchError(
            f"cannot make {job.folder} ({error.strerror}); --dry-run prints the job instead"
        ) from error
    others = files_of_job(job.folder)
    if others is not None and others != job.files:
        other = ", ".join(others) or "of flags alone"
        message = f"{job.folder} holds the job of another config, {other}"
        hint = "give each its own folder with --job.dump_folder, or remove that one"
        raise unfit("job.dump_folder", message, hint)
    for name, text in {CONFIG: job.config_with_files, **files}.items():
        file = job.folder / name
        file.unlink(missing_ok=True)  # an older file may be open to others
        file.touch(mode=0o600)
        file.write_text(text, encoding="utf-8")
