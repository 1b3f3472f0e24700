"""`titanlite plan`: does a run fit its GPUs, how fast is it, what does it need besides."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from titanlite import exit_codes
from titanlite.cli import at_least
from titanlite.cli.parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.config.errors import ConfigError, bad_flag
from titanlite.config.load import read
from titanlite.config.loaded import LoadedConfig
from titanlite.plan.hardware import (
    DEFAULT_GPUS_PER_NODE,
    GPUS,
    Cluster,
    cluster_of,
    find_gpu,
    find_instance,
)
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.parts import GIB, needed_bytes
from titanlite.plan.plan import Plan, formula, make_plan
from titanlite.plan.text import gpu_table, plan_text
from titanlite.resolve.load import check_alone, resolve, smallest_world
from titanlite.run.config import RunConfig
from titanlite.utils import atomic_write

#: Most GPUs in the search for the fewest that do.
_MOST = 4096


def add_command(commands: Commands) -> None:
    """Add `titanlite plan` to argparse."""
    code = exit_codes.OUT_OF_MEMORY
    parser = new_command(
        commands,
        _run,
        "plan",
        "predict memory, speed, time and disk of a config, without a GPU",
        "Predict what a run needs: memory of each GPU by part, host memory, disk, "
        "speed and time. Without a word on the hardware: that of [launch], "
        f"else the fewest GPUs of each kind that the run fits. {FLAGS}",
        (
            f"Exit status: 0 when the run fits, {code} when it does not, 2 for a wrong config. "
            "docs/plan.md"
        ),
    )
    add_files(parser)
    add = parser.add
    add("--gpus", "GPUs over all machines", "N", type=at_least(1))
    add("--gpu", "kind of GPU, as h100-80g", "NAME")
    add("--instance", "kind of machine on AWS, as p5.48xlarge", "TYPE")
    add("--nodes", "machines", "N", type=at_least(1))
    add("--exact", "trace a step of the real code instead of formulas (tens of seconds)")
    rank = "rank whose memory is shown (default: the one that needs most)"
    add("--rank", rank, "N", type=at_least(0))
    add("--search", "propose the fastest settings that fit, as a file to lay over the config")
    add("--write", "--search: write the best settings there", "FILE", type=Path)
    add("--json", "print the plan as JSON")
    parser.set_defaults(exact=None, search=None, json=None)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    if arguments.search:
        _refuse(
            arguments, ("exact", "rank", "json"), "is not for a search", "plan what it proposes"
        )
    else:
        _refuse(arguments, ("write",), "is for a search", "give --search, too")
    file = arguments.write
    if file and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        raise bad_flag("--write", f"cannot write {file}")
    config, problems = read([*files_of(arguments), *arguments.flags], defer=True)
    check_alone(config, problems, texts=True)
    ranks = ranks_of(arguments, config)
    is_named = arguments.gpu or arguments.instance or config.sections.launch.instance_type
    if not ranks or not is_named:
        return _for_each_gpu(config, ranks, arguments)
    config, run = resolve(config, ranks)
    names = {name: getattr(arguments, name) for name in ("gpu", "instance", "gpus", "nodes")}
    cluster = cluster_of(run, **names)
    if arguments.search:
        return _searched(config, run, cluster, arguments)
    return _planned(run, cluster, arguments)


def ranks_of(arguments: argparse.Namespace, config: LoadedConfig) -> int | None:
    """Return the GPUs that options or section `[launch]` give."""
    launch = config.sections.launch
    instance = arguments.instance or ("" if arguments.gpu else launch.instance_type)
    size = find_instance(instance).gpus if instance else launch.gpus_per_node
    nodes = arguments.nodes or (launch.nodes if size else None)
    if arguments.gpus:
        return int(arguments.gpus)
    return nodes and nodes * (size or DEFAULT_GPUS_PER_NODE)


def _searched(
    config: LoadedConfig, run: RunConfig, cluster: Cluster, arguments: argparse.Namespace
) -> tuple[str, int]:
    from titanlite.cli.plan import search_text
    from titanlite.cli.plan.search import search

    result = search(config, run, cluster)
    text = search_text.search_text(result, arguments.style)
    if not result.ranked:
        return text, exit_codes.OUT_OF_MEMORY
    if arguments.write:
        atomic_write(arguments.write, search_text.overlay(result, result.ranked[0]))
    return text, exit_codes.DONE


def _planned(run: RunConfig, cluster: Cluster, arguments: argparse.Namespace) -> tuple[str, int]:
    trace = import_module("titanlite.cli.plan.memory_trace").trace if arguments.exact else None
    plan = make_plan(run, cluster, arguments.rank, trace)
    text = as_json(plan.as_json()) if arguments.json else plan_text(plan, arguments.style)
    return text, exit_codes.DONE if plan.fits else exit_codes.OUT_OF_MEMORY


def _refuse(arguments: argparse.Namespace, names: Iterable[str], why: str, hint: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise bad_flag(f"--{name}", why, hint)


def as_json(value: object) -> str:
    """Return JSON as the commands print it; a number that is not finite is an error."""
    return json.dumps(value, indent=2, allow_nan=False)


def _for_each_gpu(
    config: LoadedConfig, ranks: int | None, arguments: argparse.Namespace
) -> tuple[str, int]:
    hint = "give --gpus N --gpu NAME, or --instance TYPE --nodes N, or section [launch]"
    _refuse(arguments, ("exact", "rank", "search"), "is for one cluster", hint)
    runs = [with_vocabulary(run) for run in _sizes(config, ranks)]
    needs = [needed_bytes(formula(run)) for run in runs]
    plans: list[Plan] = []
    missing: dict[str, str] = {}
    for gpu in [find_gpu(arguments.gpu)] if arguments.gpu else GPUS.values():
        fitting = [run for run, need in zip(runs, needs, strict=True) if need <= gpu.memory]
        if not fitting:
            missing[gpu.key] = f"too little memory, of {min(needs) / GIB:.1f} GiB at least"
            continue
        cluster = cluster_of(fitting[0], gpu=gpu.key)
        try:
            plans.append(make_plan(fitting[0], cluster))
        except ConfigError as error:
            # Float8 on a GPU without it.
            missing[gpu.key] = error.problems[0].message
    code = exit_codes.DONE if plans else exit_codes.OUT_OF_MEMORY
    if arguments.json:
        return as_json([plan.as_json() for plan in plans]), code
    return gpu_table(plans, missing, runs[0].model.title, arguments.style), code


def _sizes(config: LoadedConfig, ranks: int | None) -> list[RunConfig]:
    """Return the run on `ranks` GPUs, or on all numbers that fit, doubled from the fewest.

    They are whole machines, if any are.
    """
    if ranks:
        return [resolve(config, ranks)[1]]
    least = smallest_world(config)
    machine = config.sections.launch.gpus_per_node or DEFAULT_GPUS_PER_NODE
    doubled = [least * 2**n for n in range(max(_MOST // least, 1).bit_length())]
    whole = [size for size in doubled if size < machine or size % machine == 0]
    found: list[RunConfig] = []
    problems: list[ConfigError] = []
    for size in whole or doubled:
        try:
            found.append(resolve(config, size)[1])
        except ConfigError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return found
