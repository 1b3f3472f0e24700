"""The rehearsals: each does harm to a small run and asks whether it is still the run that nothing happened to."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.checkpoint.manifest import is_valid, step_folder, steps_in
from titanlite.drill.compare import unequal_tensors
from titanlite.drill.ranks import Ranks, train
from titanlite.drill.shrink import HALF, INTERVAL, STEPS, Toy
from titanlite.drill.strike import Strike
from titanlite.observe.metrics import read_metrics

#: Relative; another number of ranks adds up in another order.
_ROUNDING = {"float32": 1e-4, "bfloat16": 5e-2}


class Failed(Exception):
    """A rehearsal did not go as it must; the text says what was wrong."""


@dataclass
class Stage:
    """Where the rehearsals of one drill play: a run without harm, and the first half of one, to begin from."""

    toy: Toy
    folder: Path
    consoles: list[Path] = field(default_factory=list)

    @property
    def whole(self) -> Path:
        return self.folder / "undisturbed"

    @property
    def half(self) -> Path:
        return self.folder / "half"

    def make_reference(self) -> None:
        """Raises Failed when the toy does not even train."""
        self.end(self.whole)
        self.end(self.half, f"--training.steps={HALF}")
        for run, last in ((self.whole, STEPS), (self.half, HALF)):
            check(last in steps_in(run / "checkpoint"), f"a run without harm wrote no checkpoint of step {last}")

    def begin(self, name: str) -> Path:
        """A run folder with the first half in it."""
        run = self.folder / name
        shutil.copytree(self.half, run)
        return run

    def start(self, run: Path, *more: str, strike: Strike | None = None, alone: bool = False) -> tuple[list[int], str]:
        """One start to its end: exit codes by rank, and what was printed."""
        arguments = self.toy.alone if alone else self.toy.arguments
        run.mkdir(exist_ok=True)
        return train(
            [*arguments, f"--job.dump_folder={run}", *more], 1 if alone else self.toy.ranks, console(run), strike
        )

    def end(self, run: Path, *more: str, resumed: int | None = None) -> str:
        """A start without harm that must come to its end; what was printed. resumed: the step it must go on from."""
        codes, text = self.start(run, *more)
        check(codes == [exit_codes.DONE] * len(codes), f"a start without harm ended with {codes}", text)
        if resumed is not None:
            went_on(text, resumed)
        return text

    def same(self, run: Path) -> None:
        """Raises Failed unless a run is, step by step and bit by bit, the one that nothing happened to."""
        ours, theirs = records(run), records(self.whole)
        kinds = [(step, *(name for name, _ in figures)) for step, *figures in ours]
        twice = sorted({kind[0] for kind in kinds if kinds.count(kind) > 1})
        check(not twice, f"metrics.jsonl has steps {twice} more than once")
        unlike = sorted({step for step, *_ in set(ours) ^ set(theirs)})
        check(not unlike, f"steps {unlike} have other numbers than in the run that nothing happened to")
        names = unequal_tensors(step_folder(run / "checkpoint", STEPS), step_folder(self.whole / "checkpoint", STEPS))
        check(not names, f"{len(names)} tensors differ at the end, {', '.join(names[:3])} among them")


def console(run: Path) -> Path:
    return run / "console.log"


def check(fine: bool, problem: str, text: str = "") -> None:
    """Raises Failed with the problem, and with the last lines of an output."""
    if not fine:
        last = "".join(f"\n    {line}" for line in text.splitlines()[-6:])
        raise Failed(problem + (":" + last if last else ""))


def went_on(text: str, step: int) -> None:
    found = re.findall(r"resumed from step (\d+)", text)
    check(found == [str(step)], f"the next start resumed from step {', '.join(found) or 'none'}, not {step}", text)


def records(run: Path) -> list[tuple[Any, ...]]:
    """The rows of metrics.jsonl, a step's and its validation's, but for times and memory."""
    kept = ("loss", "grad_norm", "lr", "tokens_seen", "validation_loss", "validation_tokens")
    rows = read_metrics(run / "metrics.jsonl")
    return [(row["step"], *((key, row[key]) for key in kept if key in row)) for row in rows]


def resume(stage: Stage) -> str:
    run = stage.begin("resume")
    stage.end(run, resumed=HALF)
    stage.same(run)
    return f"{HALF} + {STEPS - HALF} steps are the {STEPS} of an undisturbed run, bit for bit"


def _killed_in_a_save(stage: Stage, name: str, at: str, rank: int, *more: str) -> None:
    run = stage.begin(name)
    struck = HALF + INTERVAL
    codes, text = stage.start(run, *more, strike=Strike("kill", struck, rank, at))
    check(codes[rank] == -signal.SIGKILL, f"the save of step {struck} did not come to {at!r}: exit codes {codes}", text)
    newest = max(steps_in(run / "checkpoint"))
    if at.startswith("purge"):
        # An old one goes when a new one is known to be good, which may be a save later.
        check(newest >= struck, f"the newest checkpoint is of step {newest}", text)
    else:
        check(newest == HALF, f"the newest checkpoint is of step {newest}, not {HALF}", text)
    stage.end(run, *more, resumed=newest)
    stage.same(run)


def kill_shard(stage: Stage) -> str:
    _killed_in_a_save(stage, "kill-shard", "shard half", stage.toy.ranks - 1)
    return "killed while a shard was written: the checkpoint before is used, same end"


def kill_rename(stage: Stage) -> str:
    _killed_in_a_save(stage, "kill-rename", "rename", 0)
    return "killed before the finished checkpoint had its name: the one before is used, same end"


def kill_purge(stage: Stage) -> str:
    _killed_in_a_save(stage, "kill-purge", "purge half", 0, "--checkpoint.keep_latest_k=1")
    return "killed while old checkpoints were deleted: the new one is used, same end"


def kill_rank(stage: Stage) -> str:
    run = stage.begin("kill-rank")
    began = time.monotonic()
    codes, text = stage.start(run, strike=Strike("die", HALF + 1, stage.toy.ranks - 1))
    seconds = time.monotonic() - began
    check(codes[-1] == -signal.SIGKILL, f"the rank was not killed: exit codes {codes}", text)
    others = codes[:-1]
    check(all(code == exit_codes.LOST_PEER for code in others), f"the other ranks ended with {others}", text)
    stage.end(run, resumed=HALF)
    stage.same(run)
    return f"a rank killed in a step: all had ended {seconds:.0f} s after the start, same end"


def _damaged(stage: Stage, name: str, harm: Callable[[Path], Path]) -> None:
    run = stage.begin(name)
    newest = step_folder(run / "checkpoint", HALF)
    file = harm(newest)
    text = stage.end(run, resumed=HALF - INTERVAL)
    check("passed over: " in text and file.name in text, f"the start did not say what is wrong with {file.name}", text)
    stage.same(run)
    aside = list((run / "checkpoint").glob(f"step-{HALF}.invalid-*"))
    check(len(aside) == 1, "the damaged checkpoint was not kept aside")


def _largest_shard(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def truncated_shard(stage: Stage) -> str:
    def harm(folder: Path) -> Path:
        path = _largest_shard(folder)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return path

    _damaged(stage, "truncated-shard", harm)
    return "named, the checkpoint before is used, same end"


def flipped_bit(stage: Stage) -> str:
    def harm(folder: Path) -> Path:
        path = _largest_shard(folder)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return path

    _damaged(stage, "flipped-bit", harm)
    return "one bit of a shard: named, the checkpoint before is used, same end"


def missing_manifest(stage: Stage) -> str:
    def harm(folder: Path) -> Path:
        (folder / "manifest.json").unlink()
        return folder / "manifest.json"

    _damaged(stage, "missing-manifest", harm)
    return "named, the checkpoint before is used, same end"


def none_left(stage: Stage) -> str:
    run = stage.begin("none-left")
    for step in steps_in(run / "checkpoint"):
        _largest_shard(step_folder(run / "checkpoint", step)).unlink()
    before = records(run)
    codes, text = stage.start(run, "--checkpoint.start=resume")
    check(set(codes) == {exit_codes.CHECKPOINT}, f"it ended with {codes}, not {exit_codes.CHECKPOINT}", text)
    check(records(run) == before, "it trained, though there was nothing to resume from", text)
    return f"no good checkpoint left: refused with exit code {exit_codes.CHECKPOINT}, nothing trained"


def sigterm(stage: Stage) -> str:
    run = stage.begin("sigterm")
    codes, text = stage.start(run, strike=Strike("term", HALF + 1, stage.toy.ranks - 1))
    check(set(codes) == {exit_codes.PREEMPTED}, f"it ended with {codes}, not {exit_codes.PREEMPTED}", text)
    last = max(steps_in(run / "checkpoint"))
    check(HALF < last < STEPS, f"the checkpoint it left is of step {last}", text)
    stage.end(run, resumed=last)
    stage.same(run)
    return f"SIGTERM to one rank: all saved step {last} with exit code {exit_codes.PREEMPTED}, same end"


def second_run(stage: Stage) -> str:
    run = stage.begin("second-run")
    arguments = [*stage.toy.arguments, f"--job.dump_folder={run}"]
    with Ranks(arguments, stage.toy.ranks, console(run), Strike("pause", HALF + 1, 0)) as first:
        first.until_stopped(0)
        codes, text = train(
            arguments, stage.toy.ranks, run / "second.log", grace=1.0
        )  # only rank 0 asks for the folder
        check(codes[0] == exit_codes.CHECKPOINT, f"the second run ended with {codes}", text)
        check(f"process {first.pid(0)}" in text, "the second run does not name the first", text)
        first.send(signal.SIGCONT)
        codes = first.wait()
        check(codes == [exit_codes.DONE] * len(codes), f"the first run ended with {codes}", first.output())
    stage.same(run)
    return "refused by name while the first is alive, which goes on unharmed"


def dead_lock(stage: Stage) -> str:
    run = stage.begin("dead-lock")
    codes, text = stage.start(run, strike=Strike("die", HALF + 1, 0))
    check(codes[0] == -signal.SIGKILL and (run / "run.lock").exists(), f"no lock was left: {codes}", text)
    text = stage.end(run, resumed=HALF)
    check("the lock of a run that has died is taken over" in text, "the take-over was not told", text)
    stage.same(run)
    return "the lock of a killed run is taken over, same end"


def nan_gradient(stage: Stage) -> str:
    run = stage.begin("nan-gradient")
    codes, text = stage.start(run, strike=Strike("nan", HALF + 1, stage.toy.ranks - 1))
    check(set(codes) == {exit_codes.GUARD}, f"it ended with {codes}, not {exit_codes.GUARD}", text)
    check(max(steps_in(run / "checkpoint")) == HALF, "a checkpoint was written after the bad step", text)
    stage.end(run, resumed=HALF)
    stage.same(run)
    return f"NaN in one rank's gradient: stopped with exit code {exit_codes.GUARD}, weights untouched, same end"


def full_disk(stage: Stage) -> str:
    run = stage.begin("full-disk")
    struck = HALF + INTERVAL
    codes, text = stage.start(run, strike=Strike("full", struck, stage.toy.ranks - 1))
    check(codes == [exit_codes.DONE] * len(codes), f"it ended with {codes}", text)
    check(f"step {struck}: NO CHECKPOINT WAS WRITTEN" in text, "the failed save was not told", text)
    there = [step for step in steps_in(run / "checkpoint") if is_valid(step_folder(run / "checkpoint", step))]
    check(struck not in there and STEPS in there, f"there are checkpoints of the steps {there}", text)
    stage.same(run)
    return "a save that does not fit is told, training goes on, the next one is there"


def other_ranks(stage: Stage) -> str:
    run = stage.begin("other-ranks")
    codes, text = stage.start(run, alone=True)
    check(codes == [exit_codes.DONE], f"on one rank it ended with {codes}", text)
    went_on(text, HALF)
    tolerance = _ROUNDING[stage.toy.plans.shard.param_dtype]
    whole = {row[0]: dict(row[1:]) for row in records(stage.whole) if "loss" in dict(row[1:])}
    for step, *rest in records(run):
        figures = dict(rest)
        if "loss" in figures:
            gap = abs(figures["loss"] - whole[step]["loss"])
            check(gap <= tolerance * whole[step]["loss"], f"the loss of step {step} differs by {gap:.2g}")
            check(figures["tokens_seen"] == whole[step]["tokens_seen"], f"step {step} has seen other tokens")
    places = [_place(folder / "checkpoint") for folder in (run, stage.whole)]
    check(places[0] == places[1], f"the place in the text is {places[0]}, not {places[1]}")
    return f"saved on {stage.toy.ranks}, resumed on 1: same place in the text, losses to rounding"


def _place(root: Path) -> object:
    return json.loads((step_folder(root, STEPS) / "manifest.json").read_text())["train"]["data"]


@dataclass(frozen=True)
class Rehearsal:
    """One fault."""

    name: str
    about: str
    #: Raises Failed; the line that tells of its success.
    play: Callable[[Stage], str]
    least_ranks: int = 1


REHEARSALS = (
    Rehearsal("resume", "stop and start again, without any harm", resume),
    Rehearsal("kill-shard", "SIGKILL while a shard is written", kill_shard),
    Rehearsal("kill-rename", "SIGKILL before a finished checkpoint gets its name", kill_rename),
    Rehearsal("kill-purge", "SIGKILL while old checkpoints are deleted", kill_purge),
    Rehearsal("kill-rank", "SIGKILL of one rank in a step", kill_rank, least_ranks=2),
    Rehearsal("truncated-shard", "half of the newest checkpoint's largest file is gone", truncated_shard),
    Rehearsal("flipped-bit", "one bit of the newest checkpoint has changed", flipped_bit),
    Rehearsal("missing-manifest", "the newest checkpoint has no manifest", missing_manifest),
    Rehearsal("none-left", "no checkpoint is good, and a resume is demanded", none_left),
    Rehearsal("sigterm", "SIGTERM to one rank", sigterm),
    Rehearsal("second-run", "another run is started in the same folder", second_run),
    Rehearsal("dead-lock", "a killed run has left its lock", dead_lock),
    Rehearsal("nan-gradient", "a gradient that is not a number on one rank", nan_gradient),
    Rehearsal("full-disk", "no space for a save", full_disk),
    Rehearsal("other-ranks", "resume on one rank", other_ranks, least_ranks=2),
)


def chosen(names: Sequence[str], ranks: int) -> list[Rehearsal]:
    """Those named, or all that so many ranks can play."""
    if names:
        return [rehearsal for rehearsal in REHEARSALS if rehearsal.name in names]
    return [rehearsal for rehearsal in REHEARSALS if ranks >= rehearsal.least_ranks]
