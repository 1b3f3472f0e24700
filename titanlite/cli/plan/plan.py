"""`titanlite plan`: does a run fit its GPUs, how fast is it, what does it need besides."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

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
    Gpu,
    cluster_of,
    find_gpu,
    find_instance,
)
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.parts import needed_bytes
from titanlite.plan.plan import Plan, formula, make_plan
from titanlite.plan.text import gpu_table, plan_text
from titanlite.resolve.load import check_alone, resolve, smallest_world
from titanlite.run.config import RunConfig
from titanlite.run.length import with_steps
from titanlite.utils import Style, atomic_write, counted

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
        "speed, time and cost. Without a word on the hardware: that of [launch], "
        f"else the fewest GPUs of each kind that the run fits. {FLAGS}",
        (
            f"Exit status: 0 when the run fits, {code} when it does not, 2 for a wrong config. "
            "docs/plan.md"
        ),
    )
    add_files(parser)
    _add_hardware(parser)
    _add_options(parser)
    _add_search(parser)
    _add_failures(parser)
    parser.set_defaults(exact=None, search=None)


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=at_least(1), metavar="N", help="GPUs over all machines")
    add("--gpu", metavar="NAME", help="kind of GPU, as h100-80g")
    add("--instance", metavar="TYPE", help="kind of machine on AWS, as p5.48xlarge")
    add("--nodes", type=at_least(1), metavar="N", help="machines")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--exact",
        action="store_true",
        default=None,
        help="trace a step of the real code instead of formulas (tens of seconds)",
    )
    add(
        "--rank",
        type=at_least(0),
        metavar="N",
        help="rank whose memory is shown (default: the one that needs most)",
    )
    add(
        "--tokens",
        type=token_count,
        metavar="N",
        help="length of the run in tokens, as 15T or 300B",
    )
    add(
        "--price",
        type=price,
        metavar="X",
        help="price of one machine for an hour; of one kind of GPU",
    )
    add("--json", action="store_true", help="print the plan as JSON")
    add("--html", type=Path, metavar="FILE", help="write a page with the memory over the step")


def _add_search(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--search",
        action="store_true",
        default=None,
        help="propose the fastest settings that fit, as a file to lay over the config",
    )
    add("--allow", action="append", choices=("float8",), help="--search: change numerics, too")
    add("--write", type=Path, metavar="FILE", help="--search: write the best settings there")


def _add_failures(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    mtbf = "mean time between failures of one node, as 1000h: predict the share of useful time"
    add("--mtbf", type=duration, metavar="TIME", help=mtbf)
    restart = "--mtbf: from a failure to the first step after it, as 10m"
    add("--restart-time", type=duration, metavar="TIME", help=restart)
    save = "--mtbf: of a save in which no step goes on, as 40s"
    add("--save-time", type=duration, metavar="TIME", help=save)


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Read a time for argparse, as 40s, 5m, 1.5h or 30d. Return seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a time as 40s, 5m or 1000h, got {text!r}")
    return seconds


def token_count(text: str) -> int:
    """Read a number of tokens for argparse, as 15T."""
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)([KMBT]?)", text, re.IGNORECASE)
    number = 0.0
    if match:
        unit = " KMBT".index(match[2].upper() or " ")
        number = float(re.sub("[_,]", "", match[1])) * 1000**unit
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of tokens as 15T, got {text!r}")
    return round(number)


def price(text: str) -> float:
    """Read a price for argparse: a finite number that is not negative."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a price, got {text!r}")
    return number


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    _check_options(arguments)
    style = arguments.style
    config, problems = read([*files_of(arguments), *arguments.flags], defer=True)
    check_alone(config, problems, texts=True)
    ranks = ranks_of(arguments, config)
    is_named = arguments.gpu or arguments.instance or config.sections.launch.instance_type
    if not ranks or not is_named:
        return _for_each_gpu(config, ranks, arguments, style)
    run = _lasting(resolve(config, ranks)[1], arguments)
    names = {name: getattr(arguments, name) for name in ("gpu", "instance", "gpus", "nodes")}
    cluster = replace(cluster_of(run, **names), price=arguments.price)
    if arguments.search:
        return _searched(cluster, arguments)
    return _planned(run, cluster, arguments, style)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together, and files that cannot be written."""
    if arguments.search:
        others = ("exact", "rank", "html", "price", "tokens", "mtbf")
        _refuse(arguments, others, "is not for a search", "plan what it proposes")
    else:
        _refuse(arguments, ("allow", "write"), "is for a search", "give --search, too")
    times = ("restart-time", "save-time")
    if arguments.mtbf is None:
        _refuse(arguments, times, "is for failures", "give --mtbf, too")
    else:
        for name in times:
            if getattr(arguments, name.replace("-", "_")) is None:
                raise bad_flag(f"--{name}", "is missing", "--mtbf needs it")
    for flag in ("html", "write"):
        file = getattr(arguments, flag)
        if file and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            raise bad_flag(f"--{flag}", f"cannot write {file}")


def ranks_of(arguments: argparse.Namespace, config: LoadedConfig) -> int | None:
    """Return the number of GPUs that the options or section `[launch]` give."""
    launch = config.sections.launch
    instance = arguments.instance or ("" if arguments.gpu else launch.instance_type)
    size = find_instance(instance).gpus if instance else launch.gpus_per_node
    nodes = arguments.nodes or (launch.nodes if size else None)
    if arguments.gpus:
        return int(arguments.gpus)
    return nodes and nodes * (size or DEFAULT_GPUS_PER_NODE)


def _searched(cluster: Cluster, arguments: argparse.Namespace) -> tuple[str, int]:
    """Search the settings of a config for a cluster."""
    from titanlite.cli.plan import search_text
    from titanlite.cli.plan.search import search

    argv = [*files_of(arguments), *arguments.flags]
    result = search(argv, cluster, allow=arguments.allow or ())
    if arguments.json:
        text = as_json(search_text.as_json(result))
    else:
        text = "\n".join(search_text.lines(result, arguments.style))
    if not result.ranked:
        return text, exit_codes.OUT_OF_MEMORY
    if arguments.write:
        best = search_text.overlay(result, result.ranked[0])
        text += _written(arguments.write, best, arguments.json)
    return text, exit_codes.DONE


def _planned(
    run: RunConfig, cluster: Cluster, arguments: argparse.Namespace, style: Style
) -> tuple[str, int]:
    """Plan a run on a cluster."""
    trace = import_module("titanlite.cli.plan.trace").trace if arguments.exact else None
    plan = make_plan(run, cluster, arguments.rank, trace)
    if arguments.json:
        text = as_json({**plan.as_json(), **_goodput(plan, arguments)})
    else:
        text = plan_text(plan, style) + _goodput_text(plan, arguments)
    if arguments.html:
        from titanlite.cli.plan.report import plan_page

        text += _written(arguments.html, plan_page(plan), arguments.json)
    return text, exit_codes.DONE if plan.fits else exit_codes.OUT_OF_MEMORY


def _goodput(plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the share of useful time: as the config saves, and with the best save interval."""
    if arguments.mtbf is None:
        return {}
    from titanlite.plan.goodput import best_interval, useful_share

    mean = arguments.mtbf / plan.cluster.nodes
    step = plan.speed.step_seconds
    times = arguments.save_time, mean, arguments.restart_time
    best = max(round(best_interval(arguments.save_time, mean) / step), 1)
    section = plan.run.checkpoint
    now = section.interval if section.enable_checkpoint else None
    return {
        "goodput": {
            "share": now and useful_share(now * step, *times),
            "interval_steps": now,
            "best_share": useful_share(best * step, *times),
            "best_interval_steps": best,
            "job_mtbf_hours": mean / 3600,
        }
    }


