"""A member of a sweep: one run, its folder, and what its folder tells of it.

FOLDER/run.lock            of the sweep
FOLDER/NAME/               the run's job.dump_folder
FOLDER/NAME/console.log    what the run printed
FOLDER/NAME/member.json    flags and exit code of its last start by a sweep
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import Any, Literal

from titanlite import exit_codes
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.loaded import LoadedConfig
from titanlite.metrics.trackers.tracker import RUN_IDS
from titanlite.runs import provenance
from titanlite.runs.logs import FOLDER as LOGS
from titanlite.runs.read import Run, RunError, read_run
from titanlite.runs.record import CONFIG
from titanlite.start.derive import RunConfig
from titanlite.tools.processes import last_lines
from titanlite.utils import atomic_write, parse_json

RECORD = "member.json"
CONSOLE = "console.log"
#: Lines of a failed run's output that are kept.
LINES_KEPT = 8
#: A training loss is the mean of this part of the logged steps, the last ones.
TAIL = 0.1
#: Exit codes of a run that somebody stopped; it is not at fault.
_STOPPED = (*exit_codes.STOPPED, exit_codes.INTERRUPTED)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+,-]*")
#: Keys of a run's config that do not change what it learns.
_MAY_DIFFER = ("job.dump_folder", "job.description", "launch.", "ladder.")

State = Literal["done", "diverged", "failed", "running", "unfinished"]


class SweepError(ValueError):
    """A sweep cannot run as it was asked for; the text names the member and the remedy."""

    exit_code = exit_codes.CONFIG


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    name: of its folder. flags: `--section.key=value`, over the layers that all members share.
    """

    name: str
    flags: Sequence[str]

    def arguments(self, config_args: Sequence[str], folder: Path) -> list[str]:
        """Return the command line of its run, behind `titanlite train`.

        config_args: files and flags that all members share. folder: of the sweep.
        """
        return [*config_args, *self.flags, f"--job.dump_folder={folder / self.name}"]


@dataclass(frozen=True)
class CheckedMember:
    """A member whose config was checked."""

    member: Member
    config: LoadedConfig
    run: RunConfig

    @property
    def name(self) -> str:
        return self.member.name


@dataclass(frozen=True)
class MemberResult:
    """How a member stands, by its folder.

    Losses are in nats per token; None: there is none.
    """

    name: str
    flags: tuple[str, ...]
    #: done: it reached its last step. diverged: a loss was not finite, or the guard ended it.
    #: failed: it ended otherwise. unfinished: it never began, or was stopped.
    state: State
    #: Steps that are done.
    steps: int = 0
    #: Mean over the last tenth of the logged steps.
    training_loss: float | None = None
    #: Of the last logged step.
    last_loss: float | None = None
    #: Of the last validation, and the lowest of all.
    validation_loss: float | None = None
    best_validation_loss: float | None = None
    #: Of all attempts, without pauses.
    seconds: float = 0.0
    #: Tokens seen over all ranks.
    tokens: int = 0
    #: Of its last start by a sweep, negative for a signal; None: unknown.
    exit_code: int | None = None
    #: Why it failed or diverged, in a line.
    reason: str = ""
    #: The last lines of a failed run's output.
    last_lines: tuple[str, ...] = ()

    @property
    def diverged(self) -> bool:
        return self.state == "diverged"

    @property
    def is_final(self) -> bool:
        """Whether another start would change nothing."""
        return self.state in ("done", "diverged")

    @property
    def loss(self) -> float | None:
        """The validation loss; without one the training loss."""
        return self.training_loss if self.validation_loss is None else self.validation_loss


