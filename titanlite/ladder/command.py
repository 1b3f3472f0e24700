"""`titanlite ladder` on the command line."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.config.errors import ConfigError
from titanlite.config.load import find_config, read
from titanlite.ladder.levels import RUNGS, LadderError, Level, make_levels, overlay, write_levels
from titanlite.observe.console import escape

if TYPE_CHECKING:
    from titanlite.ladder.climb import Ladder

_DESCRIPTION = """\
Measure what each optimisation gives. Four levels of CONFIG, each with all that the one before has, are trained one
after the other from the same weights on the same text, several times in turn:

{levels}

Speed, memory and losses of each, and their ratio to the first, are printed as a table and written with curves."""

_EPILOG = """\
examples:
  titanlite ladder debug_model.toml --steps 20 --warmup 5
  titanlite ladder llama3_8b.toml --ranks 8 --repeats 5 --training.seq_len 4096
  titanlite ladder llama3_8b.toml --overlay no-ac=no_ac.toml --skip float8 --skip float8-all-gather

Any further --section.key VALUE is laid over every level, as for train.py. All levels are checked before the first run
starts. Runs that FOLDER has already are kept: after a failure or Ctrl-C the same command makes the missing ones.
Without a GPU float8 is emulated: that shows whether its losses are right, and nothing about its speed.

