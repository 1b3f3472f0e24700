"""From a config to plans whose model exists, before anything is started. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from titanlite.config.advice import divisors
from titanlite.config.checks import contradictions, missing_files, missing_packages
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import read
from titanlite.config.loaded import LoadedConfig
from titanlite.config.not_implemented import refused
from titanlite.config.pipeline import SCHEDULES
from titanlite.config.plans import ModelPlan, Plans
from titanlite.config.resolve import draft, independent, smallest_world
from titanlite.models.llama.plan import linears, pipeline_costs, tensor_plan
from titanlite.models.shapes import SHAPES, LlamaArgs, ShapeError, resolve_args
from titanlite.parallel.float8_choice import (
    choice_problems,
    choose,
    gather_problem,
    recipe_problem,
    token_problem,
    wide_filters,
)
from titanlite.parallel.pipeline_split import SplitError, divide


def load_plans(path: str, world_size: int, flags: Sequence[str] = ()) -> Plans:
    """The plans of a TOML file (a bare name is also looked up in train_configs/), with flags as on a command line.

    Raises ConfigError with everything that would stop a training run.
    """
    return checked_plans([f"--job.config_file={path}", *flags], world_size, training=True)[1]


def checked_plans(argv: Sequence[str], world_size: int | None = None, *, training: bool) -> tuple[LoadedConfig, Plans]:
    """The config of a command line and its plans, every check made before anything is reported.

    world_size: ranks; None: the fewest on which the degrees of parallelism fit.
    training: also refuse what only stops a run here: features that are not built yet, files and packages that are not
    there.

    Raises ConfigError with all problems: wrong keys, contradictions, numbers that do not fit each other or the ranks,
    and those of `training`. What is but a consequence of another problem is left out.
    """
    config, problems = read(argv)
    if problems:
        raise ConfigError(problems)
    single = tuple(problems)
    problems += independent(contradictions(config), single, config)
    plans, unfit = _draft(config, world_size or smallest_world(config), None, problems)
    problems += unfit
    if training:
        problems += independent([*refused(config), *missing_files(config), *missing_packages(config)], single, config)
    if problems:
        raise ConfigError(problems)
    return config, plans


def resolve_plans(config: LoadedConfig, world_size: int, total_sequences: int | None = None) -> Plans:
    """`resolve` for the models there are, and a check that the model's numbers make a decoder. Raises ConfigError."""
    plans, problems = _draft(config, world_size, total_sequences, ())
    if problems:
        raise ConfigError(problems)
    return plans


def _draft(
    config: LoadedConfig, world_size: int, total_sequences: int | None, earlier: Sequence[Problem]
) -> tuple[Plans, list[Problem]]:
    plans, problems = draft(
        config, world_size=world_size, shapes=SHAPES, total_sequences=total_sequences, earlier=earlier
    )
    no_decoder = _no_decoder(config, plans.model)
    problems += independent(no_decoder, [*earlier, *problems], config)
    if not no_decoder:
        problems += independent(_undivided(config, plans), [*earlier, *problems], config)
        # A batch that cannot be cut says nothing about the model, though both depend on the degree.
        known = [p for p in [*earlier, *problems] if p.key != "experimental.pipeline_parallel_microbatches"]
        problems += independent(_no_stages(config, plans), known, config)
        unfit, warnings = _float8(config, plans)
        problems += independent(unfit, known, config)
        plans = replace(plans, warnings=(*plans.warnings, *warnings))
    return plans, problems


_SHAPE = tuple(f"model.{name}" for name in ("name", "flavor", "norm_type", "vocab_size", "rope_scaling", "overrides"))


def _no_decoder(config: LoadedConfig, plan: ModelPlan) -> list[Problem]:
    """What the model's numbers have against each other."""
    try:
        model_args(plan)
    except ShapeError as error:
        given = [key for key in config.sources if key.startswith("model.")]
        where = config.sources[given[-1]].place if given else ""
        lengths = ("training.seq_len", "validation.seq_len") if "max_seq_len" in dict(plan.overrides) else ()
        return [Problem(where, "model", str(error).removeprefix("model: "), about=(*_SHAPE, *lengths))]
    return []


def _undivided(config: LoadedConfig, plans: Plans) -> list[Problem]:
    """What tensor parallelism cannot divide, with the places of the keys to blame."""
    shape = [*_SHAPE, "training.tensor_parallel_degree"]
    lengths = ["training.tensor_parallel_degree", "experimental.context_parallel_degree"]
    return [
        replace(
            problem,
            where=config.place(problem.key),
            about=tuple(shape if problem.key in shape else [problem.key, *lengths]),
        )
        for problem in undivided(model_args(plans.model), plans)
    ]


