"""`titanlite plan`: does a run fit its GPUs, how fast is it, what does it need besides."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

from titanlite import exit_codes
from titanlite.cli import at_least
from titanlite.cli.argument_parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.config.errors import bad_flag
from titanlite.config.load import read
from titanlite.plan.hardware import cluster_of, ranks_of
from titanlite.plan.plan import make_plan
from titanlite.plan.text import plan_text
from titanlite.resolve.load import check_alone, resolve
from titanlite.runs import PREDICTION
from titanlite.runs.prediction import keep


def add_command(commands: Commands) -> None:
    """Add `titanlite plan` to argparse."""
    code = exit_codes.OUT_OF_MEMORY
    parser = new_command(
        commands,
        _run,
        "plan",
        "predict memory, speed, time and disk of a config, without a GPU",
        "Predict what a run needs: memory of each GPU by part, host memory, disk, "
        f"speed and time. Without an option for the hardware, [launch] names it. {FLAGS}",
        (
            f"Exit status: 0 when the run fits, {code} when it does not, 2 for a wrong config. "
            "docs/plan.md"
        ),
    )
    add_files(parser)
    add = parser.add
    add(
        "--gpus",
        "GPUs of all machines together (default: those of one machine)",
        "N",
        type=at_least(1),
    )
    add("--gpu", "kind of GPU, as h100-80g (default: that of [launch])", "NAME")
    add("--instance", "kind of machine on AWS, as p5.48xlarge (default: that of [launch])", "TYPE")
    add("--nodes", "number of machines (default: that of [launch])", "N", type=at_least(1))
    add("--exact", "trace a step of the real code instead of formulas (tens of seconds)")
    add("--search", "propose the fastest settings that fit, as a file to lay over the config")
    add(
        "--measured",
        "take the rates that a run measured: its folder (docs/plan.md)",
        "RUN",
        type=Path,
    )
    add("--json", "print the plan as one JSON object; sizes are in GiB, times in seconds")
    add("--keep", f"write the plan to {PREDICTION} in job.dump_folder: the run is compared with it")
    parser.set_defaults(exact=None, search=None, json=None, keep=None)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    config, problems = read([*files_of(arguments), *arguments.flags], defer=True)
    check_alone(config, problems, texts=True)
    names = {name: getattr(arguments, name) for name in ("gpu", "instance", "gpus", "nodes")}
    config, run = resolve(config, ranks_of(config.sections.launch, **names))
    cluster = cluster_of(run, **names)
    if arguments.measured:
        from titanlite.cli.plan.measured import anchored

        cluster = anchored(cluster, arguments.measured)
    if arguments.search:
        from titanlite.cli.plan.search import search
        from titanlite.cli.plan.search_text import search_text

        for name in ("exact", "json", "keep"):
            if getattr(arguments, name) is not None:
                raise bad_flag(f"--{name}", "is not for a search", "plan what it proposes")
        result = search(config, run, cluster)
        fits = bool(result.ranked)
        text = search_text(result, arguments.style)
    else:
        trace = None
        if arguments.exact:
            trace = import_module("titanlite.cli.plan.memory_trace").trace
        plan = make_plan(run, cluster, trace)
        fits = plan.fits
        text = plan_text(plan, arguments.style)
        if not fits and not trace:
            from titanlite.cli.plan.search import cheapest_fit
            from titanlite.cli.plan.search_text import fit_text

            text += f"\n\n{fit_text(cheapest_fit(config, run, cluster), cluster)}"
        if arguments.keep:
            text += f"\n\nkept: {keep(Path(run.job.dump_folder), plan=plan.as_json())}"
        if arguments.json:
            text = json.dumps(plan.as_json(), indent=2, allow_nan=False)
    return text, exit_codes.DONE if fits else exit_codes.OUT_OF_MEMORY
