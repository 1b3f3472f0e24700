"""Runs of one config that differ in flags, each in its own folder: for ladders and sweeps.

FOLDER/run.lock            keeps a second process out
FOLDER/NAME/               job.dump_folder of a run
FOLDER/NAME/console.log    what the run printed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titanlite import exit_codes, torchrun
from titanlite.config import trust
from titanlite.config.errors import ConfigError, Problem, refuse
from titanlite.config.load import read_text
from titanlite.config.loaded import LoadedConfig
from titanlite.contrib.processes import (
    Stopped,
    last_lines,
    run,
    stoppable,
    tell,
    training_environment,
)
from titanlite.metrics.tracker_base import RUN_IDS
from titanlite.run.config import RunConfig
from titanlite.runs import provenance
from titanlite.runs.attempts import read_attempts
from titanlite.runs.config_changes import config_changes
from titanlite.runs.lock import RunLock
from titanlite.runs.read import Run, RunError, read_run
from titanlite.runs.record import CONFIG

CONSOLE = "console.log"
#: Lines of a failed run's output that are shown.
LINES_SHOWN = 8
#: Seconds that the runs have for their last save after Ctrl-C.
GRACE_SECONDS = 240.0
#: A training loss is the mean of this part of the logged steps, the last ones.
_TAIL = 0.1
#: Keys of a run's config that do not change what it learns.
_MAY_DIFFER = ("job.dump_folder", "job.description", "launch.", "ladder.", "validation.freq")


class MemberError(ValueError):
    """Runs cannot start; the text names them and the remedy."""

    exit_code = exit_codes.CONFIG


@dataclass(frozen=True)
class Member:
    """One run. name: of its folder. flags: `--section.key=value`, over those that all share."""

    name: str
    flags: Sequence[str]

    def arguments(self, config_args: Sequence[str], folder: Path) -> list[str]:
        """Return its command line behind `titanlite train`."""
        return [*config_args, *self.flags, f"--job.dump_folder={folder / self.name}"]


@dataclass(frozen=True)
class MemberResult:
    """How a run stands, by its folder."""

    name: str
    #: done, diverged (a loss was not finite, or the guard ended it), failed, or unfinished.
    state: str
    steps: int
    #: The last validation loss, in nats per token. Without one it is the mean training loss over
    #: the last tenth of the logged steps. None: there is neither.
    loss: float | None
    reason: str

    @property
    def is_final(self) -> bool:
        return self.state in ("done", "diverged")


def check_members(
    members: Sequence[Member], config_args: Sequence[str], folder: Path, nproc: int
) -> list[RunConfig]:
    """Check the config of each run as `titanlite config check` does, and its folder.

    Raises MemberError with the problems of the first run that cannot start.
    """
    from titanlite.resolve.load import check_config

    runs = []
    for member in members:
        own = folder / member.name
        try:
            config, run = check_config(member.arguments(config_args, folder), nproc)
            refuse([*_shared(run, own), *_changes(config, run, own)])
        except ConfigError as error:
            raise MemberError(f"{member.name} cannot start; nothing was started\n{error}") from None
        runs.append(run)
    return runs


def _shared(run: RunConfig, own: Path) -> list[Problem]:
    found = {"checkpoint.folder": run.checkpoint.folder, "checkpoint.hub": run.checkpoint.hub}
    if Path(run.checkpoint.folder).resolve().is_relative_to(own.resolve()):
        del found["checkpoint.folder"]
    hint = "leave it out, so that each run has its own"
    return [
        Problem("does-not-fit", key, f"all runs would share {path!r}", hint)
        for key, path in found.items()
        if path
    ]


def _changes(config: LoadedConfig, run: RunConfig, own: Path) -> list[Problem]:
    """Return the keys in which an earlier run in the folder differs, with ranks where the batch
    follows from them.
    """
    try:
        old = (own / CONFIG).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    # The file of an older titanlite may have other keys.
    before = read_text(old, own / CONFIG, origin=trust.foreign(False))[0]
    found = config_changes(before.to_toml(), provenance.public_config(config.to_toml()))
    told = {key: change for key, change in found.items() if not key.startswith(_MAY_DIFFER)}
    attempts = read_attempts(own)
    ranks = attempts[-1].get("ranks") if attempts else None
    if ranks and run.training.global_batch_size == -1 and ranks != run.mesh.world_size:
        told["ranks"] = f"{ranks} -> {run.mesh.world_size}"
    hint = f"name another folder, or delete {own} to run it again"
    return [Problem("does-not-fit", key, change, hint, str(own)) for key, change in told.items()]


def run_members(
    members: Sequence[Member], config_args: Sequence[str], folder: Path, nproc: int = 1
) -> list[MemberResult]:
    """Run the members that are not done, one after the other; return how all stand, in their order.

    A stopped run resumes from its checkpoint, or starts again without one; one that fails does not
    end the others. config_args: files and flags that all share. nproc: ranks of each.

    Call it from the main thread. Raises MemberError before any run starts, LockedError for a folder
    of another process, and `processes.Stopped` on Ctrl-C and SIGTERM, when the run has ended.
    """
    check_members(members, config_args, folder, nproc)
    results = []
    try:
        with stoppable(), RunLock(folder, "folder"):
            for member in members:
                result = result_of(member, folder)
                if result.is_final:
                    tell(f"{member.name} is {result.state} already")
                else:
                    result = _run(member, config_args, folder, nproc)
                results.append(result)
    except OSError as error:
        raise MemberError(f"cannot write to {folder}: {error.strerror or error}") from None
    return results


def _run(member: Member, config_args: Sequence[str], folder: Path, nproc: int) -> MemberResult:
    own = folder / member.name
    own.mkdir(parents=True, exist_ok=True)
    environment = training_environment(GRACE_SECONDS)
    # With them all runs would be one run at a tracker.
    for name in RUN_IDS.values():
        environment.pop(name, None)
    command = torchrun.command(nproc, ["train", *member.arguments(config_args, folder)])
    tell(f"{member.name} starts; its output: {own / CONSOLE}")
    try:
        code = run(command, own / CONSOLE, environment=environment, grace=GRACE_SECONDS)
    except Stopped as stop:
        tell(f"stopped by {stop.name}: the run has saved and ended; the same command goes on")
        raise
    result = result_of(member, folder, code)
    lines = [f"{result.name} {result.state} after step {result.steps} {result.reason}".rstrip()]
    if result.state == "failed":
        lines += [f"    {line}" for line in last_lines(own / CONSOLE, LINES_SHOWN)]
    tell("\n".join(lines))
    return result


def result_of(member: Member, folder: Path, exit_code: int | None = None) -> MemberResult:
    """Return how a run stands. folder: the one above it. exit_code: of a start just now."""
    run = Run(folder / member.name)
    with suppress(RunError):
        run = read_run(run.folder)
    losses = [row["loss"] for row in run.training]
    validations = [row["validation_loss"] for row in run.validations]
    tail = validations[-1:] or losses[-max(round(len(losses) * _TAIL), 1) :]
    state = _state(run, exit_code, [*losses[-1:], *validations[-1:]])
    reason = run.reason.partition("\n")[0] or f"exit code {exit_code}"
    return MemberResult(
        name=member.name,
        state=state,
        steps=run.step or 0,
        loss=math.fsum(tail) / len(tail) if tail else None,
        reason=reason if state in ("failed", "diverged") else "",
    )


def _state(run: Run, exit_code: int | None, losses: Sequence[float]) -> str:
    is_whole = run.state == "done" and (run.step or 0) >= (run.steps or 0)
    if run.state == "stopped" or (is_whole and not all(map(math.isfinite, losses))):
        return "diverged"
    if is_whole:
        return "done"
    has_failed = exit_code or (exit_code is None and run.state == "failed")
    return "failed" if has_failed and run.state != "preempted" else "unfinished"
