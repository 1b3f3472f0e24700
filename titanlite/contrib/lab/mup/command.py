"""`titanlite mup check`: the coordinate check of a config."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from titanlite import exit_codes
from titanlite.cli import at_least
from titanlite.cli.parser import FLAGS, Commands, add_files, add_group, add_to_group, files_of
from titanlite.cli.pictures import Chart, Curve, draw
from titanlite.cli.run_figures import to_json
from titanlite.config.errors import bad_flag, refuse, unfit
from titanlite.config.sections import Mup
from titanlite.contrib.lab.mup.models import Models, models_of
from titanlite.contrib.lab.mup.verdict import LIMIT, Line, verdict
from titanlite.features.mup.checks import problems
from titanlite.models.llama_args import LlamaArgs
from titanlite.plan.memory import with_vocabulary
from titanlite.resolve.load import check_config
from titanlite.utils import Table, atomic_write, counted, render

if TYPE_CHECKING:
    from titanlite.contrib.lab.mup.coordinates import Sizes, Task
    from titanlite.run.config import RunConfig

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
    "log2(width), and draws them with --svg."
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
    add("--layers", "blocks of the models at most (default: 4)", "N", type=at_least(1), default=4)
    add("--random", "random tokens in place of the config's text")
    add("--device", "cpu, cuda or cuda:N (default: a GPU if there is one)", "NAME")
    add("--svg", "draw the changes to this file", "FILE", type=Path)
    add("--json", "print a JSON object")


def _widths(text: str) -> tuple[int, ...]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if len(found) < 2 or found[0] < 1:
        raise argparse.ArgumentTypeError("give two positive widths at least, as 64,128,256")
    return tuple(found)


def _check(arguments: argparse.Namespace) -> tuple[str, int]:
    words = [*files_of(arguments), *arguments.flags]
    run = check_config(words, training=False)[1]
    args = with_vocabulary(run).model_args()
    if not isinstance(args, LlamaArgs):
        message = f"has no rules for the matrices of model.name = {run.model.name!r}"
        raise unfit(_BASE, message)
    models = models_of(args, run.mup, arguments.widths, arguments.layers)
    if not run.mup.base_dim:
        # With a base model the optimizer's settings are checked.
        check_config([*words, f"--{_BASE}={args.dim}"], training=False)
    # A model whose multipliers have no place is refused.
    given = Mup(models.base.dim, models.kept)
    refuse(list(problems(replace(run, mup=given), models.of[models.widths[-1]])))
    task, source = _task(run, arguments, models)
    lines = measure(task, models, SEEDS)
    good, told = verdict(lines)
    title = (
        f"{run.model.title} from base dim {models.base.dim}: {run.optimizer.name}, rate "
        f"{run.optimizer.peak_lr:g}, {counted(arguments.steps, 'steps')} of {TOKENS} tokens, "
        f"{SEEDS} seeds"
    )
    code = exit_codes.DONE if good else FAILED
    if arguments.svg:
        _draw(lines, title, arguments.svg)
    if arguments.json:
        return to_json(
            {
                "ok": good,
                "base_dim": models.base.dim,
                "widths": models.widths,
                "steps": arguments.steps,
                "limit": LIMIT,
                "text": source,
                "lines": [
                    {**asdict(line), "slope": line.slope, "start_slope": line.start_slope}
                    for line in lines
                ],
                "written": arguments.svg and str(arguments.svg),
            }
        ), code
    parts = [f"{title}; {source}", render(_table(lines, models))]
    parts.append("\n".join(told))
    if arguments.svg:
        parts.append(f"written: {arguments.svg}")
    return "\n\n".join(parts), code


def _task(run: RunConfig, arguments: argparse.Namespace, models: Models) -> tuple[Task, str]:
    """Return what all models have in common, and where their tokens are from."""
    import numpy
    import torch

    from titanlite.assembly.datasets import read_training_text
    from titanlite.cli.loading import choose_device
    from titanlite.contrib.lab.mup.coordinates import Task
    from titanlite.data.tokenizer import load_tokenizer

    device = choose_device(arguments.device)
    vocabulary = models.base.n_vocab
    if arguments.random:
        source = "random tokens"
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(vocabulary, (arguments.steps, TOKENS + 1), generator=generator)
    else:
        source = f"text of {run.training.dataset_path or run.training.dataset}"
        tokenizer = load_tokenizer(run.model.tokenizer_path, run.model.name)
        text = read_training_text(run, tokenizer)
        found = [text.sequence(i).tokens[: TOKENS + 1] for i in range(arguments.steps)]
        rows = torch.from_numpy(numpy.stack(found))
    rows = (rows % vocabulary).to(device)
    batches = [(row[None, :-1], row[None, 1:]) for row in rows]
    return Task(run.spec, run.optimizer, batches, device), source


def measure(task: Task, models: Models, seeds: int) -> list[Line]:
    """Return a line for each kind of activation, with muP and without."""
    lines = []
    for is_on in (True, False):
        base = models.base if is_on else None
        by_width = []
        for args in models.of.values():
            by_width.append([task.measure(args, base, seed) for seed in range(seeds)])
        for kind in by_width[0][0]:
            of_kind = [[one[kind] for one in runs] for runs in by_width]
            lines.append(_line(kind, is_on, models.widths, of_kind))
    order = list(dict.fromkeys(line.kind for line in lines))
    return sorted(lines, key=lambda line: (not line.mup, order.index(line.kind)))


def _line(kind: str, mup: bool, widths: Sequence[int], runs: Sequence[Sequence[Sizes]]) -> Line:
    """Return the means over seeds. runs: by width, then by seed."""
    values = []
    changes = []
    for step in range(len(runs[0][0].value)):
        values.append([sum(one.value[step] for one in seeds) / len(seeds) for seeds in runs])
        changes.append([sum(one.change[step] for one in seeds) / len(seeds) for seeds in runs])
    return Line(kind, mup, widths, values, changes[1:])


def _table(lines: Sequence[Line], models: Models) -> Table:
    widths = [str(width) for width in models.widths]
    columns = ("change of", "muP", *widths, "slope", "slope at start")
    rows = []
    for line in lines:
        changes = [f"{change:.3g}" for change in line.changes[-1]]
        slopes = f"{line.slope:+.2f}", f"{line.start_slope:+.2f}"
        rows.append([line.kind, "yes" if line.mup else "no", *changes, *slopes])
    return Table(columns, rows, left=(0, 1))


def _draw(lines: Sequence[Line], title: str, path: Path) -> None:
    """Draw a panel for each kind of activation, with muP above and without it below."""
    panels = []
    for line in lines:
        curves = [
            Curve(f"step {step}", list(zip(line.widths, changes, strict=True)), step, mark="dot")
            for step, changes in enumerate(line.changes, 1)
        ]
        # Nothing is drawn of the points of the same kind: both panels have one scale.
        for other in lines:
            if other.kind == line.kind:
                points = [(line.widths[0], change) for step in other.changes for change in step]
                curves.append(Curve("", points, line="none"))
        name = f"{line.kind}, {'muP' if line.mup else 'without'}: slope {line.slope:+.2f}"
        text = "mean |change|"
        panels.append(Chart(name, "width", text, curves, line.widths, log_across=True, log_up=True))
    try:
        atomic_write(path, draw(panels, title, len(panels) // 2))
    except OSError as error:
        raise bad_flag("--svg", f"cannot write {path}: {error}") from None
