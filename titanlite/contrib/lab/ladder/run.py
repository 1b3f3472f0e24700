"""Make the runs of a ladder, fit the law to their losses, predict the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.cli.run_figures import to_json
from titanlite.contrib.lab.ladder.fit import fit
from titanlite.contrib.lab.ladder.law import LadderError, Point, check_points
from titanlite.contrib.lab.ladder.predict import (
    leave_largest_out,
    notes_on_distance,
    predict,
    predict_curve,
)
from titanlite.contrib.lab.ladder.report import report_text
from titanlite.contrib.lab.ladder.rungs import DEFAULTS, Rung, rungs
from titanlite.contrib.lab.ladder.target import Target
from titanlite.contrib.lab.members import MemberResult, run_members
from titanlite.runs.prediction import keep
from titanlite.runs.read import read_run
from titanlite.utils import atomic_write

POINTS = "points.json"


def run_ladder(target: Target, folder: Path) -> tuple[str, int]:
    """Make the missing runs, write the results, and return the report.

    Raises LadderError and ConfigError.
    """
    found = rungs(target)
    check_points([Point(rung.parameters, rung.tokens, 1.0, rung.name) for rung in found])
    results = _make(target, found, folder)
    points = []
    held: list[Point] = []
    lines = []
    for rung in found:
        one = results.get(rung.name)
        if one is None:
            reason = f" was not started, since its trunk {rung.trunk} is not done"
        elif one.state != "done" or one.loss is None:
            reason = f": {one.state}. {one.reason}".rstrip(". ")
        else:
            trunk = rung.trunk or rung.name
            points.append(Point(rung.parameters, rung.tokens, one.loss, rung.name, trunk))
            rows = () if rung.trunk else read_run(folder / rung.name).validations
            for row in rows:
                share = row["step"] / rung.steps
                if share <= 1 - target.ladder.decay_ratio:
                    held.append(
                        replace(points[-1], tokens=share * rung.tokens, loss=row["validation_loss"])
                    )
            continue
        lines.append(f"missing: {rung.name}{reason}")
    try:
        text, result = predicted(points, target, held)
    except LadderError as error:
        lines += [f"no law: {error}", "the same command makes the missing runs"]
        return "\n".join(lines), exit_codes.ERROR
    atomic_write(folder / POINTS, to_json(result) + "\n")
    kept = keep(Path(target.run.job.dump_folder), loss=result["loss"])
    return "\n".join([*lines, text, f"written: {folder / POINTS}, {kept}"]), exit_codes.DONE


def predicted(
    points: Sequence[Point], target: Target, held: Sequence[Point] = ()
) -> tuple[str, dict[str, Any]]:
    """Fit, check and predict; return the report and the results. Raises LadderError.

    held: as for `predict_curve`.
    """
    found = fit(points)
    prediction = predict(found, target.parameters, target.tokens)
    notes = notes_on_distance(points, target.parameters, target.tokens)
    curve = [prediction]
    schedule, tokens_per_step = target.run.schedule, target.run.batch.tokens_per_step
    if held and schedule.decay_steps:
        fall = schedule.decay_steps * (1 if schedule.in_tokens else tokens_per_step)
        curve = predict_curve(held, prediction, target.tokens - fall)
    result = {
        "points": [asdict(point) for point in points],
        "law": asdict(found.law),
        "prediction": asdict(prediction),
        "loss": {
            "model": target.run.model.title,
            "tokens_per_step": tokens_per_step,
            "steps": target.run.steps,
            "curve": [
                {"step": round(one.tokens / tokens_per_step), **asdict(one)} for one in curve
            ],
        },
        "notes": [*found.notes, *notes],
    }
    return report_text(found, leave_largest_out(points), prediction, notes), result


def _make(target: Target, found: Sequence[Rung], folder: Path) -> dict[str | None, MemberResult]:
    """Make the missing runs, each trunk before its branches."""
    shared = [*target.files, *DEFAULTS, *target.flags]
    done: dict[str | None, MemberResult] = {}
    for is_branch in (False, True):
        wave = [rung for rung in found if (rung.trunk is not None) == is_branch]
        ready = [rung for rung in wave if not is_branch or done[rung.trunk].state == "done"]
        members = [rung.member(folder) for rung in ready]
        done |= {one.name: one for one in run_members(members, shared, folder, target.ranks)}
    return done
