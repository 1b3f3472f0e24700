"""`titanlite sweep`: run a config at several values of its keys, and compare the losses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from titanlite import exit_codes
from titanlite.config.entries import Entry
from titanlite.config.errors import ConfigError, Problem, bad_flag
from titanlite.config.load import read
from titanlite.tools import at_least
from titanlite.tools.parser import FLAGS, Commands, add_files, files_of, new_command, no_flags
from titanlite.tools.processes import Stopped
from titanlite.tools.sweep.folder import (
    BEST,
    PICTURE,
    RESULTS,
    Plan,
    read_plan,
    strangers,
    write_best,
    write_plan,
    write_results,
)
from titanlite.tools.sweep.members import (
    CheckedMember,
    Member,
    MemberResult,
    SweepError,
    check_members,
    result_of,
    write_record,
)
from titanlite.tools.sweep.picture import picture
from titanlite.tools.sweep.points import Sweep, sweep_of
from titanlite.tools.sweep.runs import Crew, held, make_slots, refuse_changes
from titanlite.tools.sweep.table import best_of, groups_of, notes, table
from titanlite.utils import Table, atomic_write, counted, human_count, public, render

_ENABLE = "validation.enable"

_EPILOG = f"""{FLAGS} A flag of a key that [sweep] varies is refused. Exit status: 0 when each run
is done or diverged, 1 when one failed or none is done, 2 for a wrong config, 4 where another sweep
runs in the folder, 130 after Ctrl-C. docs/sweep.md"""


def add_command(commands: Commands) -> None:
    """Add `titanlite sweep` to argparse."""
    parser = new_command(
        commands,
        _run,
        "sweep",
        "train a config at several learning rates, or other values, and compare the losses",
        "Train a config at each point of its table [sweep]: each run in a folder of "
        "its own. All points are checked before the first run. A sweep that was stopped or killed "
        "goes on with the same command. At the end it prints the losses, and writes a picture and "
        "the config of the best point.",
        _EPILOG,
    )
    add_files(parser)
    add = parser.add_argument
    add("--at-once", type=at_least(1), metavar="N", help="runs at a time (default: 1)")
    ranks = "ranks of each run (default: 1)"
    add("--nproc-per-node", type=at_least(1), metavar="N", help=ranks)
    folder = "folder of the sweep (default: job.dump_folder with -sweep behind it)"
    add("--folder", type=Path, metavar="FOLDER", help=folder)
    one = parser.add_mutually_exclusive_group().add_argument
    one("--dry-run", action="store_true", help="print the points and their tokens, and run nothing")
    member = "train one run alone, by its number from 0: for the tasks of a job array"
    one("--member", type=at_least(0), metavar="N", help=member)
    show = "print the table of a sweep again, and write its files; nothing is run"
    one("--show", type=Path, metavar="FOLDER", help=show)
    add("--json", action="store_true", help="print the results, or the points, as JSON")


#: Option → those that have no effect beside it, by their names in argparse.
_IDLE = {
    "--show": ("folder", "at_once", "nproc_per_node"),
    "--member": ("at_once", "json"),
    "--dry-run": ("at_once",),
}


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that would have no effect."""
    given = {"--show": arguments.show, "--member": arguments.member}
    chosen = [name for name, value in given.items() if value is not None]
    if arguments.dry_run:
        chosen = ["--dry-run"]
    for name in chosen:
        for other in _IDLE[name]:
            if getattr(arguments, other):
                raise bad_flag(f"--{other.replace('_', '-')}", f"has no effect with {name}")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    _refuse_idle(arguments)
    if arguments.show is not None:
        no_flags(arguments.flags)
        if arguments.files:
            raise bad_flag("--show", "takes the folder of a sweep, and no config file")
        return report(read_plan(arguments.show), arguments.show, arguments.json)
    ranks = arguments.nproc_per_node or 1
    asked = asked_for(files_of(arguments), arguments.flags, arguments.folder, ranks)
    if arguments.member is not None:
        train_member(asked, arguments.member)
    checked = check_members(asked.sweep.members, asked.config_args, asked.folder, asked.ranks)
    metric = metric_of(asked.sweep, checked)
    if arguments.dry_run:
        return _dry_run(asked, checked, arguments.json), exit_codes.DONE
    plan = asked.plan(metric)
    slots = make_slots(arguments.at_once or 1, asked.ranks)
    crew = Crew(checked, asked.config_args, asked.folder, asked.ranks, slots)
    refuse_changes(checked, asked.folder)
    try:
        with held(asked.folder):
            write_plan(plan, asked.folder)
            crew.run()
        return report(plan, asked.folder, arguments.json)
    except Stopped as stop:
        return "", exit_codes.after_signal(stop.number)
    except OSError as error:
        raise SweepError(
            f"cannot write to {asked.folder}: {error.strerror or error}; name another with --folder"
        ) from None


