"""From a config to its run: checks in stages, and the numbers that follow.

A stage reports all its problems at once, and the next one runs only if there are none. The first
checks each key by itself (`titanlite.config.load`). The second checks keys against each other,
files and packages (`titanlite.config.checks`, and the features' own). The last two check the ranks
(`rank_rules`) and the model (`model_rules`). No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from titanlite.config.checks import MACHINE_RULES, RULES, broken, is_installed, placed
from titanlite.config.errors import ConfigError, Problem, Source, refuse
from titanlite.config.load import read
from titanlite.config.loaded import LoadedConfig
from titanlite.config.notes import Note, Weight
from titanlite.config.toml import quote_key
from titanlite.config.trust import admit
from titanlite.data.dataset_sources import open_choices, text_problems
from titanlite.models.args import FROM_FOLDER
from titanlite.models.spec import ShapeError
from titanlite.resolve import model_rules, rank_rules
from titanlite.run.config import RunConfig
from titanlite.run.derive import below, degrees_of, derive
from titanlite.run.features import features_of, moe_layers_of, not_installed

_TP = "training.tensor_parallel_degree"


def load_config(path: str, world_size: int, flags: Sequence[str] = ()) -> RunConfig:
    """Load a TOML file for a run on `world_size` ranks, with flags as on a command line.

    A name is also looked up in train_configs/. Raises ConfigError as `check_config` does.
    """
    return check_config([f"--job.config_file={path}", *flags], world_size)[1]


def check_config(
    argv: Sequence[str],
    world_size: int | None = None,
    *,
    training: bool = True,
    defer: bool = False,
) -> tuple[LoadedConfig, RunConfig]:
    """Load the config of a command line, check it and derive its run, as `resolve` does.

    training: also refuse missing files and packages. defer: leave environment variables to a job's
    machines, as `titanlite.config.load.read` does.
    """
    config, problems = read(argv, defer)
    return resolve(config, world_size, problems, machine=training, texts=True)


def resolve(
    config: LoadedConfig,
    world_size: int | None = None,
    problems: Iterable[Problem] = (),
    *,
    machine: bool = False,
    texts: bool = False,
) -> tuple[LoadedConfig, RunConfig]:
    """Check a config that is read, and derive its run.

    The returned config has the shape of `model.flavor = "from_folder"`. world_size: ranks; None:
    the fewest on which the degrees of parallelism fit. problems: those found when it was read.
    machine and texts: as for `check_alone`.

    Raises ConfigError with all problems of the first stage that finds some. Code that a foreign
    config names is refused before the model is imported, or announced (`titanlite.config.trust`).
    """
    if not problems:
        admit(config.claims, config.origin)
    check_alone(config, problems, machine=machine, texts=texts)
    config = _shaped(config)
    run = derive(config, world_size or smallest_world(config))
    refuse(_problems_of_run(config, run))
    if machine:
        refuse(unnamed_tokenizer(config, run))
    return config, run


def check_alone(
    config: LoadedConfig,
    problems: Iterable[Problem] = (),
    *,
    machine: bool = False,
    texts: bool = False,
) -> None:
    """Raise ConfigError for what is wrong with a config on any number of ranks.

    machine: also missing files and packages. texts: also ambiguous local folders.
    """
    found = [*problems] or broken(config, [not_installed])
    if not found:
        features = features_of(config.sections).on
        found = broken(config, [*RULES, *(feature.contradictions for feature in features)])
        if texts and not found:
            d = config.sections
            unclear = (
                Problem("unclear-text", error.key, error.reason, "\n    ".join(error.lines))
                for error in open_choices(d.training, d.data, d.validation)
            )
            found = placed(config, [*unclear, *text_problems(d.training, d.data, d.validation)])
        if machine:
            found += broken(config, MACHINE_RULES)
            tasks = features_of(config.sections).tasks
            if tasks is not None:
                found += placed(config, tasks.missing_packages(is_installed))
    if found:
        raise ConfigError(found)


def smallest_world(config: LoadedConfig) -> int:
    """Return the fewest ranks on which the degrees of parallelism fit."""
    d = config.sections
    if d.checkpoint.create_seed_checkpoint:
        return 1
    degrees = degrees_of(d)
    shard = "training.data_parallel_shard_degree"
    if degrees[shard] == -1:
        reshard = d.training.reshard_after_forward
        degrees[shard] = reshard if isinstance(reshard, int) else 1
        experts = features_of(d).experts
        if experts is not None:
            context = degrees["experimental.context_parallel_degree"]
            degrees[shard] *= experts.fewest_shards(context * degrees[_TP])
    return math.prod(max(degree, 1) for degree in degrees.values())


def _shaped(config: LoadedConfig) -> LoadedConfig:
    """Return the config with the shape of `model.flavor = "from_folder"` in model.overrides.

    So a run's config describes its model by itself. Raises ConfigError for a shapeless folder.
    """
    d = config.sections
    if d.model.flavor != FROM_FOLDER:
        return config
    from titanlite.resolve.weights_shape import read_shape

    try:
        shape = read_shape(d.model, d.checkpoint, below(d.job.dump_folder, d.checkpoint.folder))
    except ConfigError as error:
        raise ConfigError(placed(config, error.problems)) from None
    except ShapeError as error:
        raise ConfigError(_model_problems(config, error)) from None
    if shape is None:
        return config
    overrides, file = shape
    sections = replace_fields(d, model=replace_fields(d.model, overrides=dict(overrides)))
    source = Source("file", file)
    sources = {f"model.overrides.{quote_key(name)}": source for name in overrides}
    note = (
        f'model.flavor "from_folder": the shape of {file}, in model.overrides of the config that '
        "is kept"
    )
    return replace(
        config,
        sections=sections,
        sources={**sources, **config.sources},
        notes=(*config.notes, Note(Weight.REST, note)),
    )


def unnamed_tokenizer(config: LoadedConfig, run: RunConfig) -> list[Problem]:
    """Return a problem for a model that needs its own tokenizer where none is named."""
    if config.is_given("model.tokenizer_path"):
        return []
    return placed(config, model_rules.tokenizer_problems(run))


def _problems_of_run(config: LoadedConfig, run: RunConfig) -> list[Problem]:
    """Return what does not fit the ranks and the model; one with wrong numbers is not divided."""
    d = config.sections
    features = run.features
    pipeline = features.pipeline
    found = list(rank_rules.mesh_problems(d, run))
    if not found:
        for rule in rank_rules.RULES:
            found += rule(d, run)
        if features.context is not None:
            found += features.context.rank_problems(run)
        if pipeline is not None:
            found += pipeline.problems(d, run)
    if not found and pipeline is not None:
        for batch in run.legs.values():
            found += pipeline.microbatch_problems(replace_fields(run, batch=batch))
    try:
        args = run.model_args()
    except ShapeError as error:
        return placed(config, found) + _model_problems(config, error)
    for model_rule in model_rules.RULES:
        found += model_rule(run, args)
    if run.checkpoint.initial_load_path is not None:
        from titanlite.resolve.weights_shape import source_problems

        found += source_problems(run.model, run.checkpoint, args)
    if not found:
        found += model_rules.tensor_problems(run, args)
        moe_layers = moe_layers_of(run.spec, args)
        if moe_layers is not None:
            found += moe_layers.problems(run)
        for feature in features.on:
            # The batch of any phase must fit. `ConfigError` has what is found twice once.
            for first in run.legs:
                found += feature.model_problems(run.steady_at(first), args)
    return placed(config, found)


def _model_problems(config: LoadedConfig, error: ShapeError) -> list[Problem]:
    given = [source.place for key, source in config.sources.items() if key.startswith("model.")]
    problems = []
    for problem in error.problems:
        key = f"model.{problem.key}" if problem.key else "model"
        place = config.place(key) or (given[-1] if given else "")
        problems.append(replace(problem, key=key, where=place))
    return problems
