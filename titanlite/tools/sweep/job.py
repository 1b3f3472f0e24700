"""A sweep as a job of several tasks, one for each run: `titanlite launch SYSTEM --sweep`."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.config.errors import ConfigError, Problem
from titanlite.tools.launch.launch import Array, Job, prepare
from titanlite.tools.sweep.command import asked_for, metric_of
from titanlite.tools.sweep.members import check_members
from titanlite.tools.sweep.points import to_toml
from titanlite.utils import public


def prepare_sweep(argv: Sequence[str], at_once: int | None) -> Job:
    """Check all points of a config for the ranks of its section [launch], and return their job.

    argv: flags of `train.py`. at_once: runs at a time; None: all.

    Raises ConfigError and SweepError.
    """
    asked = asked_for([], argv, None, 1)
    job = prepare([*argv, f"--job.dump_folder={asked.folder}"])
    ranks = job.launch.nodes * job.ranks
    members = asked.sweep.members
    checked = check_members(members, asked.config_args, asked.folder, ranks, here=False)
    metric_of(asked.sweep, checked)
    names = tuple(member.name for member in members)
    table = to_toml(asked.table)
    if public(table) != table:
        message = "readers of the job would see the login or the signature of a URL"
        hint = "write the URL as ${NAME}, a variable"
        raise ConfigError([Problem(asked.table.place(""), "[sweep]", message, hint)])
    array = Array(names, min(at_once or len(names), len(names)), table)
    return job._replace(array=array)
