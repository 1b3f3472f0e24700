"""The rehearsals: each does harm to a small run and asks whether it is still the run that nothing happened to."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.checkpoint.manifest import is_valid, step_folder, steps_in
from titanlite.drill.compare import unequal_tensors
from titanlite.drill.ranks import Ranks, train
from titanlite.drill.shrink import HALF, INTERVAL, STEPS
from titanlite.drill.stage import Stage, check, console, records, went_on
from titanlite.drill.strike import LOADER_ERROR, Strike

#: Relative; another number of ranks adds up in another order.
_ROUNDING = {"float32": 1e-4, "bfloat16": 5e-2}
#: In which a rank that raises is to have ended all; on a busy machine, in as long as two half runs take.
_END_SECONDS = 10.0
#: Without progress until it is reported who hangs; less where the config's collectives wait less.
_STALL_SECONDS = 5.0
#: A checkpoint that only a signal asks for.
_NO_SAVES = "--checkpoint.interval=1000"


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
    _killed_in_a_save(stage, "kill-rename", "manifest named", 0)
    return "killed before the finished checkpoint had its manifest: the one before is used, same end"


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


def sigterm_validation(stage: Stage) -> str:
    run, victim = stage.new("sigterm-validation"), stage.toy.ranks - 1
    codes, text = stage.start(run, _NO_SAVES, strike=Strike("term in validation", HALF, victim))
    check(set(codes) == {exit_codes.PREEMPTED}, f"it ended with {codes}, not {exit_codes.PREEMPTED}", text)
    check(f"validation at {HALF} was broken off" in text, f"the validation of step {HALF} was not broken off", text)
    there = steps_in(run / "checkpoint")
    check(there[-1:] == [HALF], f"there are checkpoints of the steps {there}, the last one is not of {HALF}", text)
    stage.end(run, resumed=HALF)
    stage.same(run)
    return f"broken off, step {HALF} saved with exit code {exit_codes.PREEMPTED}, done by the next start, same end"


def loader_raises(stage: Stage) -> str:
    run, victim, step = stage.begin("loader-raises"), stage.toy.ranks - 1, HALF + 2
    mark = run / "struck"
    codes, text = stage.start(run, strike=Strike("raise", step, victim, mark=str(mark)))
    check(mark.exists(), f"no text was read for step {step}: exit codes {codes}", text)
    seconds = time.time() - mark.stat().st_mtime
    check(codes[victim] == exit_codes.ERROR, f"the rank that raised ended with {codes[victim]}", text)
    others = codes[:victim]
    check(all(code == exit_codes.LOST_PEER for code in others), f"the other ranks ended with {others}", text)
    said = rf"ERROR: rank {victim} \(.+\) raised in data of step {step}, at .*: all ranks end"
    check(re.search(said, text) is not None, f"rank 0 did not say that rank {victim} raised in its loader", text)
    last = text.splitlines()[-1]
    check(LOADER_ERROR in last, f"the last line is not what rank {victim} raised", text)
    most = max(_END_SECONDS, 2 * stage.half_run_seconds)
    check(seconds <= most, f"it took {seconds:.0f} s until all had ended, more than {most:.0f}", text)
    stage.end(run, resumed=HALF)
    stage.same(run)
    codes_told = f"exit code {exit_codes.ERROR}, the others' {exit_codes.LOST_PEER}"
    return f"rank {victim} named, its error the last line, all had ended in {seconds:.1f} s ({codes_told}), same end"


def loader_hangs(stage: Stage) -> str:
    run, victim, step = stage.begin("loader-hangs"), stage.toy.ranks - 1, HALF + 2
    mark = run / "struck"
    deadline = max(_STALL_SECONDS, stage.half_run_seconds)  # on a busy machine every step takes a while
    deadline = min(deadline, stage.toy.plans.comm.train_timeout_seconds / 2)
    beat = min(stage.toy.plans.stall.heartbeat_seconds, deadline / 2)
    more = [f"--stall.deadline_seconds={deadline:.3f}", f"--stall.heartbeat_seconds={beat:.3f}"]
    arguments = [*stage.toy.arguments, f"--job.dump_folder={run}", *more]
    with Ranks(arguments, stage.toy.ranks, console(run), Strike("hang", step, victim, mark=str(mark))) as ranks:
        report = ranks.until(r"no progress for \d+ s:\n((?:  .*\n)+)(.*)\n")
        mark.unlink(missing_ok=True)  # and so ends it
        table, sentence = report.groups()
        named = rf"rank {victim} \(.+\) has been in data of step {step} for "
        check(re.match(named, sentence) is not None, f"not rank {victim} in data of step {step} was named", report[0])
        row = rf"^ +{victim} +\S+ +{step} +data "
        check(re.search(row, table, re.MULTILINE) is not None, f"the table has no rank {victim} in data", report[0])
        codes = ranks.wait()
        check(codes == [exit_codes.DONE] * len(codes), f"when it went on, the run ended with {codes}", ranks.output())
    stage.same(run)
    return f"rank {victim} named, in data of step {step}, after {deadline:.0f} s without progress; it goes on, same end"


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


def _bad_step(stage: Stage, name: str, policy: str, step: int, *more: str) -> tuple[Path, list[int], str]:
    """A run from the first half on with NaN in one rank's gradient, under a policy; its exit codes and output."""
    run = stage.begin(name)
    flags = [f"--guard.policy={policy}", "--guard.max_skips=1", *more]
    return run, *stage.start(run, *flags, strike=Strike("nan", step, stage.toy.ranks - 1))


