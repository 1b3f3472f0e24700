"""From a config to plans whose model exists, before anything is started. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.config.checks import contradictions, missing_files, missing_packages
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.job import JobConfig, independent
from titanlite.config.load import read
from titanlite.config.plans import ModelPlan, Plans
from titanlite.config.resolve import draft, smallest_world
from titanlite.config.unbuilt import refused
from titanlite.models.shapes import SHAPES, LlamaArgs, ShapeError, resolve_args


def load_plans(path: str, world_size: int, flags: Sequence[str] = ()) -> Plans:
    """The plans of a TOML file (a bare name is also looked up in train_configs/), with flags as on a command line.

    Raises ConfigError with everything that would stop a training run.
    """
    return checked_plans([f"--job.config_file={path}", *flags], world_size, training=True)[1]


def checked_plans(argv: Sequence[str], world_size: int | None = None, *, training: bool) -> tuple[JobConfig, Plans]:
    """The config of a command line and its plans, every check made before anything is reported.

    world_size: ranks; None: the fewest on which the degrees of parallelism fit.
    training: also refuse what only stops a run here: features that are not built yet, files and packages that are not
    there.

    Raises ConfigError with all problems: wrong keys, contradictions, numbers that do not fit each other or the ranks,
    and those of `training`. What is but a consequence of another problem is left out.
    """
    config, problems = read(argv)
    single = tuple(problems)
    problems += independent(contradictions(config), single, config)
    plans, unfit = _draft(config, world_size or smallest_world(config), None, problems)
    problems += unfit
    if training:
        problems += independent([*refused(config), *missing_files(config), *missing_packages(config)], single, config)
    if problems:
        raise ConfigError(problems)
    return config, plans


def resolve_plans(config: JobConfig, world_size: int, total_sequences: int | None = None) -> Plans:
    """`resolve` for the models there are, and a check that the model's numbers make a decoder. Raises ConfigError."""
    plans, problems = _draft(config, world_size, total_sequences, ())
    if problems:
        raise ConfigError(problems)
    return plans


def _draft(
    config: JobConfig, world_size: int, total_sequences: int | None, earlier: Sequence[Problem]
) -> tuple[Plans, list[Problem]]:
    plans, problems = draft(
        config, world_size=world_size, shapes=SHAPES, total_sequences=total_sequences, earlier=earlier
    )
    return plans, problems + independent(_no_decoder(config, plans.model), [*earlier, *problems], config)


_SHAPE = tuple(f"model.{name}" for name in ("name", "flavor", "norm_type", "vocab_size", "rope_scaling", "overrides"))


def _no_decoder(config: JobConfig, plan: ModelPlan) -> list[Problem]:
    """What the model's numbers have against each other."""
    try:
        model_args(plan)
    except ShapeError as error:
        given = [key for key in config.sources if key.startswith("model.")]
        where = config.sources[given[-1]].place if given else ""
        lengths = ("training.seq_len", "validation.seq_len") if "max_seq_len" in dict(plan.overrides) else ()
        return [Problem(where, "model", str(error).removeprefix("model: "), about=(*_SHAPE, *lengths))]
    return []


def model_args(plan: ModelPlan, tokenizer_size: int | None = None) -> LlamaArgs:
    """The model's arguments; ShapeError when its numbers make no decoder or the tokenizer has more entries than it."""
    return resolve_args(
        plan.name,
        plan.flavor,
        {**dict(plan.overrides), "norm_type": plan.norm_type},
        vocab_size=plan.vocab_size,
        tokenizer_size=tokenizer_size,
        max_seq_len=plan.max_seq_len,
    )
