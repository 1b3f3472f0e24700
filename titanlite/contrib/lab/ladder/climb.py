"""Runs a ladder, and concludes from its points."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titanlite import exit_codes
from titanlite.cli.processes import Stopped, tell
from titanlite.cli.run_figures import to_json
from titanlite.contrib.lab.ladder.files import POINTS
from titanlite.contrib.lab.ladder.fit import fit
from titanlite.contrib.lab.ladder.law import LadderError, Point, check_points
from titanlite.contrib.lab.ladder.passes import passes_note, tokens_of_text, with_passes
from titanlite.contrib.lab.ladder.picture import picture
from titanlite.contrib.lab.ladder.predict import (
    check_distance,
    horizon_note,
    leave_largest_out,
    predict,
)
from titanlite.contrib.lab.ladder.report import Cost, Report, report_text
from titanlite.contrib.lab.ladder.rungs import DEFAULTS, Rung, rungs
from titanlite.contrib.lab.ladder.target import Target, plan_of, schedule_note
from titanlite.contrib.lab.members import MemberResult, run_members
from titanlite.utils import atomic_write

PICTURE = "ladder.svg"


def climb(target: Target, arguments: argparse.Namespace) -> tuple[str, int]:
    """Make the runs that are missing, write the results, and return the report.

    Raises LadderError, ConfigError and OSError.
    """
    found = rungs(target)
    ahead = [Point(rung.parameters, rung.tokens, 1.0, rung.name) for rung in found]
    check_points(ahead)
    if not arguments.far:
        check_distance(ahead, target.parameters, target.tokens)
    plan_of(target, arguments)
    folder = arguments.folder or Path(f"{target.run.job.dump_folder.rstrip('/')}-ladder")
    try:
        points, missing = _run(target, found, folder)
    except Stopped as stop:
        return "", exit_codes.after_signal(stop.number)
    except OSError as error:
        raise LadderError(
            f"cannot write to {folder}: {error.strerror or error}; name another with --folder"
        ) from None
    try:
        check_points(points)
    except LadderError as error:
        return _too_few(error, missing), exit_codes.ERROR
    size = tokens_of_text(target.run)
    report = make_report(with_passes(points, size), target, arguments, missing)
    note = passes_note(report.fit.points, target.tokens, size)
    if note:
        report = replace(report, notes=[*report.notes, note])
    atomic_write(folder / POINTS, to_json(report.as_json()) + "\n")
    atomic_write(folder / PICTURE, picture(report.fit, report.prediction))
    text, code = _shown(report, arguments)
    if not arguments.json:
        text += f"\nwritten: {folder / POINTS}, {folder / PICTURE}"
    return text, code


def conclude(
    points: Sequence[Point], target: Target | None, arguments: argparse.Namespace
) -> tuple[str, int]:
    """Fit points from elsewhere, and return the report. Raises LadderError and ConfigError."""
    return _shown(make_report(points, target, arguments), arguments)


def _run(target: Target, found: Sequence[Rung], folder: Path) -> tuple[list[Point], list[str]]:
    """Run trunks, then the branches of those that are done; return points and what is missing."""
    shared = [*target.files, *DEFAULTS, *target.flags]
    results: dict[str, MemberResult] = {}

    def make(wave: Sequence[Rung]) -> None:
        if not wave:
            return
        members = [rung.member(folder) for rung in wave]
        done = run_members(members, shared, folder, at_once=target.at_once, nproc=target.ranks)
        results.update((one.name, one) for one in done)

    make([rung for rung in found if rung.trunk is None])
    ready = []
    for rung in found:
        if rung.trunk is not None and results[rung.trunk].state == "done":
            ready.append(rung)
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
        elif one.validation_loss is None:
            missing.append(f"{rung.name} has no validation loss in its metrics")
        else:
            trunk = rung.trunk or rung.name
            loss = one.validation_loss
            points.append(Point(rung.parameters, rung.tokens, loss, rung.name, trunk))
    return points, missing


def _too_few(error: LadderError, missing: Sequence[str]) -> str:
    lines = [f"missing: {line}" for line in missing]
    return "\n".join([*lines, f"no law: {error}", "the same command makes the missing runs"])


def _shown(report: Report, arguments: argparse.Namespace) -> tuple[str, int]:
    if arguments.json:
        return to_json(report.as_json()), exit_codes.DONE
    return report_text(report, arguments.style), exit_codes.DONE


def make_report(
    points: Sequence[Point],
    target: Target | None,
    arguments: argparse.Namespace,
    missing: Sequence[str] = (),
) -> Report:
    """Fit, check and predict. missing: runs that gave no point. Raises LadderError, ConfigError."""
    aim = arguments.at
    if target is not None:
        aim = (target.parameters, target.tokens)
    check_points(points)
    if aim is not None and not arguments.far:
        check_distance(points, *aim)
    found = fit(points)
    left_out = leave_largest_out(points)
    if aim is None:
        return Report(found, left_out)
    prediction = predict(found, *aim)
    notes = [horizon_note(points, *aim)]
    if target is None:
        return Report(found, left_out, prediction, notes=[note for note in notes if note])
    plan = plan_of(target, arguments)
    notes.append(schedule_note(target))
    return Report(
        fit=found,
        left_out=left_out,
        prediction=prediction,
        whole=target.whole,
        cost=None if plan is None else Cost(plan, arguments.price_per_gpu_hour),
        missing=missing,
        notes=[note for note in notes if note],
    )
