"""`titanlite sweep`: run a config at several values of its keys, and compare the losses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from titanlite import exit_codes
from titanlite.config.errors import ConfigError, Problem, bad_flag
from titanlite.config.load import read
from titanlite.tools import at_least
from titanlite.tools.parser import FLAGS, Commands, add_files, files_of, no_flags
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
    MemberResult,
    SweepError,
    check_members,
    result_of,
    write_record,
)
from titanlite.tools.sweep.picture import picture
from titanlite.tools.sweep.points import Sweep, sweep_of
from titanlite.tools.sweep.runs import refuse_changes, run_members
from titanlite.tools.sweep.table import best_of, groups_of, notes, table
from titanlite.utils import Style, Table, atomic_write, counted, human_count, render

_ENABLE = "validation.enable"

_EPILOG = f"""{FLAGS} A flag of a key that [sweep] varies is refused. Exit status: 0 when each run
is done or diverged, 1 when one failed or none is done, 2 for a wrong config, 4 where another sweep
runs in the folder, 130 after Ctrl-C. docs/sweep.md"""


def add_command(commands: Commands) -> None:
    """Add `titanlite sweep` to argparse."""
    parser = commands.add_parser(
        "sweep",
        help="train a config at several learning rates, or other values, and compare the losses",
        description="Train a config at each point of its table [sweep]: each run in a folder of "
        "its own. All points are checked before the first run. A sweep that was stopped or killed "
        "goes on with the same command. At the end it prints the losses, and writes a picture and "
        "the config of the best point.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add_files(parser)
    add = parser.add_argument
    add("--at-once", type=at_least(1), default=1, metavar="N", help="runs at a time (default: 1)")
    ranks = "ranks of each run (default: 1)"
    add("--nproc-per-node", type=at_least(1), default=1, metavar="N", help=ranks)
    folder = "folder of the sweep (default: job.dump_folder with -sweep behind it)"
    add("--folder", type=Path, metavar="FOLDER", help=folder)
    add("--dry-run", action="store_true", help="print the points and their tokens, and run nothing")
    member = "train one run alone, by its number from 0: for the tasks of a job array"
    add("--member", type=at_least(0), metavar="N", help=member)
    show = "print the table of a sweep again, and write its files; nothing is run"
    add("--show", type=Path, metavar="FOLDER", help=show)
    add("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, flags: list[str], _: Style) -> tuple[str, int]:
    if arguments.show is not None:
        no_flags(flags)
        if arguments.files:
            raise bad_flag("--show", "takes the folder of a sweep, and no config file")
        return report(read_plan(arguments.show), arguments.show, arguments.json)
    asked = asked_for(files_of(arguments), flags, arguments.folder, arguments.nproc_per_node)
    if arguments.member is not None:
        train_member(asked, arguments.member)
    checked = check_members(asked.sweep.members, asked.config_args, asked.folder, asked.ranks)
    metric = metric_of(asked.sweep, checked)
    if arguments.dry_run:
        return _dry_run(asked, checked), exit_codes.DONE
    plan = asked.plan(metric)
    refuse_changes(checked, asked.folder)
    try:
        write_plan(plan, asked.folder)
        run_members(
            asked.sweep.members,
            asked.config_args,
            asked.folder,
            at_once=arguments.at_once,
            nproc=asked.ranks,
        )
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
    #: Files and flags that all runs share.
    config_args: Sequence[str]
    folder: Path
    ranks: int
    title: str

    def plan(self, metric: str) -> Plan:
        """Return what the sweep's folder keeps."""
        points = tuple(self.sweep.points)
        return Plan(self.title, metric, tuple(self.sweep.keys), points, self.ranks)


