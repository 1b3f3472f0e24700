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
from titanlite.config.errors import ConfigError, Problem, Source
from titanlite.config.load import read
from titanlite.config.loaded import LoadedConfig
from titanlite.config.not_implemented import refused
from titanlite.config.rules import Finding, divisors
from titanlite.config.sections import Config
from titanlite.config.toml import quote, quote_key
from titanlite.config.trust import admit
from titanlite.config.urls import public_name
from titanlite.data.text_check import open_choices, passes_warning, planned_passes
from titanlite.features import features_of
from titanlite.features.interactions import compiles_halves, needs_whole_backward
from titanlite.models.args import FROM_FOLDER, unknown_flavor
from titanlite.models.families import get_spec
from titanlite.models.fields import checked_fields
from titanlite.models.spec import ShapeError
from titanlite.parallel import ParallelismError
from titanlite.parallel.pipeline_split import SCHEDULES, find_schedule, split_stages
from titanlite.start.derive import RunConfig, below, derive, smallest_world
from titanlite.start.folder_shape import FolderShapeError, read_shape, source_misfits
from titanlite.start.misfits import (
    batch_misfits,
    rank_misfits,
    recomputation_misfits,
    tensor_misfits,
)
from titanlite.utils import is_dotted

_PP = "experimental.pipeline_parallel_"
_TP = "training.tensor_parallel_degree"
_EP = "parallelism.expert_parallel_degree"
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
    _stop(problems and [*problems, *_model_names(config)])
    admit(config.claims, config.origin)
    found = contradictions(config)
    if look_at_text and not found:
        found += unclear_texts(config)
    if training:
        found += [
            *refused(config),
            *closed_urls(config),
            *missing_files(config),
            *missing_packages(config),
        ]
    _stop(found and [*found, *_model_names(config)])
    config = shaped(config)
    run = _fitted(config, world_size or smallest_world(config))
    if look_at_text:
        run = replace_fields(run, warnings=(*run.warnings, *many_passes(run)))
    return config, run


def shaped(config: LoadedConfig) -> LoadedConfig:
    """Return the config with the shape that `model.flavor = "from_folder"` asks for, in
    model.overrides.

    So the config that a run keeps describes its model by itself. Raises ConfigError for a folder
    that gives no shape.
    """
    d = config.sections
    try:
        shape = read_shape(d.model, d.checkpoint, below(d.job.dump_folder, d.checkpoint.folder))
    except FolderShapeError as error:
        raise ConfigError(
            placed(config, [("model", error.key, str(error), error.advice)])
        ) from None
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


def fitted(config: LoadedConfig, world_size: int, total_sequences: int | None = None) -> RunConfig:
    """Derive a run and check that it fits the ranks and the model.

    Raises ConfigError with all that does not.

    Code that a foreign config names is refused before the model is imported, or announced
    (`titanlite.config.trust`).
    """
    admit(config.claims, config.origin)
    return _fitted(config, world_size, total_sequences)


def _fitted(config: LoadedConfig, world_size: int, total_sequences: int | None = None) -> RunConfig:
    config = shaped(config)
    run = derive(config, world_size, total_sequences)
    _stop(misfits(config, run))
    return run


def unclear_texts(config: LoadedConfig) -> list[Problem]:
    """Return a problem for each local folder that leaves open which of its files are meant."""
    d = config.sections
    unclear = open_choices(d.training, d.data, d.validation)
    lines = ((key, error.reason, "\n    ".join(error.lines)) for key, error in unclear)
    return placed(config, (("unclear-text", key, reason, hint) for key, reason, hint in lines))


def many_passes(run: RunConfig) -> Iterator[str]:
    """Warn of texts that are read too often, as far as that is known before they are read."""
    tokens = None if run.steps is None else run.steps * run.batch.tokens_per_step
    for name, passes in planned_passes(run.training, run.data, tokens).items():
        if warning := passes_warning(public_name(name), passes):
            yield warning


