"""The config whose loss is to be predicted, and what a ladder cannot take from it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titanlite.cli.parser import files_of
from titanlite.cli.plan.plan import ranks_of
from titanlite.config.checks import placed
from titanlite.config.errors import Problem, refuse
from titanlite.config.load import read
from titanlite.config.loaded import LoadedConfig
from titanlite.config.run_sections import Ladder
from titanlite.contrib.lab.ladder.law import LadderError
from titanlite.models.counts import count_multiplied_parameters
from titanlite.models.llama_args import LlamaArgs
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

    @property
    def seeds(self) -> list[int]:
        """The seeds of each model's runs."""
        first = self.run.training.seed
        return [first + number for number in range(self.ladder.seeds)]

    @property
    def whole(self) -> int:
        """Parameters with the embedding."""
        return self.run.spec.count_parameters(self.args)

    @property
    def schedule_note(self) -> str | None:
        """How its learning rate differs from those of the ladder; None: it does not."""
        schedule = self.run.schedule
        share = self.ladder.decay_ratio
        falls = None
        if schedule.decay_steps is not None:
            falls = schedule.decay_steps / (schedule.total_steps or 1)
        is_same = falls is not None and abs(falls - share) < 0.01
        if is_same and schedule.decay_type in ("linear", "cosine", "sqrt"):
            return None
        length = "all its steps" if falls is None else f"{falls:.0%} of its steps"
        return (
            f"the rate of this file falls over {length} ({schedule.decay_type}), those of the "
            f"ladder over the last {share:.0%}: lr_scheduler.decay_ratio = {share:g} makes them "
            "equal"
        )


def target_of(arguments: argparse.Namespace, flags: Sequence[str]) -> Target:
    """Return the target of a command line.

    Raises ConfigError and LadderError for what cannot be the end of a ladder.
    """
    config, problems = read([*files_of(arguments), *flags])
    refuse(problems)
    # What this machine lacks matters only to runs on it.
    runs = not (arguments.fit or arguments.dry_run)
    config, run = resolve(config, ranks_of(arguments, config), problems, machine=runs, texts=True)
    refuse(placed(config, _obstacles(config)))
    run = with_vocabulary(run)
    args = run.model_args()
    if not isinstance(args, LlamaArgs):
        raise LadderError(
            f"model.name = {run.model.name!r}: no rule makes smaller models of it. Train them by "
            "files of your own, and give --fit a CSV of their parameters, tokens and losses"
        )
    if run.tokens is None:
        raise LadderError("training.epochs: give the length as training.steps or training.tokens")
    return Target(
        run=run,
        args=args,
        parameters=count_multiplied_parameters(args),
        tokens=run.tokens,
        ladder=config.sections.ladder,
        files=files_of(arguments),
        flags=flags,
        ranks=arguments.nproc_per_node or 1,
    )


def _obstacles(config: LoadedConfig) -> Iterator[Problem]:
    """Find the keys with which smaller runs would tell nothing of this one."""
    d = config.sections
    if not d.validation.enable:
        hint = "set it to true, with a held-out text"
        yield Problem(
            "needs", "validation.enable", "a ladder compares losses on held-out text", hint
        )
    if d.checkpoint.initial_load_path is not None:
        message = "the law is of models that are trained from the start"
        yield Problem("conflict", "checkpoint.initial_load_path", message, "remove it")
    if d.lora.rank:
        yield Problem(
            "conflict",
            "lora.rank",
            "the law is of models whose weights are all trained",
            "set it to 0",
        )
    if d.data.phase:
        message = "the text of a ladder must not change on the way"
        yield Problem("conflict", "data.phase", message, "predict the first phase alone")
    if d.mup.base_dim and d.ladder.lr_exponent and config.is_given("ladder.lr_exponent"):
        message = "has no effect with mup.base_dim: all models have the rate of this file"
        yield Problem("conflict", "ladder.lr_exponent", message, "remove one of them")
    has_rates = any(group.lr is not None for group in d.optimizer.groups)
    if has_rates and d.ladder.lr_exponent and not d.mup.base_dim:
        message = "groups have rates of their own, which ladder.lr_exponent does not scale"
        yield Problem(
            "conflict",
            "optimizer.groups",
            message,
            "set ladder.lr_exponent = 0, or remove their lr",
        )
