"""`titanlite ladder`: train small models, fit a scaling law, predict the loss of a config."""

from __future__ import annotations

import argparse
from pathlib import Path

from titanlite import exit_codes
from titanlite.cli import at_least, refuse_keys
from titanlite.cli.parser import FLAGS, Commands, Parser, add_files, new_command
from titanlite.cli.plan.plan import price, token_count
from titanlite.config.errors import bad_flag

_EPILOG = f"""The table [ladder] of CONFIG has the sizes, the horizons and the seeds. Finished runs
in FOLDER are kept: after a kill or Ctrl-C the same command goes on.

Exit status: {exit_codes.DONE} when a law was fitted, {exit_codes.ERROR} when runs failed and too
few are left, {exit_codes.CONFIG} when the config or the command line is wrong, 128 and the
signal's number after a signal. docs/ladder.md"""


def add_command(commands: Commands) -> None:
    """Add `titanlite ladder` to argparse."""
    parser = new_command(
        commands,
        _run,
        "ladder",
        "train small models, and predict the loss of a config by a scaling law",
        "Predict the loss of CONFIG with its error. Smaller models of its proportions "
        "are trained for several horizons. L(N, D) = E + A/N^a + B/D^b is fitted to their losses. "
        f"With a GPU's name, time and price, too. {FLAGS}",
        _EPILOG,
    )
    add_files(parser)
    add = parser.add
    folder = "folder of the ladder (default: job.dump_folder with -ladder behind it)"
    add("--folder", folder, "FOLDER", type=Path)
    add("--dry-run", "print the runs and their tokens, and run nothing")
    add("--nproc-per-node", "ranks of each run (default: 1)", "N", type=at_least(1))
    add("--at-once", "runs at a time (default: 1)", "N", type=at_least(1))
    fit = "fit the points of points.json, or of a CSV (parameters, tokens, loss); train nothing"
    add("--fit", fit, "FILE", type=Path)
    at = "with --fit: predict N parameters (without the embedding) and D tokens, as 7B:160B"
    add("--at", at, "N:D", type=_size_and_tokens)
    add("--far", "predict more than 100 times beyond the largest run")
    _add_hardware(parser)
    add("--json", "print the result as JSON")


def _add_hardware(parser: Parser) -> None:
    add = parser.add
    add("--gpu", "GPU that CONFIG itself will train on, as h100-80g", "NAME")
    add("--gpus", "its number over all machines", "N", type=at_least(1))
    add("--instance", "kind of machine on AWS, as p5.48xlarge", "TYPE")
    add("--nodes", "machines", "N", type=at_least(1))
    hours = "price of one GPU for an hour; none: no price is shown"
    add("--price-per-gpu-hour", hours, "X", type=price)


def _size_and_tokens(text: str) -> tuple[int, int]:
    """Read N:D for argparse."""
    parameters, colon, tokens = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"expected N:D as 7B:160B, got {text!r}")
    return token_count(parameters), token_count(tokens)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    _check_options(arguments)
    from titanlite.contrib.lab.ladder.climb import climb, conclude
    from titanlite.contrib.lab.ladder.files import read_points
    from titanlite.contrib.lab.ladder.report import list_text
    from titanlite.contrib.lab.ladder.rungs import OWN
    from titanlite.contrib.lab.ladder.target import target_of

    flags = arguments.flags
    if arguments.fit and not (arguments.files or flags):
        return conclude(read_points(arguments.fit), None, arguments)
    if not arguments.fit:
        refuse_keys(flags, OWN)
    target = target_of(arguments, flags)
    if arguments.fit:
        return conclude(read_points(arguments.fit), target, arguments)
    if arguments.dry_run:
        return list_text(target, arguments.style), exit_codes.DONE
    return climb(target, arguments)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    if not arguments.fit:
        if arguments.at:
            raise bad_flag("--at", "goes with --fit FILE; without it a config is predicted")
        if not arguments.files:
            raise bad_flag("CONFIG", "none is given", "name the config that is to be predicted")
        if arguments.dry_run and arguments.json:
            raise bad_flag("--json", "is for results, and --dry-run has none")
        return
    for name in ("dry_run", "nproc_per_node", "at_once", "folder"):
        if getattr(arguments, name):
            flag = "--" + name.replace("_", "-")
            raise bad_flag(flag, "is for runs, and --fit makes none")
    if arguments.at and arguments.files:
        raise bad_flag("--at", "a config is given, too: predict one of them")
    for name in ("gpu", "gpus", "instance", "nodes", "price_per_gpu_hour"):
        if getattr(arguments, name) and not arguments.files:
            flag = "--" + name.replace("_", "-")
            raise bad_flag(flag, "is for the time and price of a CONFIG, and none is given")