def _goodput_text(plan: Plan, arguments: argparse.Namespace) -> str:
    """Return the line that --mtbf adds to the plan."""
    found = _goodput(plan, arguments).get("goodput")
    if found is None:
        return ""
    best = (
        f"{found['best_share']:.1%} of the time in steps that are kept, with a save every "
        f"{counted(found['best_interval_steps'], 'steps')}"
    )
    now = "it saves nothing"
    if found["interval_steps"]:
        now = f"{found['share']:.1%} with {found['interval_steps']:,}"
    return (
        f"\n  goodput      {best}; now: {now}; a failure each {found['job_mtbf_hours']:,.3g} hours"
    )


def _refuse(arguments: argparse.Namespace, names: Iterable[str], why: str, hint: str) -> None:
    """Raise ConfigError for the first of some options that is given."""
    for name in names:
        if getattr(arguments, name.replace("-", "_")) is not None:
            raise bad_flag(f"--{name}", why, hint)


def _written(file: Path, content: str, quiet: bool) -> str:
    """Write a file; return the line that says so, which JSON has not."""
    atomic_write(file, content)
    return "" if quiet else f"\nwrote {file}"


def as_json(value: object) -> str:
    """Return a value as the commands print JSON; a number that is not finite is an error."""
    return json.dumps(value, indent=2, allow_nan=False)