def _policy(stage: Stage, name: str) -> str:
    own = stage.toy.plans.guard.policy == name
    return f'guard.policy = "{name}"{", as in this config" if own else ""}'


def _bad_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "guard.jsonl").read_text().splitlines()]


def nan_stop(stage: Stage) -> str:
    run, codes, text = _bad_step(stage, "nan-stop", "stop", HALF + 1)
    check(set(codes) == {exit_codes.GUARD}, f"it ended with {codes}, not {exit_codes.GUARD}", text)
    check(max(steps_in(run / "checkpoint")) == HALF, "a checkpoint was written after the bad step", text)
    stage.end(run, resumed=HALF)
    stage.same(run)
    return f"{_policy(stage, 'stop')}: exit code {exit_codes.GUARD}, weights untouched, same end"


def nan_skip(stage: Stage) -> str:
    bad = HALF + 1
    every = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
    run, codes, text = _bad_step(stage, "nan-skip", "skip", bad, *every)
    check(codes == [exit_codes.DONE] * len(codes), f"it ended with {codes}", text)
    rows = [(row["step"], row["action"]) for row in _bad_rows(run)]
    check(rows == [(bad, "skip")], f"guard.jsonl has {rows}", text)
    before, struck, after, end = (step_folder(run / "checkpoint", step) for step in (HALF, bad, bad + 1, STEPS))
    changed = unequal_tensors(before, struck)
    check(not changed, f"the bad step changed {len(changed)} tensors, {', '.join(changed[:3])} among them", text)
    check(bool(unequal_tensors(struck, after)), f"step {bad + 1} changed nothing", text)
    steps = [step for step, *figures in records(run) if "loss" in dict(figures)]
    check(steps == list(range(1, STEPS + 1)) and is_valid(end), f"metrics.jsonl has the steps {steps}", text)
    return f"{_policy(stage, 'skip')}: step {bad} changed no weight or moment, the run goes on to its end"


def nan_rollback(stage: Stage) -> str:
    bad = HALF + 2
    run, codes, text = _bad_step(stage, "nan-rollback", "rollback", bad)
    check(codes == [exit_codes.DONE] * len(codes), f"it ended with {codes}", text)
    rows = [(row["step"], row["action"], row.get("back_to_step"), row.get("left_out")) for row in _bad_rows(run)]
    own = [f"{first}-{last}" for first, last in stage.toy.plans.data.skip_steps]
    # Steps of the data order, which are others than the run's where the config leaves out some of its own.
    stretch = rows[0][-1] if own and rows else f"{HALF + 1}-{bad}"
    check(rows == [(bad, "rollback", HALF, stretch)], f"guard.jsonl has {rows}", text)
    # What it must be now: a run that goes on from that checkpoint and was told to leave the stretch out.
    other = stage.begin("nan-left-out")
    stage.end(other, f"--data.skip_steps={json.dumps([*own, stretch])}", resumed=HALF)
    stage.same(run, other)
    return f"{_policy(stage, 'rollback')}: back to step {HALF}, then as if text {stretch} had been left out"


