"""`titanlite mup check`: the coordinate check of a config."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec.structs import replace

from titanlite import exit_codes
from titanlite.cli import at_least
from titanlite.cli.argument_parser import (
    FLAGS,
    Commands,
    add_files,
    add_group,
    add_to_group,
    files_of,
)
from titanlite.config.errors import refuse, unfit
from titanlite.config.sections import Mup
from titanlite.contrib.lab.mup.models import Models, models_of
from titanlite.contrib.lab.mup.verdict import LIMIT, Line, verdict
from titanlite.features.mup.checks import problems
from titanlite.models.llama import LlamaArgs
from titanlite.plan.memory import with_vocabulary
from titanlite.resolve.load import check_config
from titanlite.runs.text_tables import Table, render
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.contrib.lab.mup.coordinates import Task

#: Exit status where a slope fails.
FAILED = 1
_BASE = "mup.base_dim"
#: Tokens of a step, one sequence: so few that updates add up in the same direction for most tokens,
#: at small widths too.
TOKENS = 16
#: Number of seeds for initial weights; the sizes of activations are averaged over them.
SEEDS = 3

_ABOUT = (
    "Models of several widths take a few steps, with muP and without it. The size of what changes "
    "in their activations must not depend on the width. It prints slopes of log2(change) over "
    "log2(width)."
)
_EXITS = (
    f"{FLAGS} Exit status: 0 if every slope with muP is within {LIMIT} of 0, {FAILED} if not, 2 "
    "when the config is wrong."
)


def add_commands(commands: Commands) -> None:
    """Add `titanlite mup` to argparse."""
    actions = add_group(commands, "mup", "check that settings of narrow models hold for wide ones")
    help = "train several widths for a few steps, and compare how much their activations change"
    parser = add_to_group(actions, _check, help, _ABOUT, _EXITS)
    add_files(parser)
    add = parser.add
    widths = "values of dim (default: the first four of 64, 128, 256, … that the model can have)"
    add("--widths", widths, "N,N,…", type=_widths, default=())
    add("--steps", "steps of each (default: 4)", "N", type=at_least(1), default=4)


def _widths(text: str) -> list[int]:
    try:
        return sorted({at_least(1)(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError("give positive widths, as 64,128,256") from None


def _check(arguments: argparse.Namespace) -> tuple[str, int]:
    import numpy
    import torch

    from titanlite.assembly.datasets import read_training_text
    from titanlite.cli.loading import choose_device
    from titanlite.contrib.lab.mup.coordinates import Task
    from titanlite.data.tokenizer import load_tokenizer

    words = [*files_of(arguments), *arguments.flags]
    run = check_config(words, training=False)[1]
    args = with_vocabulary(run).model_args()
    if not isinstance(args, LlamaArgs):
        message = f"has no rules for the matrices of model.name = {run.model.name!r}"
        raise unfit(_BASE, message)
    models = models_of(args, run.mup, arguments.widths)
    if not run.mup.base_dim:
        # With a base model the optimizer's settings are checked.
        check_config([*words, f"--{_BASE}={args.dim}"], training=False)
    # A model whose multipliers have no place is refused.
    given = Mup(models.base.dim, models.kept)
    refuse(list(problems(replace(run, mup=given), models.of[models.widths[-1]])))
    device = choose_device(None)
    text = read_training_text(run, load_tokenizer(run.model.tokenizer_path, run.model.name))
    taken = [text.sequence(i).tokens[: TOKENS + 1] for i in range(arguments.steps)]
    rows = (torch.from_numpy(numpy.stack(taken)) % models.base.n_vocab).to(device)
    batches = [(row[None, :-1], row[None, 1:]) for row in rows]
    lines = measure(Task(run.spec, run.optimizer, batches, device), models, SEEDS)
    good, told = verdict(lines)
    title = (
        f"{run.model.title} from base dim {models.base.dim}: {run.optimizer.name}, rate "
        f"{run.optimizer.peak_lr:g}, {counted(arguments.steps, 'steps')} of {TOKENS} tokens, "
        f"{SEEDS} seeds"
    )
    parts = [title, render(_table(lines, models)), "\n".join(told)]
    return "\n\n".join(parts), exit_codes.DONE if good else FAILED


def measure(task: Task, models: Models, seeds: int) -> list[Line]:
    """Return a line for each kind of activation, with muP and without."""
    lines = []
    for is_on in (True, False):
        base = models.base if is_on else None
        by_width = []
        for args in models.of.values():
            by_width.append([task.measure(args, base, seed) for seed in range(seeds)])
        for kind in by_width[0][0]:
            changes = [fmean(one[kind] for one in runs) for runs in by_width]
            lines.append(Line(kind, is_on, models.widths, changes))
    return lines


def _table(lines: Sequence[Line], models: Models) -> Table:
    columns = ("change of", "muP", *map(str, models.widths), "slope")
    rows = []
    for line in lines:
        changes = [f"{change:.3g}" for change in line.changes]
        rows.append([line.kind, "yes" if line.mup else "no", *changes, f"{line.slope:+.2f}"])
    return Table(columns, rows, left=(0, 1))