@dataclass(frozen=True)
class Asked:
    """The sweep of a command line."""

    sweep: Sweep
    #: The table [sweep] as it was written.
    table: Entry
    #: Files and flags that all runs share.
    config_args: Sequence[str]
    folder: Path
    ranks: int

    def plan(self, metric: str) -> Plan:
        """Return what the sweep's folder keeps."""
        return Plan(
            title=self.folder.name,
            metric=metric,
            keys=tuple(self.sweep.keys),
            points=tuple(self.sweep.points),
            ranks=self.ranks,
        )


def asked_for(files: Sequence[str], flags: Sequence[str], folder: Path | None, ranks: int) -> Asked:
    """Return the sweep of a command line. Raises ConfigError.

    files: the flag that names the config files. folder: of the sweep; None: the default.
    """
    config_args = [*files, *flags]
    config, problems = read(config_args, defer=True)
    if problems:
        raise ConfigError(problems)
    sweep = sweep_of(config, flags)
    assert config.sweep is not None
    if folder is None:
        folder = default_folder(config.value("job.dump_folder"))
    return Asked(sweep, config.sweep, config_args, folder, ranks)


def default_folder(dump_folder: str) -> Path:
    """Return the folder of a sweep, beside that of the run which the config describes."""
    path = Path(dump_folder)
    return path.with_name(f"{path.name}-sweep") if path.name else path / "sweep"


def metric_of(sweep: Sweep, checked: Sequence[CheckedMember]) -> str:
    """Return the loss by which points are compared. Raises ConfigError where a run has none."""
    validated = [one.config.value(_ENABLE) for one in checked]
    if sweep.metric is None:
        return "validation_loss" if all(validated) else "training_loss"
    if sweep.metric != "training_loss" and not all(validated):
        place = checked[validated.index(False)].name
        message = f"validation is off for {place}, so it has no {sweep.metric}"
        hint = f'set {_ENABLE} = true, or metric = "training_loss"'
        raise ConfigError([Problem("", "[sweep] metric", message, hint)])
    return sweep.metric


def train_member(asked: Asked, number: int) -> NoReturn:
    """Become the run of one member. Raises ConfigError and SweepError.

    A process that torchrun started becomes one of its ranks. A member that is done is not run
    again: the process ends at once.
    """
    from titanlite import main

    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    if is_rank:
        asked = replace(asked, ranks=int(os.environ["WORLD_SIZE"]))
    try:
        member = _checked_member(asked, number, writes=os.environ.get("RANK", "0") == "0")
    except (ConfigError, SweepError) as error:
        if is_rank:
            # torchrun does not hand the code on.
            exit_codes.report_code(error.exit_code)
        raise
    argv = member.arguments(asked.config_args, asked.folder)
    if is_rank:
        main.main(argv)
    _start_ranks(asked.ranks, argv)


def _checked_member(asked: Asked, number: int, writes: bool) -> Member:
    """Return a member that is to be run; the process ends if it is done.

    writes: note the start in its folder, as one of the ranks does.
    """
    members = asked.sweep.members
    if number >= len(members):
        message = f"expected a number below {len(members)}, that of the runs, got {number}"
        raise bad_flag("--member", message)
    member = members[number]
    checked = check_members([member], asked.config_args, asked.folder, asked.ranks)
    metric = metric_of(asked.sweep, checked)
    refuse_changes(checked, asked.folder)
    result = result_of(member, asked.folder)
    if result.is_final:
        print(f"{member.name} is {result.state} already", file=sys.stderr)
        exit_codes.report_code(exit_codes.DONE)
        sys.exit(exit_codes.DONE)
    if writes:
        try:
            write_plan(asked.plan(metric), asked.folder)
            (asked.folder / member.name).mkdir(parents=True, exist_ok=True)
            write_record(member, asked.folder, None)
        except OSError as error:
            raise SweepError(f"cannot write to {asked.folder}: {error.strerror or error}") from None
    return member


