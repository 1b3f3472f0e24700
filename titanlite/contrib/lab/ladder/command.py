"""`titanlite ladder`: train small models, fit a scaling law, predict the loss of a config."""

from __future__ import annotations

import argparse
from pathlib import Path

from titanlite import exit_codes
from titanlite.cli import at_least
from titanlite.cli.argument_parser import FILES, FLAGS, Commands, new_command
from titanlite.contrib.lab import refuse_keys

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
        "are trained for several horizons, one run after the other. L(N, D) = E + A/N^a + B/D^b is "
        f"fitted to their losses. {FLAGS}",
        _EPILOG,
    )
    add = parser.add
    add("files", FILES, "CONFIG", nargs="+")
    folder = "folder of the ladder (default: job.dump_folder with -ladder behind it)"
    add("--folder", folder, "FOLDER", type=Path)
    add("--dry-run", "print the runs and their tokens, and run nothing")
    add("--nproc-per-node", "ranks of each run (default: 1)", "N", type=at_least(1))


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from titanlite.contrib.lab.ladder import report, run, rungs
    from titanlite.contrib.lab.ladder.target import target_of

    refuse_keys(arguments.flags, rungs.OWN)
    target = target_of(arguments, arguments.flags)
    if arguments.dry_run:
        return report.list_text(target), exit_codes.DONE
    folder = arguments.folder or Path(f"{target.run.job.dump_folder.rstrip('/')}-ladder")
    return run.run_ladder(target, folder)