def check_members(
    members: Sequence[Member],
    config_args: Sequence[str],
    folder: Path,
    nproc: int,
    *,
    here: bool = True,
) -> list[CheckedMember]:
    """Check the config of each member, as `titanlite config check` does.

    here: also that this machine has its files and packages, and its variables are set.

    Raises SweepError with the problems of all members, and ConfigError if all have the same ones.
    """
    from titanlite.start.fit import check_config

    _check_names(members)
    checked: list[CheckedMember] = []
    refused: dict[str, ConfigError] = {}
    for member in members:
        try:
            argv = member.arguments(config_args, folder)
            config, run = check_config(argv, nproc, training=here, defer=not here)
            _check_folders(run, folder / member.name)
        except ConfigError as error:
            refused[member.name] = error
        else:
            checked.append(CheckedMember(member, config, run))
    if refused:
        raise _refusal(refused, len(members))
    _check_hubs(checked)
    return checked


def _check_hubs(members: Sequence[CheckedMember]) -> None:
    """Refuse a repository that several runs would push to."""
    # The hub does not distinguish cases.
    counts = Counter(one.run.checkpoint.hub.lower() for one in members)
    del counts[""]
    problems = []
    for hub, count in counts.items():
        if count > 1:
            message = f"{count} runs would push to {hub}"
            hint = "leave it out, and give a run that is done to `titanlite push`"
            problems.append(Problem("", "checkpoint.hub", message, hint))
    if problems:
        raise ConfigError(problems)


def _check_names(members: Sequence[Member]) -> None:
    """Refuse names that are no plain names of folders, and those given twice."""
    if not members:
        raise SweepError("a sweep needs a member; none is given")
    seen: set[str] = set()
    for member in members:
        if not NAME.fullmatch(member.name) or len(member.name) > 200:
            raise SweepError(
                f"{member.name!r} cannot name a member: take letters, digits and . _ = + , -, at "
                "most 200, a letter or digit first"
            )
        # Some file systems do not distinguish them.
        if member.name.lower() in seen:
            raise SweepError(f"two members have the name {member.name!r}; each needs its own")
        seen.add(member.name.lower())


def _check_folders(run: RunConfig, folder: Path) -> None:
    """Refuse a place that the runs would share. folder: of this run."""
    paths = {
        "checkpoint.folder": run.checkpoint.folder,
        "job.save_config_file": run.job.save_config_file,
        "metrics.save_tb_folder": run.metrics.save_tb_folder,
        "profiling.save_traces_folder": run.profiling.save_traces_folder,
        "profiling.save_memory_snapshot_folder": run.profiling.save_memory_snapshot_folder,
    }
    problems = []
    for key, path in paths.items():
        # Without "..", which would lead out of the folder again.
        if path and not Path(normpath(path)).is_relative_to(normpath(folder)):
            message = f"all runs would share {path!r}"
            hint = "give a path below job.dump_folder, as the default is: each run has its own"
            problems.append(Problem("", key, message, hint))
    problems += _shared_ids(run)
    if problems:
        raise ConfigError(problems)


def _shared_ids(run: RunConfig) -> Iterator[Problem]:
    """Find variables by which all runs would be one run at a service of `metrics.trackers`."""
    for name in run.metrics.tracker_names:
        variable = RUN_IDS.get(name)
        if variable in os.environ:
            message = f"all runs would write into the tracked run that {variable} names"
            yield Problem("", "metrics.trackers", message, f"unset {variable}")


def _refusal(refused: Mapping[str, ConfigError], count: int) -> Exception:
    """Return the error for members that cannot run."""
    texts = {tuple(map(str, error.problems)) for error in refused.values()}
    if len(refused) == count and len(texts) == 1:
        return next(iter(refused.values()))
    lines = [f"{len(refused)} of {count} runs cannot start; nothing was started"]
    for name, error in refused.items():
        lines.append(f"  {name}:")
        for problem in error.problems:
            lines.append("    " + str(problem).replace("\n", "\n    "))
    return SweepError("\n".join(lines))