def _start_ranks(ranks: int, argv: Sequence[str]) -> NoReturn:
    """Become a run of this machine."""
    from titanlite.tools.commands.train import count_gpus, start_ranks

    if not count_gpus():
        # As the runs of a sweep on one machine: the number of threads changes how sums are rounded.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    start_ranks(ranks, ["train", *argv])


def _dry_run(asked: Asked, checked: Sequence[CheckedMember], as_json: bool) -> str:
    """Return the points, what each trains on, and the sums."""
    sizes = [_size(one) for one in checked]
    if as_json:
        from titanlite.tools.commands.run_figures import to_json

        points = []
        for one, size in zip(checked, sizes, strict=True):
            points.append({"name": one.name, "steps": one.run.steps, **asdict(size)})
        return to_json({"folder": str(asked.folder), "ranks": asked.ranks, "runs": points})
    rows = []
    for number, (one, size) in enumerate(zip(checked, sizes, strict=True)):
        steps = "by the text" if one.run.steps is None else f"{one.run.steps:,}"
        seen = "by the text" if size.tokens is None else human_count(size.tokens)
        rows.append([str(number), one.name, human_count(size.parameters), steps, seen])
    columns = ("run", "point", "parameters", "steps", "tokens")
    shown = render(Table(columns, rows, left=(1,)), sys.stdout.isatty())
    tokens = sum(size.tokens or 0 for size in sizes)
    work = sum(size.flops or 0.0 for size in sizes)
    total = f"{counted(len(checked), 'runs')} of {counted(asked.ranks, 'ranks')}, "
    total += f"{human_count(tokens)} tokens, {work:.2e} FLOP in all"
    if any(size.tokens is None for size in sizes):
        total += ", without the runs whose text is not counted"
    return f"{shown}\n\n{total}; folder: {asked.folder}"


@dataclass(frozen=True)
class _Size:
    """Of a run. tokens, flops: None where the text's length decides."""

    parameters: int
    tokens: int | None
    flops: float | None


def _size(one: CheckedMember) -> _Size:
    """Return the size of a run, as `titanlite plan` counts it. Raises DataError."""
    from titanlite.plan.memory import with_vocabulary

    run = with_vocabulary(one.run)
    args = run.model_args()
    parameters = run.spec.count_parameters(args)
    if run.tokens is None:
        return _Size(parameters, None, None)
    each = run.flops_per_token(args, run.batch.seq_len)
    return _Size(parameters, run.tokens, float(each) * run.tokens)


def report(plan: Plan, folder: Path, as_json: bool) -> tuple[str, int]:
    """Write the files of a sweep, and return its table and the exit code. Raises OSError."""
    results = [result_of(point.member, folder) for point in plan.points]
    groups = groups_of(plan, results)
    best = best_of(groups)
    written = [RESULTS]
    name = "" if best is None else best.points[0].member.name
    text = write_results(plan, results, name, folder)
    drawn = picture(plan, groups, best)
    if drawn is not None:
        atomic_write(folder / PICTURE, public(drawn))
        written.append(PICTURE)
    problem = ""
    if best is not None:
        try:
            write_best(plan, best.points[0], best.results[0], folder)
            written.append(BEST)
        except ConfigError as error:
            problem = f"{BEST} is not written, since the record of its run is damaged: {error}"
    code = exit_code(results)
    if as_json:
        return text, code
    lines = [render(table(plan, groups, best), sys.stdout.isatty()), ""]
    lines += notes(plan, groups, best, folder)
    if problem:
        lines.append(problem)
    others = strangers(plan, folder)
    if others:
        lines.append(f"not in the table, of another sweep in this folder: {', '.join(others)}")
    lines.append(f"written: {', '.join(str(folder / name) for name in written)}")
    return "\n".join(lines), code


def exit_code(results: Sequence[MemberResult]) -> int:
    """Return the exit code of a sweep: a run that diverged is a result, one that failed is not."""
    states = [result.state for result in results]
    is_whole = all(state in ("done", "diverged") for state in states)
    return exit_codes.DONE if is_whole and "done" in states else exit_codes.ERROR
