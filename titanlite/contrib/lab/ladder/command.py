"""`titanlite ladder`: train small models, fit a scaling law, predict the loss of a config."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite import exit_codes
from titanlite.cli import at_least, refuse_keys
from titanlite.cli.parser import FLAGS, Commands, add_files, new_command
from titanlite.config.errors import bad_flag

if TYPE_CHECKING:
    from titanlite.contrib.lab.ladder.law import Point
    from titanlite.contrib.lab.ladder.report import Report
    from titanlite.contrib.lab.ladder.rungs import Rung
    from titanlite.contrib.lab.ladder.target import Target
    from titanlite.contrib.lab.members import MemberResult
    from titanlite.run.config import RunConfig

PICTURE = "ladder.svg"
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
    add_files(parser)
    add = parser.add
    folder = "folder of the ladder (default: job.dump_folder with -ladder behind it)"
    add("--folder", folder, "FOLDER", type=Path)
    add("--dry-run", "print the runs and their tokens, and run nothing")
    add("--nproc-per-node", "ranks of each run (default: 1)", "N", type=at_least(1))
    fit = "fit the points of points.json, or of a CSV (parameters, tokens, loss); train nothing"
    add("--fit", fit, "FILE", type=Path)
    at = "with --fit: predict N parameters (without the embedding) and D tokens, as 7B:160B"
    add("--at", at, "N:D", type=_size_and_tokens)
    add("--far", "predict more than 100 times beyond the largest run")
    gpus = "GPUs that CONFIG itself will train on, where its batch follows from them"
    add("--gpus", gpus, "N", type=at_least(1))
    parser.set_defaults(gpu=None, instance=None, nodes=None)
    add("--json", "print the result as JSON")


def _number(text: str) -> int:
    """Read a number for argparse, as 7B or 1.5T."""
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)([KMBT]?)", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a number as 7B, got {text!r}")
    unit = " KMBT".index(match[2].upper() or " ")
    return round(float(re.sub("[_,]", "", match[1])) * 1000**unit)


def _size_and_tokens(text: str) -> tuple[int, int]:
    """Read N:D for argparse."""
    parameters, colon, tokens = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"expected N:D as 7B:160B, got {text!r}")
    return _number(parameters), _number(tokens)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    _check_options(arguments)
    from titanlite.contrib.lab.ladder.files import read_points
    from titanlite.contrib.lab.ladder.report import list_text
    from titanlite.contrib.lab.ladder.rungs import OWN
    from titanlite.contrib.lab.ladder.target import target_of

    target = None
    if not arguments.fit:
        refuse_keys(arguments.flags, OWN)
    if arguments.files or arguments.flags:
        target = target_of(arguments, arguments.flags)
    if target is None or arguments.fit:
        report = _report(read_points(arguments.fit), target, arguments)
        return _shown(report, arguments), exit_codes.DONE
    if arguments.dry_run:
        return list_text(target, arguments.style), exit_codes.DONE
    return _climb(target, arguments)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    if arguments.fit:
        for name in ("dry_run", "nproc_per_node", "folder"):
            if getattr(arguments, name):
                flag = "--" + name.replace("_", "-")
                raise bad_flag(flag, "is for runs, and --fit makes none")
        if arguments.at and arguments.files:
            raise bad_flag("--at", "a config is given, too: predict one of them")
    elif arguments.at:
        raise bad_flag("--at", "goes with --fit FILE; without it a config is predicted")
    elif not arguments.files:
        raise bad_flag("CONFIG", "none is given", "name the config that is to be predicted")
    elif arguments.dry_run and arguments.json:
        raise bad_flag("--json", "is for results, and --dry-run has none")


def _climb(target: Target, arguments: argparse.Namespace) -> tuple[str, int]:
    """Make the runs that are missing, write the results, and return the report.

    Raises LadderError and ConfigError.
    """
    from titanlite.cli.processes import Stopped
    from titanlite.cli.run_figures import to_json
    from titanlite.contrib.lab.ladder.files import POINTS
    from titanlite.contrib.lab.ladder.law import LadderError, Point, check_points
    from titanlite.contrib.lab.ladder.picture import picture
    from titanlite.contrib.lab.ladder.predict import check_distance, passes_note
    from titanlite.contrib.lab.ladder.rungs import rungs
    from titanlite.utils import atomic_write

    found = rungs(target)
    ahead = [Point(rung.parameters, rung.tokens, 1.0, rung.name) for rung in found]
    check_points(ahead)
    if not arguments.far:
        check_distance(ahead, target.parameters, target.tokens)
    folder = arguments.folder or Path(f"{target.run.job.dump_folder.rstrip('/')}-ladder")
    try:
        points, missing = _points(target, found, folder)
    except Stopped as stop:
        return "", exit_codes.after_signal(stop.number)
    except OSError as error:
        raise LadderError(
            f"cannot write to {folder}: {error.strerror or error}; name another with --folder"
        ) from None
    try:
        check_points(points)
    except LadderError as error:
        lines = [f"missing: {line}" for line in missing]
        lines += [f"no law: {error}", "the same command makes the missing runs"]
        return "\n".join(lines), exit_codes.ERROR
    note = passes_note(points, target.tokens, tokens_of_text(target.run))
    report = _report(points, target, arguments, missing, [note])
    atomic_write(folder / POINTS, to_json(report.as_json()) + "\n")
    atomic_write(folder / PICTURE, picture(report.fit, report.prediction))
    text = _shown(report, arguments)
    if not arguments.json:
        text += f"\nwritten: {folder / POINTS}, {folder / PICTURE}"
    return text, exit_codes.DONE


def _points(target: Target, found: Sequence[Rung], folder: Path) -> tuple[list[Point], list[str]]:
    """Run trunks, then the branches of those that are done; return points and what is missing."""
    from titanlite.cli.processes import tell
    from titanlite.contrib.lab.ladder.law import Point
    from titanlite.contrib.lab.ladder.rungs import DEFAULTS
    from titanlite.contrib.lab.members import run_members

    shared = [*target.files, *DEFAULTS, *target.flags]
    results: dict[str, MemberResult] = {}

    def make(wave: Sequence[Rung]) -> None:
        members = [rung.member(folder) for rung in wave]
        for one in run_members(members, shared, folder, target.ranks):
            results[one.name] = one

    make([rung for rung in found if rung.trunk is None])
    branches = [rung for rung in found if rung.trunk]
    ready = [rung for rung in branches if results[rung.trunk or ""].state == "done"]
    tell(f"the trunks are made; {len(ready)} branches follow")
    make(ready)
    points = []
    missing = []
    for rung in found:
        one = results.get(rung.name)
        if one is None:
            missing.append(f"{rung.name} was not started, since its trunk {rung.trunk} is not done")
        elif one.state != "done":
            missing.append(f"{rung.name}: {one.state}. {one.reason}".rstrip(". "))
        elif one.loss is not None:
            trunk = rung.trunk or rung.name
            loss = one.loss
            points.append(Point(rung.parameters, rung.tokens, loss, rung.name, trunk))
    return points, missing


def tokens_of_text(run: RunConfig) -> int | None:
    """Return the tokens of one pass over the training text, as the runs of a ladder have read it.

    None: it is a stream, or a mixture, or cannot be read any more.
    """
    from titanlite.assembly.datasets import read_training_text
    from titanlite.data.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(run.model.tokenizer_path, run.model.name)
        return read_training_text(run, tokenizer).tokens_per_epoch
    except Exception as error:
        # Its runs are made: what this note lacks must not end a ladder.
        if exit_codes.own_code(error) is None and not isinstance(error, OSError):
            raise
        return None


def _shown(report: Report, arguments: argparse.Namespace) -> str:
    from titanlite.cli.run_figures import to_json
    from titanlite.contrib.lab.ladder.report import report_text

    return to_json(report.as_json()) if arguments.json else report_text(report, arguments.style)


def _report(
    points: Sequence[Point],
    target: Target | None,
    arguments: argparse.Namespace,
    missing: Sequence[str] = (),
    notes: Sequence[str | None] = (),
) -> Report:
    """Fit, check and predict. missing: runs that gave no point. Raises LadderError."""
    from titanlite.contrib.lab.ladder.fit import fit
    from titanlite.contrib.lab.ladder.law import check_points
    from titanlite.contrib.lab.ladder.predict import (
        check_distance,
        horizon_note,
        leave_largest_out,
        predict,
    )
    from titanlite.contrib.lab.ladder.report import Report

    aim = (target.parameters, target.tokens) if target else arguments.at
    check_points(points)
    if aim is not None and not arguments.far:
        check_distance(points, *aim)
    found = fit(points)
    if aim is not None:
        notes = [*notes, horizon_note(points, *aim)]
    if target:
        notes = [*notes, target.schedule_note]
    return Report(
        fit=found,
        left_out=leave_largest_out(points),
        prediction=predict(found, *aim) if aim else None,
        whole=target.whole if target else None,
        missing=missing,
        notes=[note for note in notes if note],
    )