Exit status: 0 when all runs are there, 1 when one failed, 2 when nothing was started because something is wrong, 130
after Ctrl-C. What was measured is written in any case."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to argparse."""
    width = max(len(rung.name) for rung in RUNGS)
    levels = "\n".join(f"  {rung.name:<{width}}  {'+ ' if rung.adds else ''}{rung.about}" for rung in RUNGS)
    parser = commands.add_parser(
        "ladder",
        help="measure what compile, float8 and other settings give, level by level",
        description=_DESCRIPTION.format(levels=levels),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file; also looked up in train_configs/")
    parser.add_argument(
        "--overlay",
        action="append",
        default=[],
        metavar="NAME=FILE.toml",
        help="one more level: FILE over the first level; may be given several times",
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="LEVEL", help="leave a level out; may be given several times"
    )
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps of a run (default: 30)")
    parser.add_argument(
        "--warmup",
        type=int,
        default=10,
        metavar="N",
        help="first steps whose speed is not counted: they compile and allocate (default: 10)",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each level (default: 3)")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes (default: one per GPU; without a GPU 2)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where all of it is written (default: ./outputs/ladder/NAME-OF-CONFIG)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, flags: list[str], _style: object) -> tuple[str, int]:
    from titanlite.ladder.check import refuse_own
    from titanlite.ladder.report import text

    _check_numbers(arguments)
    refuse_own(flags)
    config = _config(arguments.config)
    levels = make_levels(config, [overlay(words) for words in arguments.overlay])
    chosen = _chosen(levels, arguments.skip)
    out = arguments.out or Path("outputs", "ladder", config.stem)
    with _alone(out):
        with _files(levels, out):
            ladder = _plan(arguments, flags, config, levels, chosen, out)
            ladder.begin()
        report, code = ladder.climb()
        written, why = ladder.finish(report)
    if why:
        print(escape(why), file=sys.stderr)
    return f"\n{text(report, sys.stdout.isatty())}\n\nwritten: {', '.join(map(str, written))}", code


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("warmup", "repeats", "ranks"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            why = ": the first step compiles and allocates" if name == "warmup" else ""
            raise LadderError(f"--{name} {value}: expected at least 1{why}")
    if arguments.steps <= arguments.warmup:
        raise LadderError(f"--steps {arguments.steps}: no step is left to count after --warmup {arguments.warmup}")


def _config(name: str) -> Path:
    found = find_config(name)
    if found is None:
        raise ConfigError(read([f"--job.config_file={name}"])[1])
    return found


def _chosen(levels: Sequence[Level], skip: Sequence[str]) -> list[Level]:
    names = [level.name for level in levels]
    unknown = [name for name in skip if name not in names]
    if unknown:
        raise LadderError(f"--skip {unknown[0]}: there is no such level; there are {', '.join(names)}")
    chosen = [level for level in levels if level.name not in skip]
    if not chosen:
        raise LadderError("--skip leaves no level")
    return chosen


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """The folder for this ladder alone while it is measured; made, and gone again if nothing came of it.

    Raises LadderError.
    """
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, NotADirectoryError):
        raise LadderError(f"{out} exists and is no ladder's folder; name another --out") from None
    except OSError as error:
        raise LadderError(f"cannot write to {out}: {error.strerror or error}; name another with --out") from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LadderError(f"{out}: another `titanlite ladder` is at work there") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # there is something in it
                for path in made:
                    path.rmdir()  # while it is locked: who opens it next has another
    finally:
        os.close(folder)


@contextlib.contextmanager
def _files(levels: Sequence[Level], out: Path) -> Iterator[None]:
    """The files of the levels below `out`, taken back if what is done with them raises. Raises LadderError."""
    from titanlite.ladder.climb import LEVELS, read_state

    folder = out / LEVELS
    state = read_state(out)
    paths = [folder / level.file for level in levels]
    try:
        if state is None and {path.name for path in out.iterdir()} - {LEVELS}:
            raise LadderError(f"{out} exists and is no ladder's folder; name another --out")
        before = {path: path.read_bytes() if path.is_file() else None for path in paths}
    except OSError as error:
        raise LadderError(f"cannot read {error.filename or out}: {error.strerror or error}") from None
    if state is not None:
        for path, level in zip(paths, levels, strict=True):
            if before[path] not in (None, level.text.encode()):
                raise LadderError(f"{out} holds another ladder: {path} is of another config; name another --out")
    made = not folder.exists()
    try:
        try:
            write_levels(levels, folder)
        except OSError as error:
            raise LadderError(f"cannot write to {folder}: {error.strerror or error}; name another --out") from None
        yield
    except BaseException:
        for path, content in before.items():
            with contextlib.suppress(OSError):
                if content is None:
                    path.unlink(missing_ok=True)
                elif path.read_bytes() != content:
                    path.write_bytes(content)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _plan(
    arguments: argparse.Namespace,
    flags: Sequence[str],
    config: Path,
    levels: Sequence[Level],
    chosen: Sequence[Level],
    out: Path,
) -> Ladder:
    """Everything checked, nothing started. Raises LadderError."""
    from titanlite.ladder.check import check_levels, common_flags
    from titanlite.ladder.climb import LEVELS, Ladder
    from titanlite.ladder.figures import counted, logged_steps
    from titanlite.ladder.process import probe

    machine = probe()
    ranks = arguments.ranks or machine.gpus or 2
    if machine.gpus and ranks > machine.gpus:
        raise LadderError(
            f"--ranks {ranks}, but this machine shows {machine.gpus} GPUs: each rank needs one of its own"
        )
    common = common_flags(str(out / LEVELS / levels[0].file), flags, arguments.steps, ranks)
    planned = check_levels(chosen, out / LEVELS, common, ranks, machine)
    for one in planned:
        rows = [{"step": float(step)} for step in logged_steps(arguments.steps, one.plans.observe.log_freq)]
        if not counted(rows, arguments.warmup):
            raise LadderError(
                f"metrics.log_freq = {one.plans.observe.log_freq} logs no stretch of steps between step "
                f"{arguments.warmup} (--warmup) and step {arguments.steps} (--steps): lower it, or leave it out"
            )
    return Ladder(
        title=config.name,
        planned=planned,
        machine=machine,
        ranks=ranks,
        out=out,
        steps=arguments.steps,
        warmup=arguments.warmup,
        repeats=arguments.repeats,
        command=["titanlite", *sys.argv[1:]],
    )
