"""The config whose loss is to be predicted, and what a ladder cannot take from it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.cli.argument_parser import files_of
from titanlite.config.checks import placed
from titanlite.config.errors import Problem, refuse
from titanlite.config.load import read
from titanlite.config.run_sections import Ladder
from titanlite.contrib.lab.ladder.law import LadderError
from titanlite.models.counts import count_multiplied_parameters
from titanlite.models.llama import LlamaArgs
from titanlite.plan.hardware import ranks_of
from titanlite.plan.memory import with_vocabulary
from titanlite.resolve.load import resolve
from titanlite.run.config import RunConfig


@dataclass(frozen=True)
class Target:
    """The run that is to be predicted, and what all runs of its ladder follow from."""

    run: RunConfig
    args: LlamaArgs
    #: Its N.
    parameters: int
    #: Its D.
    tokens: int
    ladder: Ladder
    #: The command line: files, and the flags of the user.
    files: Sequence[str]
    flags: Sequence[str]
    #: Ranks of each run of the ladder.
    ranks: int


def target_of(arguments: argparse.Namespace, flags: Sequence[str]) -> Target:
    """Raises ConfigError and LadderError for what cannot be the end of a ladder."""
    config, problems = read([*files_of(arguments), *flags])
    refuse(problems)
    # What this machine lacks matters only to runs on it.
    runs = not arguments.dry_run
    launch = config.sections.launch
    ranks = ranks_of(launch) if launch.instance_type or launch.gpus_per_node else None
    config, run = resolve(config, ranks, problems, machine=runs, texts=True)
    sections = config.sections
    found = []
    if not sections.validation.enable:
        message = "a ladder compares losses on held-out text"
        found.append(Problem("needs", "validation.enable", message, "set it to true"))
    obstacles = {
        "checkpoint.initial_load_path": sections.checkpoint.initial_load_path,
        "lora.rank": sections.lora.rank,
        "data.phase": sections.data.phase,
    }
    message = "the law is of models that are trained from the start, whole, on one text"
    for key, value in obstacles.items():
        if value:
            found.append(Problem("conflict", key, message, "remove it"))
    refuse(placed(config, found))
    run = with_vocabulary(run)
    args = run.model_args()
    if not isinstance(args, LlamaArgs):
        raise LadderError(f"model.name = {run.model.name!r}: no rule makes smaller models of it")
    if run.tokens is None:
        raise LadderError("training.epochs: give the length as training.steps or training.tokens")
    return Target(
        run=run,
        args=args,
        parameters=count_multiplied_parameters(args),
        tokens=run.tokens,
        ladder=sections.ladder,
        files=files_of(arguments),
        flags=flags,
        ranks=arguments.nproc_per_node or 1,
    )
