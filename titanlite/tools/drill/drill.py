"""`titanlite drill`: train a tiny copy of a config, inject faults, and compare with a run without a
fault.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.tools import at_least
from titanlite.tools.drill.config import HALF, INTERVAL, ONE_RANK, STEPS, tiny_config
from titanlite.tools.drill.faults import NO_FAULT, Fault
from titanlite.tools.drill.ranks import RanksError, check
from titanlite.tools.drill.runs import (
    Workspace,
    check_resumed,
    checkpoint,
    differing,
    records,
    saved_steps,
)
from titanlite.tools.parser import Commands, new_command
from titanlite.tools.processes import Stopped, stoppable
from titanlite.utils import Style, read_lines, say

#: Relative difference of losses on another number of ranks, which adds up in another order.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

_EPILOG = """\
examples:
  titanlite drill my.toml --ranks 4 --training.tensor_parallel_degree 2
  titanlite drill my.toml --only sigterm --only full-disk

Further --section.key VALUE flags are laid over the file, as for train.py. Exit status: 0 if all
faults passed, 1 if one failed (the folders of the runs are then kept), 2 if the config or the
command line is wrong, 130 after Ctrl-C."""


def add_command(commands: Commands) -> None:
    """Add the command to argparse."""
    parser = new_command(
        commands,
        _run,
        "drill",
        "test how a tiny copy of a config survives kills, damage, signals and other faults",
        "Train a tiny copy of CONFIG, with its features and kinds of parallelism, on "
        "CPU processes in a\n"
        "temporary folder. Inject faults, one per run. Compare the result bit for bit "
        "with a run without\na fault, or check the trace that the fault must leave.",
        _EPILOG,
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(takes_keys=True)
    names = [scenario.name for scenario in SCENARIOS]
    table = "\n".join(f"{one.name:<{_WIDTH}}  {one.about}" for one in SCENARIOS)
    add = parser.add
    add("config", "TOML file; also looked up in train_configs/", "CONFIG")
    add(
        "--ranks",
        "processes (default: 2, or 4 with two kinds of parallelism)",
        "N",
        type=at_least(2),
    )
    add("--only", "only this fault; repeatable", "NAME", action="append", choices=names)
    add("--list", "print the names of the faults and exit", action="version", version=table)
    add("--compile", "leave training.compile as it is in CONFIG: slow")
    add("--json", "print the result as JSON")


@dataclass(frozen=True)
class Scenario:
    """One fault in a run that resumes from the first half."""

    name: str
    about: str
    #: Plays it in the folder of a run; returns a line about the success. Raises RanksError.
    play: Callable[[Workspace, Path, Scenario], str]
    fault: Fault = NO_FAULT
    #: Flags of the run.
    flags: Sequence[str] = ()
    #: Exit code of the rank after the fault, and whether there is a checkpoint newer than that of
    #: the first half.
    code: int = -signal.SIGKILL
    newer: bool = False


def resume(work: Workspace, run: Path, _: Scenario) -> str:
    """Train in two halves, and compare with a run without a stop."""
    work.finish(run, HALF)
    return f"{HALF} + {STEPS - HALF} steps equal {STEPS} steps without a stop, bit for bit"


def interrupt(work: Workspace, run: Path, one: Scenario) -> str:
    """End a run by a fault, resume it and compare the result."""
    text = work.train(run, *one.flags, fault=one.fault, code=one.code)
    if one.fault.event == "validation":
        last = records(run, "validation_loss")[-1][0]
        check(last == HALF, "the validation was not interrupted", text)
    step = max(saved_steps(run), default=0)
    is_expected = step > HALF if one.newer else step == HALF
    check(is_expected, f"the newest checkpoint is of step {step}", text)
    work.finish(run, step, *one.flags)
    told = f"signal {-one.code}" if one.code < 0 else f"exit code {one.code}"
    return f"ended by {told}; resumed from step {step}, same end"


def largest_shard(folder: Path) -> Path:
    """Return the largest file of a checkpoint."""
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def damage(work: Workspace, run: Path, one: Scenario) -> str:
    """Damage the newest checkpoint; the run must fall back to the one before."""
    folder = checkpoint(run, HALF)
    file = folder / "manifest.json" if one.name == "missing-manifest" else largest_shard(folder)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    file.write_bytes(content if one.name == "flipped-bit" else content[:middle])
    if one.name == "missing-manifest":
        file.unlink()
    text = work.finish(run, HALF - INTERVAL)
    check(file.name in text, f"the start did not name {file.name}", text)
    kept = list(folder.parent.glob(f"{folder.name}?*"))
    check(len(kept) == 1, "the damaged checkpoint was not kept")
    return f"{file.name} named, resumed from step {HALF - INTERVAL}, same end"


def none_left(work: Workspace, run: Path, _: Scenario) -> str:
    """Damage all checkpoints; the run must refuse to start."""
    for step in saved_steps(run):
        largest_shard(checkpoint(run, step)).unlink()
    before = records(run)
    text = work.train(run, "--checkpoint.start=resume", code=exit_codes.CHECKPOINT)
    check(records(run) == before, "it trained, but there was no checkpoint to resume from", text)
    return f"refused with exit code {exit_codes.CHECKPOINT}, nothing trained"


def bad_steps(work: Workspace, run: Path, one: Scenario, *names: str) -> list[list[Any]]:
    """Train with a NaN in the gradient of one rank. Return these values of the rows in
    guard.jsonl.
    """
    work.train(run, *one.flags, fault=one.fault)
    return [[row.get(name) for name in names] for row in read_lines(run / "guard.jsonl")]


def nan_skip(work: Workspace, run: Path, one: Scenario) -> str:
    """Put a NaN into a gradient; the guard must skip that step alone."""
    step = one.fault.number
    rows = bad_steps(work, run, one, "step", "action")
    check(rows == [[step, "skip"]], f"guard.jsonl has {rows}")
    changed = differing(checkpoint(run, HALF), checkpoint(run, step))
    check(not changed, f"the bad step {step} changed {changed[:3]}")
    changed = differing(checkpoint(run, step), checkpoint(run, step + 1))
    check(changed != [], f"step {step + 1} changed nothing")
    steps = [row[0] for row in records(run, "loss")]
    is_whole = steps == [*range(1, STEPS + 1)] and STEPS in saved_steps(run)
    check(is_whole, f"metrics.jsonl has the steps {steps}")
    return f"step {step} changed no weight or moment, the run continues to its end"


def nan_rollback(work: Workspace, run: Path, one: Scenario) -> str:
    """Put a NaN into a gradient; the guard must go back, and leave the steps out."""
    step = one.fault.number
    own = work.tiny.config.data.skip_steps
    rows = bad_steps(work, run, one, "step", "action", "back_to_step", "left_out")
    # Steps of the data order, which are not those of the run if the config skips some itself.
    skipped = rows[0][-1] if own and rows else f"{HALF + 1}-{step}"
    check(rows == [[step, "rollback", HALF, skipped]], f"guard.jsonl has {rows}")
    # The result must equal a run that resumes from that checkpoint and is told to skip these steps.
    other = work.begin("nan-skip-steps")
    check_resumed(work.train(other, f"--data.skip_steps={json.dumps([*own, skipped])}"), HALF)
    work.compare(run, other.name)
    return f"back to step {HALF}, then as if steps {skipped} of the data had been skipped"


def full_disk(work: Workspace, run: Path, one: Scenario) -> str:
    """Fill the disk during a save; the run must report it and go on."""
    step = one.fault.number
    mode = work.tiny.config.checkpoint.async_mode
    if one.name == "background-save" and mode == "disabled":
        mode = "async"
    text = work.train(run, f"--checkpoint.async_mode={mode}", fault=one.fault)
    told = re.search(rf"step {step}\b.*rank {one.fault.rank}: .*{os.strerror(errno.EFBIG)}", text)
    check(told is not None, "the failed save was not reported", text)
    steps = saved_steps(run)
    is_expected = step not in steps and {HALF, STEPS} <= {*steps}
    check(is_expected, f"there are checkpoints of steps {steps}", text)
    work.compare(run)
    return (
        f"async_mode = {mode!r}: reported, step {HALF} stays, training continues, the next save "
        "succeeds"
    )


def other_ranks(work: Workspace, run: Path, _: Scenario) -> str:
    """Resume on one rank; losses must agree within the precision."""
    check_resumed(work.train(run, *ONE_RANK, ranks=1), HALF)
    whole = work.folder / "whole"
    tolerance = _TOLERANCE[work.tiny.config.training.mixed_precision_param]
    expected = {step: dict(figures) for step, *figures in records(whole, "loss")}
    for step, *figures in records(run, "loss"):
        found = dict(figures)
        other = expected[step]
        gap = abs(found["loss"] - other["loss"])
        check(gap <= tolerance * other["loss"], f"the loss of step {step} differs by {gap:.2g}")
        check(found["tokens_seen"] == other["tokens_seen"], f"tokens_seen of step {step} differs")
    place = data_place(run)
    wanted = data_place(whole)
    check(place == wanted, f"the position in the data is {place}, not {wanted}")
    return (
        f"saved on {work.tiny.ranks} ranks, resumed on 1: same position in the data, losses equal "
        "to rounding"
    )


def data_place(run: Path) -> Any:
    """Return the position in the data that the last checkpoint of a run holds."""
    manifest = json.loads((checkpoint(run) / "manifest.json").read_text())
    return manifest["train"]["data"]


_SAVE = HALF + INTERVAL
_NEXT = HALF + 1
_FULL = Fault("full", "save", _SAVE, 1)
_PURGE = Fault("kill", "prune half way", _SAVE)
_TERM = Fault("term", "step", _NEXT, 1)
_IN_VALIDATION = Fault("term", "validation", 1, 1)
_NAN = Fault("nan", "step", _NEXT, 1)
_NAN_LATER = Fault("nan", "step", _SAVE, 1)
_KEEP_ONE = ("--checkpoint.keep_latest_k=1",)
_STOP = ("--guard.policy=stop",)
_ONLY_STOPS_SAVE = ("--checkpoint.interval=1000",)
_SKIP = (
    "--guard.policy=skip",
    "--guard.max_skips=1",
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=0",
)
_ROLLBACK = ("--guard.policy=rollback", "--guard.max_skips=1")
SCENARIOS = (
    Scenario("resume", "stop and start again, without any fault", resume),
    Scenario(
        "kill-shard",
        "SIGKILL while a shard is written",
        interrupt,
        Fault("kill", "shard half", _SAVE, 1),
    ),
    Scenario(
        "kill-rename",
        "SIGKILL before the manifest gets its name",
        interrupt,
        Fault("kill", "publish", _SAVE),
    ),
    Scenario(
        "kill-purge",
        "SIGKILL while old checkpoints are deleted",
        interrupt,
        _PURGE,
        _KEEP_ONE,
        newer=True,
    ),
    Scenario(
        "kill-rank", "SIGKILL of one rank in a step", interrupt, Fault("kill", "step", _NEXT, 1)
    ),
    Scenario("truncated-shard", "the newest checkpoint's largest file is cut in half", damage),
    Scenario("flipped-bit", "one bit of the newest checkpoint has changed", damage),
    Scenario("missing-manifest", "the newest checkpoint has no manifest", damage),
    Scenario("none-left", "no checkpoint is good, and the run must resume", none_left),
    Scenario("sigterm", "SIGTERM to one rank", interrupt, _TERM, (), exit_codes.PREEMPTED, True),
    Scenario(
        "sigterm-validation",
        "SIGTERM to one rank in a validation",
        interrupt,
        _IN_VALIDATION,
        _ONLY_STOPS_SAVE,
        exit_codes.PREEMPTED,
        True,
    ),
    Scenario(
        "dead-lock", "a killed run has left its lock", interrupt, Fault("kill", "step", _NEXT)
    ),
    Scenario(
        "nan-stop",
        'a NaN gradient on one rank, guard.policy = "stop"',
        interrupt,
        _NAN,
        _STOP,
        exit_codes.GUARD,
    ),
    Scenario("nan-skip", 'the same, guard.policy = "skip"', nan_skip, _NAN, _SKIP),
    Scenario(
        "nan-rollback", 'the same, guard.policy = "rollback"', nan_rollback, _NAN_LATER, _ROLLBACK
    ),
    Scenario("full-disk", "no space for a save", full_disk, _FULL),
    Scenario("background-save", "no space for a save in the background", full_disk, _FULL),
    Scenario("other-ranks", "resume on one rank", other_ranks),
)
_WIDTH = max(len(scenario.name) for scenario in SCENARIOS)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    chosen = [one for one in SCENARIOS if not arguments.only or one.name in arguments.only]
    tiny = tiny_config(arguments.config, arguments.flags, arguments.ranks, arguments.compile)
    for line in tiny.notes:
        say(f"  {line}")
    folder = Path(tempfile.mkdtemp(prefix="titanlite-drill-"))
    results: list[dict[str, Any]] = []
    code = exit_codes.ERROR
    try:
        with stoppable():
            code = _play(Workspace(tiny, folder), chosen, results, arguments.style)
    except Stopped as stop:
        say(f"stopped by {stop}")
        code = 128 + stop.number
    finally:
        if code == exit_codes.ERROR:
            say(f"the runs, with their output in console.log: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if not arguments.json:
        return f"{sum(result['passed'] for result in results)} of {len(chosen)} passed", code
    record = {
        "config": arguments.config,
        "ranks": tiny.ranks,
        "passed": code == exit_codes.DONE,
        "faults": results,
    }
    return json.dumps({**record, "kept": str(folder) if folder.exists() else None}, indent=1), code


def _play(
    work: Workspace, chosen: Sequence[Scenario], results: list[dict[str, Any]], style: Style
) -> int:
    """Play the scenarios, and print and append the result of each. Return the exit code."""
    try:
        work.make_references()
    except RanksError as problem:
        say(f"{style.warn('FAIL')}    the run without a fault: {problem}")
        return exit_codes.ERROR
    for scenario in chosen:
        began = time.monotonic()
        passed = False
        try:
            told = scenario.play(work, work.begin(scenario.name), scenario)
            passed = True
        except RanksError as problem:
            told = str(problem)
        # An error of a check means that a run left something unexpected.
        except Exception as problem:
            told = repr(problem)
        seconds = time.monotonic() - began
        word = style.good("pass") if passed else style.warn("FAIL")
        say(f"{word}    {scenario.name:<{_WIDTH}}  {seconds:5.1f} s  {told}")
        results.append(
            {"name": scenario.name, "passed": passed, "seconds": round(seconds, 2), "told": told}
        )
    return exit_codes.DONE if all(result["passed"] for result in results) else exit_codes.ERROR
