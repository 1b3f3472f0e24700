"""Load, check and derive a run; the third stage of the checks: what does not fit the ranks and the
model.

The first stage checks each key by itself (`titanlite.config.load`), the second contradictions
between keys (`titanlite.config.checks`). A stage reports all its problems at once, and the next one
runs only if there are none. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_fields

from titanlite.config.checks import (
    closed_urls,
    contradictions,
    missing_files,
    missing_packages,
    placed,
)
from titanlite.config.errors import ConfigError, Problem, Source, refuse
from titanlite.config.load import read
from titanlite.config.loaded import LoadedConfig
from titanlite.config.rules import Finding
from titanlite.config.sections import Config
from titanlite.config.toml import quote, quote_key
from titanlite.config.trust import admit
from titanlite.config.urls import public_name
from titanlite.data.text_check import open_choices, passes_warning, planned_passes
from titanlite.models.args import FROM_FOLDER, unknown_flavor
from titanlite.models.families import get_spec
from titanlite.models.fields import checked_fields
from titanlite.models.spec import ShapeError
from titanlite.parallel.schedules import SCHEDULES, find_schedule
from titanlite.resolve.misfits import (
    batch_misfits,
    rank_misfits,
    recomputation_misfits,
    refused_keys,
    rope_misfits,
    tensor_misfits,
    tokenizer_misfits,
)
from titanlite.run.config import RunConfig
from titanlite.run.derive import below, degrees_of, derive
from titanlite.run.features import Feature, features_of, moe_layers_of
from titanlite.run.interactions import halving_key
from titanlite.utils import is_dotted

_TP = "training.tensor_parallel_degree"
_AC_OPTION = "activation_checkpoint.selective_ac_option"


def load_config(path: str, world_size: int, flags: Sequence[str] = ()) -> RunConfig:
    """Load a TOML file for a run on `world_size` ranks, with flags as on a command line.

    A bare name is also looked up in train_configs/. Raises ConfigError as `check_config` does.
    """
    return check_config([f"--job.config_file={path}", *flags], world_size)[1]


def check_config(
    argv: Sequence[str],
    world_size: int | None = None,
    *,
    training: bool = True,
    defer: bool = False,
) -> tuple[LoadedConfig, RunConfig]:
    """Load the config of a command line, check it and derive its run.

    world_size: ranks; None: the fewest on which the degrees of parallelism fit.
    training: also refuse features that are not implemented yet, and files and packages that are
    missing here.
    defer: leave environment variables to the machines of a job, as `titanlite.config.load.read`
    does.

    Raises ConfigError with all problems of the first stage that finds some.
    """
    return check_loaded(*read(argv, defer), world_size, training=training)


def check_loaded(
    config: LoadedConfig,
    problems: Sequence[Problem],
    world_size: int | None = None,
    *,
    training: bool = True,
    look_at_text: bool = True,
) -> tuple[LoadedConfig, RunConfig]:
    """Do as `check_config` for a config that is read already.

    problems: those that were found in it.

    look_at_text: also list local folders of text; False for another layout of a config whose text
    was looked at.
    """
    if problems:
        raise ConfigError([*problems, *_model_names(config)])
    admit(config.claims, config.origin)
    found = contradictions(config)
    if look_at_text and not found:
        found += unclear_texts(config)
    if training:
        found += closed_urls(config)
        found += missing_files(config)
        found += missing_packages(config)
    if found:
        raise ConfigError([*found, *_model_names(config)])
    config = shaped(config)
    run = _fitted(config, world_size or smallest_world(config))
    if training:
        refuse(unnamed_tokenizer(config, run))
    if look_at_text:
        run = replace_fields(run, warnings=(*run.warnings, *many_passes(run)))
    return config, run


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


def shaped(config: LoadedConfig) -> LoadedConfig:
    """Return the config with the shape that `model.flavor = "from_folder"` asks for, in
    model.overrides.

    So the config that a run keeps describes its model by itself. Raises ConfigError for a folder
    that gives no shape.
    """
    d = config.sections
    if d.model.flavor != FROM_FOLDER:
        return config
    from titanlite.resolve.folder_shape import FolderShapeError, read_shape

    try:
        shape = read_shape(d.model, d.checkpoint, below(d.job.dump_folder, d.checkpoint.folder))
    except FolderShapeError as error:
        found = ("model", error.key, str(error), error.advice)
        raise ConfigError(placed(config, [found])) from None
    except ShapeError as error:
        raise ConfigError(_model_problems(config, error)) from None
    if shape is None:
        return config
    sections = replace_fields(d, model=replace_fields(d.model, overrides=dict(shape.overrides)))
    source = Source("file", shape.file)
    sources = {f"model.overrides.{quote_key(name)}": source for name in shape.overrides}
    note = (
        f'model.flavor "from_folder": the shape of {shape.file}, in model.overrides of the config '
        "that is kept"
    )
    return replace(
        config,
        sections=sections,
        sources={**sources, **config.sources},
        notes=(*config.notes, note),
    )


def fitted(config: LoadedConfig, world_size: int) -> RunConfig:
    """Derive a run and check that it fits the ranks and the model.

    Raises ConfigError with all that does not.

    Code that a foreign config names is refused before the model is imported, or announced
    (`titanlite.config.trust`).
    """
    admit(config.claims, config.origin)
    return _fitted(config, world_size)


def _fitted(config: LoadedConfig, world_size: int) -> RunConfig:
    config = shaped(config)
    run = derive(config, world_size)
    refuse(misfits(config, run))
    return run


def unnamed_tokenizer(config: LoadedConfig, run: RunConfig) -> list[Problem]:
    """Return a problem for a model that needs its own tokenizer where the config names none."""
    if config.is_given("model.tokenizer_path"):
        return []
    return placed(config, list(tokenizer_misfits(run)))


def unclear_texts(config: LoadedConfig) -> list[Problem]:
    """Return a problem for each local folder that leaves open which of its files are meant."""
    d = config.sections
    found: list[Finding] = []
    for key, error in open_choices(d.training, d.data, d.validation):
        found.append(("unclear-text", key, error.reason, "\n    ".join(error.lines)))
    return placed(config, found)


def many_passes(run: RunConfig) -> Iterator[str]:
    """Warn of texts that are read too often, as far as that is known before they are read."""
    for name, passes in planned_passes(run.training, run.data, run.tokens).items():
        warning = passes_warning(public_name(name), passes)
        if warning:
            yield warning


def misfits(config: LoadedConfig, run: RunConfig) -> list[Problem]:
    """Return all that does not fit the number of ranks and the model, for a config without
    contradictions.

    The numbers of the ranks and the model's own are checked together. If one is wrong, the model is
    not divided.
    """
    d = config.sections
    features = run.features
    pipeline = features.pipeline
    found = list(rank_misfits(d, run))
    if not found:
        found += batch_misfits(run)
        if run.data.phase or run.schedule.in_tokens:
            from titanlite.resolve.phase_misfits import phase_misfits

            found += phase_misfits(run)
        if features.context is not None:
            found += features.context.rank_misfits(run)
        found += _unknown_schedule(d)
        if pipeline is not None:
            found += pipeline.misfits(d, run)
    if not found and pipeline is not None:
        for batch in run.legs.values():
            found += pipeline.microbatch_misfits(replace_fields(run, batch=batch))
    try:
        args = run.model_args()
    except ShapeError as error:
        return placed(config, found) + _model_problems(config, error)
    found += _not_offered(run)
    found += recomputation_misfits(run.spec, args, d)
    found += rope_misfits(args, run)
    found += refused_keys(args, run)
    if run.checkpoint.initial_load_path is not None:
        from titanlite.resolve.folder_shape import source_misfits

        found += source_misfits(run.model, run.checkpoint, args)
    if not found:
        found += tensor_misfits(args, run)
        moe_layers = moe_layers_of(run.spec, args)
        if moe_layers is not None:
            found += moe_layers.misfits(run)
        for feature in features.on:
            found += _model_misfits(feature, run, args)
    return placed(config, found)


def _model_misfits(feature: Feature, run: RunConfig, args: Any) -> Iterator[Finding]:
    """Find what does not fit the model, with the batch of any phase."""
    found: dict[Finding, None] = {}
    for first in run.legs:
        found |= dict.fromkeys(feature.model_misfits(run.steady_at(first), args))
    yield from found


def _not_offered(run: RunConfig) -> Iterator[Finding]:
    """Find the features that the config asks for and the model does not offer."""
    #: Field of the spec → the key that needs it.
    fields: dict[str, str] = {}
    if run.mesh.tensor > 1:
        fields["tensor_plan"] = _TP
    halving = halving_key(run)
    if halving is not None:
        fields["sublayer_names"] = halving
    for feature in run.features.on:
        if feature.model_field:
            fields[feature.model_field] = feature.key
    for field, key in fields.items():
        if getattr(run.spec, field):
            continue
        beside = " together with training.compile" if field == "sublayer_names" else ""
        message = (
            f"is not supported by the model {run.model.name}{beside}: its ModelSpec has no {field}"
        )
        yield "model", key, message, "leave the key out, or add it to the model"


def _model_problems(config: LoadedConfig, error: ShapeError) -> list[Problem]:
    """Return what is wrong with the model's arguments."""
    given = [source.place for key, source in config.sources.items() if key.startswith("model.")]
    problems = []
    for misfit in error.misfits:
        key = f"model.{misfit.field}" if misfit.field else "model"
        place = config.place(key) or (given[-1] if given else "")
        problems.append(Problem(place, key, misfit.message, misfit.advice, code="model"))
    return problems


def _model_names(config: LoadedConfig) -> list[Problem]:
    """Check the names of family, flavor and overrides alone, of a family of titanlite's.

    The third stage finds them too. They are told with the problems of the first two, so a user sees
    them without another start.
    """
    model = config.sections.model
    if is_dotted(model.name) or model.name == "hf":
        return []
    found: list[Problem] = []
    try:
        spec = get_spec(model.name)
    except ShapeError as error:
        return _model_problems(config, error)
    if model.flavor not in (*spec.flavors, FROM_FOLDER):
        found += _model_problems(config, unknown_flavor(spec, model.flavor))
    try:
        checked_fields(spec.args_class, model.overrides, "overrides")
    except ShapeError as error:
        found += _model_problems(config, error)
    return found


def _unknown_schedule(d: Config) -> Iterator[Finding]:
    """Check the name of a pipeline's schedule, also where there is no pipeline."""
    name = d.experimental.pipeline_parallel_schedule
    if find_schedule(name) is None:
        key = "experimental.pipeline_parallel_schedule"
        hint = f"there are {', '.join(SCHEDULES)}"
        yield "unknown-value", key, f"no schedule {quote(name)}", hint