def _stop(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


def misfits(config: LoadedConfig, run: RunConfig) -> list[Problem]:
    """Return all that does not fit the number of ranks and the model, for a config without
    contradictions.

    The numbers of the ranks and the model's own are checked together. If one is wrong, the model is
    not divided.
    """
    d = config.sections
    found = list(rank_misfits(d, run))
    if not found:
        found += batch_misfits(run)
        for feature in features_of(run).on:
            found += feature.rank_misfits(run)
        found += _pipeline_misfits(d, run)
    if not found:
        found += _microbatch_misfits(run)
    try:
        args = run.model_args()
    except ShapeError as error:
        return placed(config, found) + _model_problems(config, error)
    found += _not_offered(run)
    found += recomputation_misfits(run.spec, args, d)
    found += source_misfits(run.model, run.checkpoint, args)
    if not found:
        found += [
            *_expert_misfits(args, run),
            *tensor_misfits(args, run),
            *_stage_misfits(args, run),
        ]
        for feature in features_of(run).on:
            found += feature.model_misfits(run, args)
    return placed(config, found)


def _not_offered(run: RunConfig) -> Iterator[Finding]:
    """Find the features that the config asks for and the model does not offer."""
    spec, mesh = run.spec, run.mesh
    compiled = run.training.compile and "model" in run.compile.components
    halves = mesh.expert > 1
    if compiled and mesh.tensor > 1:
        halves = halves or compiles_halves(run.activation_checkpoint, run.float8, run.experimental)
    asked = {
        "tensor_plan": (_TP, mesh.tensor > 1),
        "experts": (_EP, mesh.expert > 1),
        "sublayer_names": (
            _TP if mesh.tensor > 1 else _EP,
            mesh.tensor * mesh.expert > 1 and compiled and halves,
        ),
        "pipeline_costs": (f"{_PP}degree", mesh.pipeline > 1),
    }
    fields = {field: key for field, (key, is_asked) in asked.items() if is_asked}
    for feature in features_of(run).on:
        if feature.model_field:
            fields[feature.model_field] = feature.key
    for field, key in fields.items():
        if getattr(spec, field):
            continue
        beside = " together with training.compile" if field == "sublayer_names" else ""
        message = (
            f"is not offered by the model {run.model.name}{beside}: its ModelSpec has no {field}"
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

    The third stage finds them too. They are told with the problems of the first two, so that nobody
    waits for them.
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


def _pipeline_misfits(d: Config, run: RunConfig) -> Iterator[Finding]:
    """Check the schedule of a pipeline and its stages."""
    e, t, degree = d.experimental, d.training, run.mesh.pipeline
    name = find_schedule(e.pipeline_parallel_schedule)
    if name is None:
        message = f"no schedule {quote(e.pipeline_parallel_schedule)}"
        yield "unknown-value", f"{_PP}schedule", message, f"there are {', '.join(SCHEDULES)}"
    if degree == 1:
        return
    pieces = run.pipeline.microbatches
    if t.batch_size % pieces:
        said = f"is {pieces}{'' if e.pipeline_parallel_microbatches else f', that of {_PP}degree,'}"
        fitting = ", ".join(map(str, divisors(t.batch_size)))
        hint = f"these divide it: {fitting}; or set training.batch_size to a multiple of {pieces}"
        yield (
            "divide",
            f"{_PP}microbatches",
            f"{said} which does not divide training.batch_size = {t.batch_size}",
            hint,
        )
    if name is None:
        return
    points, stages = len(e.pipeline_parallel_split_points), run.pipeline.stages
    fits, wanted = {
        "one": (stages == degree, f"one stage per rank: {degree - 1} split points"),
        "loop": (
            stages % degree == 0 < stages - degree,
            f"two or more stages per rank, as by {2 * degree - 1} points",
        ),
        "v": (stages == 2 * degree, f"two stages per rank: {2 * degree - 1} split points"),
    }[SCHEDULES[name].stages]
    if points and not fits:
        made = (
            f"{points} split points make {stages} stages, but {quote(name)} on {degree} pipeline "
            f"ranks needs {wanted}"
        )
        yield (
            "divide",
            f"{_PP}split_points",
            made,
            "give as many, or none: then titanlite divides the model evenly",
        )
    for reason, remedy in needs_whole_backward(d) if SCHEDULES[name].splits_backward else ():
        message = (
            f"{quote(name)} splits each backward into one for inputs and one for weights, and "
            f"{reason}"
        )
        yield (
            "conflict",
            f"{_PP}schedule",
            message,
            f'"1F1B" and "Interleaved1F1B" do not split it; or set {remedy}',
        )


def _microbatch_misfits(run: RunConfig) -> Iterator[Finding]:
    """Check how many micro-batches a pipeline has in a step."""
    degree, pieces, name = (
        run.mesh.pipeline,
        run.pipeline.microbatches,
        run.experimental.pipeline_parallel_schedule,
    )
    total = pieces * run.batch.accumulation
    rounds = max(1, total // degree)
    number = (
        f"is {pieces}, so {total} micro-batches per step ({pieces} * accumulation "
        f"{run.batch.accumulation})"
    )
    if degree > 1 and name == "1F1B" and total < degree:
        message = f"{number}, and 1F1B needs one for each of the {degree} stages at least"
        yield (
            "batch",
            f"{_PP}microbatches",
            message,
            f'give {degree} or more, or take the schedule "GPipe"',
        )
    if degree > 1 and name.startswith("Interleaved") and total % rounds:
        message = f"{number}; {name} runs them in {rounds} rounds of equal size over {degree} ranks"
        yield "batch", f"{_PP}microbatches", message, f"give a multiple of {degree}"


def _expert_misfits(args: Any, run: RunConfig) -> Iterator[Finding]:
    """Check that the ranks that share the weights can share the experts too."""
    mesh, reshard = run.mesh, run.training.reshard_after_forward
    ranks, shards = mesh.expert, mesh.weight_shards
    if run.spec.experts is None:
        return
    experts = math.gcd(*run.spec.experts(args).values())
    if ranks > 1 and mesh.tensor > 1:
        message = (
            f"is {ranks}: tensor-parallel ranks hold the same tokens, and would send each of them "
            "more than once"
        )
        yield "conflict", _EP, message, f"set {_TP} = 1, or this key"
    if ranks > 1 and run.activation_checkpoint.mode == "budget":
        message = (
            'is "budget", which covers compiled code alone, and experts that ranks share are not '
            "compiled"
        )
        yield "conflict", "activation_checkpoint.mode", message, 'take "full" or "selective"'
    if shards % ranks or experts % ranks:
        which = f"data_parallel_shard{' * context_parallel' if mesh.context > 1 else ''} = {shards}"
        fitting = ", ".join(map(str, divisors(math.gcd(shards, experts))))
        message = f"is {ranks}, which does not divide both {which} and the {experts} experts"
        yield "divide", _EP, message, f"these work: {fitting}"
    # torch keeps weights over fewer ranks only where dimension 0 alone is cut, and on one mesh.
    elif (
        isinstance(reshard, int) and reshard != shards // ranks and (ranks > 1 or experts % shards)
    ):
        alike = shards // ranks
        message = (
            f"is {reshard}; experts that are cut inside their matrices stay over all their "
            f"{alike} ranks"
        )
        hint = 'take "default", "always" or "never"' + (f", or {alike}" if alike > 1 else "")
        yield "ranks", "training.reshard_after_forward", message, hint


def _stage_misfits(args: Any, run: RunConfig) -> Iterator[Finding]:
    """Check that the model can be cut into the stages of the pipeline."""
    e = run.experimental
    if run.mesh.pipeline == 1 or run.spec.pipeline_costs is None:
        return
    if getattr(args, "tied", False):
        message = "embedding and head share one weight, and a pipeline has them on different ranks"
        hint = (
            "set model.overrides.tied = false for two weights, or divide the model by other degrees"
        )
        yield "divide", f"{_PP}degree", message, hint
        return
    try:
        # No stage depends on the size of a vocabulary that is the tokenizer's, which is not read
        # yet.
        costs = run.spec.pipeline_costs(replace(args, vocab_size=args.vocab_size or 1), 1)
        split_stages(
            costs, run.mesh.pipeline, e.pipeline_parallel_schedule, e.pipeline_parallel_split_points
        )
    except ParallelismError as error:
        by_points = bool(e.pipeline_parallel_split_points)
        hint = "" if by_points else "take a smaller degree, or a schedule with one stage per rank"
        yield "divide", f"{_PP}{'split_points' if by_points else 'degree'}", str(error), hint