def changes(checked: CheckedMember, folder: Path) -> dict[str, str]:
    """Return "old -> new" by key, for a member whose folder has the run of another config.

    Keys that an older titanlite did not have, and that have their default now, count as equal.
    Other ranks count as a change where the batch follows from them.
    """
    own = folder / checked.name
    try:
        old = (own / CONFIG).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    new = provenance.public_config(checked.config.to_toml())
    found = provenance.config_changes(old, new)
    known = provenance.config_values(old)
    for key in list(found):
        is_new = key not in known and checked.config.source(key).kind == "default"
        if is_new or key.startswith(_MAY_DIFFER):
            del found[key]
    run = _run_in(own)
    ranks = run.attempts[-1].get("ranks") if run and run.attempts else None
    if ranks and checked.config.value("training.global_batch_size") == -1:
        now = checked.run.mesh.world_size
        if ranks != now:
            found["ranks"] = f"{ranks} -> {now}"
    return found


def result_of(member: Member, folder: Path) -> MemberResult:
    """Return how a member stands. folder: of the sweep."""
    own = folder / member.name
    record = _read_record(own)
    exit_code = record.get("exit_code")
    run = _run_in(own)
    if run is None:
        run = Run(own)
    losses = [row["loss"] for row in run.training]
    validations = [row["validation_loss"] for row in run.validations]
    state = _state(run, exit_code, [*losses[-1:], *validations[-1:]])
    is_bad = state in ("failed", "diverged")
    return MemberResult(
        name=member.name,
        flags=tuple(member.flags),
        state=state,
        steps=run.step or 0,
        training_loss=_tail_mean(losses),
        last_loss=losses[-1] if losses else None,
        validation_loss=validations[-1] if validations else None,
        best_validation_loss=min(validations, default=None),
        seconds=run.duration or 0.0,
        tokens=int(run.training[-1].get("tokens_seen", 0)) if run.training else 0,
        exit_code=exit_code,
        reason=_reason(run, exit_code) if is_bad else "",
        last_lines=_console_lines(own) if is_bad else (),
    )


def _run_in(folder: Path) -> Run | None:
    """Return the run in a folder; None without one."""
    with suppress(RunError):
        return read_run(folder, partial=True)
    return None


def _state(run: Run, exit_code: int | None, losses: Sequence[float]) -> State:
    """Return the state of a run. losses: its last ones."""
    if run.state == "running":
        return "running"
    is_whole = run.state == "done" and (run.step or 0) >= (run.steps or 0)
    if run.state == "stopped" or (is_whole and not all(map(math.isfinite, losses))):
        return "diverged"
    if is_whole:
        return "done"
    if exit_code is None:
        # A sweep that was killed left no code.
        return "failed" if run.state == "failed" else "unfinished"
    is_stopped = exit_code in _STOPPED or run.state == "preempted"
    return "unfinished" if is_stopped else "failed"


def _reason(run: Run, exit_code: int | None) -> str:
    if run.reason:
        return run.reason.splitlines()[0]
    if exit_code is None:
        return ""
    if exit_code < 0:
        return f"ended by signal {-exit_code}"
    return f"exit code {exit_code}"


def _tail_mean(losses: Sequence[float]) -> float | None:
    """Return the mean of the last losses, of `TAIL` of them but at least one."""
    if not losses:
        return None
    last = losses[-max(round(len(losses) * TAIL), 1) :]
    return math.fsum(last) / len(last)


def _console_lines(folder: Path) -> tuple[str, ...]:
    """Return the last lines of a run, from rank 0's log if a job has started it."""
    for file in (folder / CONSOLE, folder / LOGS / "rank_0.log"):
        with suppress(OSError):
            return tuple(last_lines(file, LINES_KEPT))
    return ()


def write_record(member: Member, folder: Path, exit_code: int | None) -> None:
    """Note a start of a member, or with an exit code its end. Raises OSError."""
    entry = {
        "name": member.name,
        "flags": provenance.command(member.flags),
        "exit_code": exit_code,
    }
    atomic_write(folder / member.name / RECORD, json.dumps(entry, indent=1) + "\n")


def _read_record(folder: Path) -> dict[str, Any]:
    """Return what `write_record` has written; empty where there is nothing, or nothing whole."""
    try:
        found = parse_json((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    code = found.get("exit_code")
    if not isinstance(code, int) or isinstance(code, bool):
        found["exit_code"] = None
    return found