def _no_space(stage: Stage, run: Path, *more: str) -> str:
    """A run through one save that does not fit; what was printed."""
    struck, victim = HALF + INTERVAL, stage.toy.ranks - 1
    codes, text = stage.start(run, *more, strike=Strike("full", struck, victim))
    check(codes == [exit_codes.DONE] * len(codes), f"it ended with {codes}", text)
    told = re.search(rf"step {struck}: NO CHECKPOINT WAS WRITTEN: .*rank {victim}: .*", text)
    check(told is not None, "the failed save was not told", text)
    there = [step for step in steps_in(run / "checkpoint") if is_valid(step_folder(run / "checkpoint", step))]
    wanted = struck not in there and HALF in there and STEPS in there
    check(wanted, f"there are checkpoints of the steps {there}", text)
    stage.same(run)
    return text


def full_disk(stage: Stage) -> str:
    _no_space(stage, stage.begin("full-disk"))
    return "a save that does not fit is told, training goes on, the next one is there"


def background_save(stage: Stage) -> str:
    own = stage.toy.plans.checkpoint.async_mode
    mode = "async" if own == "disabled" else own
    flags = [f"--checkpoint.async_mode={mode}", "--checkpoint.keep_latest_k=2"]
    text = _no_space(stage, stage.new("background-save"), *flags)
    begun = text.find(f"checkpoint of step {HALF + INTERVAL} copied in ")
    check(0 <= begun < text.find("NO CHECKPOINT WAS WRITTEN"), "the save was not in the background", text)
    return f'async_mode = "{mode}": told, step {HALF} stays, training goes on, the next save is there'


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
    Rehearsal("kill-rename", "SIGKILL before a finished checkpoint gets its manifest", kill_rename),
    Rehearsal("kill-purge", "SIGKILL while old checkpoints are deleted", kill_purge),
    Rehearsal("kill-rank", "SIGKILL of one rank in a step", kill_rank, least_ranks=2),
    Rehearsal("truncated-shard", "half of the newest checkpoint's largest file is gone", truncated_shard),
    Rehearsal("flipped-bit", "one bit of the newest checkpoint has changed", flipped_bit),
    Rehearsal("missing-manifest", "the newest checkpoint has no manifest", missing_manifest),
    Rehearsal("none-left", "no checkpoint is good, and a resume is demanded", none_left),
    Rehearsal("sigterm", "SIGTERM to one rank", sigterm),
    Rehearsal("sigterm-validation", "SIGTERM to one rank in a validation", sigterm_validation),
    Rehearsal("loader-raises", "an error in one rank's loader", loader_raises, least_ranks=2),
    Rehearsal("loader-hangs", "storage that does not answer one rank's loader", loader_hangs),
    Rehearsal("second-run", "another run is started in the same folder", second_run),
    Rehearsal("dead-lock", "a killed run has left its lock", dead_lock),
    Rehearsal("nan-stop", 'a gradient that is not a number on one rank, guard.policy = "stop"', nan_stop),
    Rehearsal("nan-skip", 'the same, guard.policy = "skip"', nan_skip),
    Rehearsal("nan-rollback", 'the same, guard.policy = "rollback"', nan_rollback),
    Rehearsal("full-disk", "no space for a save", full_disk),
    Rehearsal("background-save", "no space for a save in the background", background_save),
    Rehearsal("other-ranks", "resume on one rank", other_ranks, least_ranks=2),
)


def chosen(names: Sequence[str], ranks: int) -> list[Rehearsal]:
    """Those named, or all that so many ranks can play."""
    if names:
        return [rehearsal for rehearsal in REHEARSALS if rehearsal.name in names]
    return [rehearsal for rehearsal in REHEARSALS if ranks >= rehearsal.least_ranks]
