"""From a config to plans whose model exists, before anything is started. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.config.errors import ConfigError, Problem
from titanlite.config.job import JobConfig
from titanlite.config.load import load_file
from titanlite.config.plans import ModelPlan, Plans
from titanlite.config.resolve import resolve
from titanlite.config.unbuilt import refuse_unbuilt
from titanlite.models.shapes import SHAPES, LlamaArgs, ShapeError, resolve_args


def load_plans(path: str, world_size: int, flags: Sequence[str] = ()) -> Plans:
    """The plans of a TOML file (a bare name is also looked up in train_configs/), with flags as on a command line.

    Raises ConfigError with every problem, features that are switched on but not built included.
    """
    config = load_file(path, flags)
    refuse_unbuilt(config)
    return resolve_plans(config, world_size)


def resolve_plans(config: JobConfig, world_size: int, total_sequences: int | None = None) -> Plans:
    """`resolve` for the models there are, and a check that the model's numbers make a decoder. Raises ConfigError."""
    plans = resolve(config, world_size=world_size, shapes=SHAPES, total_sequences=total_sequences)
    try:
        model_args(plans.model)
    except ShapeError as error:
        given = [key for key in config.sources if key.startswith("model.")]
        where = config.sources[given[-1]].place if given else ""
        raise ConfigError([Problem(where, "model", str(error).removeprefix("model: "))]) from None
    return plans


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