def asked_for(files: Sequence[str], flags: Sequence[str], folder: Path | None, ranks: int) -> Asked:
    """Return the sweep of a command line. Raises ConfigError.

    files: the flag that names the config files. folder: of the sweep; None: the default.
    """
    config_args = [*files, *flags]
    config, problems = read(config_args, defer=True)
    if problems:
        raise ConfigError(problems)
    sweep = sweep_of(config, flags)
    if folder is None:
        folder = default_folder(config.value("job.dump_folder"))
    title = Path(config.files[-1]).name if config.files else ""
    return Asked(sweep, config_args, folder, ranks, title)


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
    from titanlite.tools.commands.run import count_gpus
    from titanlite.tools.commands.train import start_ranks

    members = asked.sweep.members
    if number >= len(members):
        message = f"expected a number below {len(members)}, that of the runs, got {number}"
        raise bad_flag("--member", message)
    member = members[number]
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if is_rank else asked.ranks
    checked = check_members([member], asked.config_args, asked.folder, ranks)
    refuse_changes(checked, asked.folder)
    plan = Asked(asked.sweep, asked.config_args, asked.folder, ranks, asked.title)
    result = result_of(member, asked.folder)
    if result.is_final:
        print(f"{member.name} is {result.state} already", file=sys.stderr)
        sys.exit(exit_codes.DONE)
    if not is_rank or os.environ.get("RANK") == "0":
        try:
            write_plan(plan.plan(metric_of(asked.sweep, checked)), asked.folder)
            (asked.folder / member.name).mkdir(parents=True, exist_ok=True)
            write_record(member, asked.folder, None)
        except OSError as error:
            raise SweepError(f"cannot write to {asked.folder}: {error.strerror or error}") from None
    argv = member.arguments(asked.config_args, asked.folder)
    if is_rank:
        main.main(argv)
    if not count_gpus():
        # As the runs of a sweep on one machine: the number of threads changes how sums are rounded.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if asked.ranks == 1:
        os.execv(sys.executable, [sys.executable, "-m", "titanlite", "train", *argv])
    start_ranks(asked.ranks, ["train", *argv])


def _dry_run(asked: Asked, checked: Sequence[CheckedMember]) -> str:
    """Return the points, what each trains on, and the sums."""
    rows = []
    tokens = 0
    work = 0.0
    for number, one in enumerate(checked):
        size = _size(one)
        if size.tokens is not None:
            tokens += size.tokens
            work += size.flops
        steps = "by the text" if one.run.steps is None else f"{one.run.steps:,}"
        seen = "by the text" if size.tokens is None else human_count(size.tokens)
        rows.append([str(number), one.name, human_count(size.parameters), steps, seen])
    columns = ("run", "point", "parameters", "steps", "tokens")
    shown = render(Table(columns, rows, left=(1,)), sys.stdout.isatty())
    total = f"{counted(len(checked), 'runs')} of {counted(asked.ranks, 'ranks')}, "
    total += f"{human_count(tokens)} tokens, {work:.2e} FLOP in all; folder: {asked.folder}"
    return f"{shown}\n\n{total}"


@dataclass(frozen=True)
class _Size:
    """Of a run. tokens: None where the text's length decides."""

    parameters: int
    tokens: int | None
    flops: float


def _size(one: CheckedMember) -> _Size:
    """Return the size of a run, as `titanlite plan` counts it. Raises DataError."""
    from titanlite.plan.memory import with_vocabulary

    run = with_vocabulary(one.run)
    args = run.model_args()
    flops = run.flops_per_token(args, run.batch.seq_len) * float(run.tokens or 0)
    return _Size(run.spec.count_parameters(args), run.tokens, flops)


def report(plan: Plan, folder: Path, as_json: bool) -> tuple[str, int]:
    """Write the files of a sweep, and return its table and the exit code. Raises OSError."""
    results = [result_of(point.member, folder) for point in plan.points]
    groups = groups_of(plan, results)
    best = best_of(groups)
    written = [RESULTS]
    if best is not None:
        write_best(plan, best.points[0], best.results[0], folder)
        written.append(BEST)
    drawn = picture(plan, groups, best)
    if drawn is not None:
        atomic_write(folder / PICTURE, drawn)
        written.append(PICTURE)
    name = "" if best is None else best.points[0].member.name
    text = write_results(plan, results, name, folder)
    code = exit_code(results)
    if as_json:
        return text, code
    lines = [render(table(plan, groups, best), sys.stdout.isatty()), ""]
    lines += notes(plan, groups, best, folder)
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