def _lasting(run: RunConfig, arguments: argparse.Namespace) -> RunConfig:
    """Return the run with the length of --tokens."""
    if not arguments.tokens:
        return run
    return with_steps(run, run.course.steps_with_tokens(arguments.tokens))


def _for_each_gpu(
    config: LoadedConfig, ranks: int | None, arguments: argparse.Namespace, style: Style
) -> tuple[str, int]:
    """Plan the run on each kind of GPU, or on --gpu: on `ranks` GPUs or the fewest that fit it."""
    hint = "give --gpus N --gpu NAME, or --instance TYPE --nodes N, or section [launch]"
    _refuse(arguments, ("exact", "html", "rank", "search", "mtbf"), "is for one cluster", hint)
    if not arguments.gpu:
        _refuse(arguments, ("price",), "is of one kind of machine", "give --gpu NAME, too")
    runs: dict[int, RunConfig] = {}
    for run in _sizes(config, ranks):
        runs[run.mesh.world_size] = with_vocabulary(_lasting(run, arguments))
    needs = {size: needed_bytes(formula(run)) for size, run in runs.items()}
    plans: list[Plan] = []
    missing: list[tuple[Gpu, str]] = []
    for gpu in [find_gpu(arguments.gpu)] if arguments.gpu else GPUS.values():
        # A wrong number of GPUs is an error, with too little memory, too.
        clusters: dict[int, Cluster] = {}
        for size in runs:
            cluster = cluster_of(runs[size], gpu=gpu.key)
            clusters[size] = replace(cluster, price=arguments.price)
        fewest = next((size for size, need in needs.items() if need <= gpu.memory), None)
        if fewest is None:
            missing.append((gpu, "too little memory"))
            continue
        try:
            plans.append(make_plan(runs[fewest], clusters[fewest]))
        except ConfigError as error:
            # Float8 on a GPU without it.
            missing.append((gpu, error.problems[0].message))
    code = exit_codes.DONE if plans else exit_codes.OUT_OF_MEMORY
    if arguments.json:
        return as_json([plan.as_json() for plan in plans]), code
    return gpu_table(plans, missing, runs, needs, style), code


def _sizes(config: LoadedConfig, ranks: int | None) -> list[RunConfig]:
    """Return the run on `ranks` GPUs, or on all numbers of them that fit the config, doubled from
    the fewest.

    Numbers that are no whole machines are left out.
    """
    sizes = [ranks] if ranks else _doubled(config)
    found: list[RunConfig] = []
    problems: list[ConfigError] = []
    for size in sizes:
        try:
            found.append(resolve(config, size)[1])
        except ConfigError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return found


def _doubled(config: LoadedConfig) -> list[int]:
    """Return numbers of GPUs, doubled from the fewest: whole machines, if any are."""
    least = smallest_world(config)
    machine = config.sections.launch.gpus_per_node or DEFAULT_GPUS_PER_NODE
    doubled = [least * 2**n for n in range(max(_MOST // least, 1).bit_length())]
    whole = [size for size in doubled if size < machine or size % machine == 0]
    return whole or doubled