def undivided(args: LlamaArgs, plans: Plans) -> list[Problem]:
    """What the ranks of tensor parallelism cannot share equally.

    A vocabulary that is to be the tokenizer's is left out until it is known.
    """
    tensor, context = plans.mesh.tensor, plans.mesh.context
    if tensor == 1:
        return []
    shared = {
        "n_heads": args.n_heads,
        "n_kv_heads": args.kv_heads,
        "the feed-forward's width": args.ffn_width,
        "the vocabulary": args.vocab_size or 0,
    }
    found = []
    if odd := [f"{name} = {number:,}" for name, number in shared.items() if number % tensor]:
        common = math.gcd(*shared.values())
        these = ", ".join(str(n) for n in divisors(common) if n <= args.n_heads)
        hint = f"these work: {these}"
        if args.vocab_size and args.vocab_size % tensor:
            larger = -(-args.vocab_size // tensor) * tensor
            hint += f"; model.vocab_size = {larger} leaves {larger - args.vocab_size} entries unused"
        message = f"is {tensor}, which does not divide {' nor '.join(odd)}"
        found.append(Problem("", "training.tensor_parallel_degree", message, hint))
    lengths = {"training.seq_len": plans.data.seq_len}
    if plans.validation.enable:
        lengths["validation.seq_len"] = plans.validation.seq_len
    ranks = tensor * context
    for key, length in lengths.items():
        if length % ranks:
            by = f"tensor_parallel {tensor}" + (f" * context_parallel {context}" if context > 1 else "")
            message = f"is {length}, and the sequence is divided over {by} = {ranks} ranks"
            around = [n for n in (length // ranks * ranks, -(-length // ranks) * ranks) if n]
            found.append(Problem("", key, message, f"these work: {' or '.join(map(str, around))}"))
    return found


def _no_stages(config: LoadedConfig, plans: Plans) -> list[Problem]:
    """What keeps the model from being cut into the stages of the pipeline."""
    if plans.mesh.pipeline == 1:
        return []
    args = model_args(plans.model)
    degree, points = "experimental.pipeline_parallel_degree", "experimental.pipeline_parallel_split_points"
    about = (degree, points, "experimental.pipeline_parallel_schedule", *_SHAPE)
    if args.tied:
        message = "embedding and head share one weight, and a pipeline has them on different ranks"
        hint = "set model.overrides.tied = false for two weights, or divide the model by other degrees"
        return [Problem(config.place(degree), degree, message, hint, about)]
    try:
        # No stage depends on the size of a vocabulary that is the tokenizer's, which is not read yet.
        divide(pipeline_costs(replace(args, vocab_size=args.vocab_size or 1), 1), plans.pipeline, plans.mesh.pipeline)
    except SplitError as error:
        key = points if plans.pipeline.split_points else degree
        several = SCHEDULES[plans.pipeline.schedule].stages != "one"
        hint = "take a smaller degree" + (", or a schedule with one stage per rank" if several else "")
        hint = "" if plans.pipeline.split_points else hint
        return [Problem(config.place(key), key, str(error), hint, about)]
    return []


def _float8(config: LoadedConfig, plans: Plans) -> tuple[list[Problem], list[str]]:
    """Products that float8 units cannot take, filters that name nothing, and a plan that leaves no product to them.

    Also what to warn of: filters that name more than they seem to.
    """
    plan, mesh = plans.float8, plans.mesh
    if not plan.enable:
        return [], []
    if (problem := recipe_problem(plan)) is not None:
        return [replace(problem, where=config.place(problem.key), about=(problem.key, "float8.recipe_name"))], []
    args = model_args(plans.model)
    args = replace(args, vocab_size=args.vocab_size or 1)  # the head is not converted, whatever its size
    sizes = linears(args)
    choices = choose(sizes, plan, tensor_plan(args), mesh.tensor)
    found = choice_problems(sizes, choices, plan)
    degrees = ("training.tensor_parallel_degree", "experimental.context_parallel_degree")
    about = dict.fromkeys((p.key for p in found), ("float8", *_SHAPE, degrees[0]))
    if (problem := token_problem(plans.batch, mesh, plans.pipeline)) is not None:
        pieces = "experimental.pipeline_parallel_microbatches"
        lengths = ("training.batch_size", "training.seq_len", degrees[1], pieces)
        found.append(replace(problem, about=("float8.enable_float8_linear", *lengths)))
    if plan.all_gather and (problem := gather_problem(choices, mesh.weight_shards)) is not None:
        found.append(replace(problem, about=("float8", *_SHAPE, *degrees, "training.data_parallel_shard_degree")))
    found = [replace(p, where=config.place(p.key), about=p.about or about[p.key]) for p in found]
    return found, wide_filters(sizes, plan)


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
