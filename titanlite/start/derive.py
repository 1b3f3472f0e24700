"""Derive a run from a config.

It adds what follows from two sections, the number of ranks or the length of the text.

It checks nothing: `titanlite.start.fit.load_config` does both. No torch here.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace as replace_fields

from titanlite.config import extensions
from titanlite.config.idle_keys import idle_keys
from titanlite.config.keys import sections
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import Config
from titanlite.config.urls import is_url
from titanlite.data.course import Course, StepSize
from titanlite.features import features_of, lora_of, pipeline_of
from titanlite.models.args import model_args
from titanlite.models.families import get_spec
from titanlite.models.spec import ModelSpec
from titanlite.optim.schedule import Schedule
from titanlite.start.length import steps_of
from titanlite.start.schedule_parts import Told, schedule_of
from titanlite.utils import counted

S = TypeVar("S", bound=Any)


@dataclass(frozen=True)
class MeshSizes:
    """Degrees of parallelism; their product is the world size."""

    world_size: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    #: Ranks that share one sequence (context), one layer's weights (tensor), the layers of one copy
    #: (pipeline).
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    #: Ranks that share the experts of an MoE layer; no factor of the world size.
    expert: int = 1

    @property
    def dimensions(self) -> dict[str, int]:
        """Degrees by the names of the device mesh, the outermost first."""
        return {
            "pp": self.pipeline,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.context,
            "tp": self.tensor,
        }

    @property
    def dp_degree(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def weight_shards(self) -> int:
        """Ranks over which `fully_shard` divides each weight; ranks that share sequences hold the
        same weights.
        """
        return self.dp_shard * self.context

    @property
    def weight_shards_in_words(self) -> str:
        """The degrees whose product that is."""
        if self.context == 1:
            return "data_parallel_shard"
        return "data_parallel_shard * context_parallel"


@dataclass(frozen=True)
class BatchSizes:
    """Batch arithmetic: sequences per step = micro_batch_size * accumulation *
    data-parallel ranks.
    """

    #: Sequences per micro-batch and data-parallel rank.
    micro_batch_size: int
    #: Micro-batches per step and rank.
    accumulation: int
    #: Sequences per step over all ranks.
    global_batch_size: int
    #: Tokens per sequence.
    seq_len: int
    #: Tokens per step over all ranks (global_batch_size * seq_len).
    tokens_per_step: int


@dataclass(frozen=True)
class PipelineSizes:
    """How often a model and a micro-batch are cut."""

    #: Stages of the whole model, over all ranks.
    stages: int = 1
    #: Pieces of each micro-batch of `BatchSizes.micro_batch_size` sequences.
    microbatches: int = 1


class RunConfig(Config, frozen=True, kw_only=True):
    """One run: its sections, with folders joined and defaults of other sections filled in, and what
    follows from them.

    Filled in: folders below job.dump_folder, validation.batch_size and seq_len, and of a pipeline
    its schedule's exact name, its micro-batches and training.reshard_after_forward. The degrees and
    sizes that are -1 in the sections are in `mesh` and `batch`.
    """

    mesh: MeshSizes
    #: Of the first step.
    batch: BatchSizes
    #: The sizes of all steps, where nothing disturbs the run.
    course: Course
    pipeline: PipelineSizes
    #: Optimizer steps; None: `training.epochs` waits for the length of the text.
    steps: int | None
    schedule: Schedule
    #: How each derived number came about, one sentence each.
    notes: tuple[str, ...]
    #: What a user should know and what stops nothing.
    warnings: tuple[str, ...]
    #: The config as written, as one TOML file with the source of each value as a comment.
    toml: str

    @property
    def tokens(self) -> int | None:
        """Tokens of all steps; None: their number is not known yet."""
        return None if self.steps is None else self.course.tokens_after(self.steps)

    @property
    def legs(self) -> dict[int, BatchSizes]:
        """The batches of the run by their first step."""
        found = {}
        for done, size in self.course.legs:
            at_once = self.batch.micro_batch_size * self.mesh.dp_degree
            found[done.steps + 1] = BatchSizes(
                self.batch.micro_batch_size,
                max(size.sequences // at_once, 1),
                size.sequences,
                size.seq_len,
                size.tokens,
            )
        return found

    def steady_at(self, step: int) -> RunConfig:
        """Return the run as if all its steps were like this one."""
        batches = [batch for first, batch in self.legs.items() if first <= step]
        course = Course.steady(self.course.size(step))
        return replace_fields(self, batch=batches[-1], course=course)

    @property
    def sequences_at_once(self) -> int:
        """Sequences that a rank's model takes at once: a micro-batch, or a pipeline's piece of
        one.
        """
        return self.batch.micro_batch_size // self.pipeline.microbatches

    @property
    def rank_len(self) -> int:
        """Tokens of each sequence that a rank has; ranks of context parallelism share it."""
        return self.batch.seq_len // self.mesh.context

    @property
    def tokens_at_once(self) -> int:
        """Tokens that a rank's model takes at once."""
        return self.sequences_at_once * self.rank_len

    @property
    def max_seq_len(self) -> int:
        """The longest sequence of training and validation, in tokens."""
        return max(self.sequence_lengths.values())

    @property
    def row_len(self) -> int:
        """Tokens of a row of the data order: those of the longest sequence of training."""
        return max([self.training.seq_len, *(leg.size.seq_len for leg in self.course.legs)])

    @property
    def sequence_lengths(self) -> dict[str, int]:
        """The lengths of sequences by key, in tokens; validation's if it is another than the
        first.
        """
        lengths = {"training.seq_len": self.training.seq_len}
        for number, phase in enumerate(self.data.phase):
            if phase.seq_len is not None:
                lengths[f"data.phase[{number}].seq_len"] = phase.seq_len
        held_out = self.validation.seq_len if self.validation.enable else None
        if held_out is not None and held_out != self.training.seq_len:
            lengths["validation.seq_len"] = held_out
        return lengths

    @property
    def spec(self) -> ModelSpec:
        """The model. Raises ShapeError for an unknown name."""
        return get_spec(self.model.name)

    def flops_per_token(self, args: Any, seq_len: int) -> int:
        """Return the model FLOPs of a training token, forward and backward.

        args: the model's. seq_len: tokens of a sequence.
        """
        lora = lora_of(self.lora)
        if lora is None:
            return self.spec.flops_per_token(args, seq_len)
        return lora.flops_per_token(self.spec, args, seq_len)

    def model_args(self, tokenizer_size: int | None = None) -> Any:
        """Return the model's arguments.

        Raises ShapeError when the tokenizer has more entries than the model.
        """
        return model_args(self.model, self.max_seq_len, tokenizer_size)


def derive(config: LoadedConfig, world_size: int) -> RunConfig:
    """Derive the run of a config on `world_size` ranks. It checks nothing.

    A run in epochs has no length yet: `steps` and `schedule.total_steps` are None, and the
    schedule's other numbers are provisional. `with_length` fills them in.
    """
    d = config.sections
    told = Told(list(config.notes), [])
    mesh = _mesh(d, world_size, told.notes)
    batch = _batch(d, mesh, told.notes)
    if mesh.weight_shards == 1 and d.training.prefetch:
        told.warnings.append(
            f"training.prefetch = {d.training.prefetch} has no effect: every rank holds whole "
            "weights"
        )
    filled = _filled(d)
    sizes = PipelineSizes()
    pipeline = pipeline_of(d.experimental, mesh.pipeline)
    if pipeline is not None:
        cut = pipeline.cut(filled, mesh, batch)
        filled = cut.sections
        sizes = PipelineSizes(cut.stages, cut.microbatches)
        told.notes += cut.notes
        told.warnings += cut.warnings
    course = _course(filled, batch, told.notes)
    steps = steps_of(filled, course, told.notes)
    schedule = schedule_of(filled, steps, course, told)
    notes, warnings = idle_keys(config)
    told.notes += notes
    told.warnings += warnings
    told.warnings += extensions.not_given(config)
    run = RunConfig(
        **{name: getattr(filled, name) for name in sections()},
        mesh=mesh,
        batch=batch,
        course=course,
        pipeline=sizes,
        steps=steps,
        schedule=schedule,
        notes=tuple(told.notes),
        warnings=tuple(told.warnings),
        toml=config.to_toml(),
    )
    more = [warning for feature in features_of(run).on for warning in feature.warnings(run)]
    return replace_fields(run, warnings=(*run.warnings, *more))


def below(folder: str, path: str) -> str:
    """Return a path of the run: below `folder`, unless it is absolute or a URL."""
    return path if is_url(path) else os.path.join(folder, path)


# Ranks and batches


def degrees_of(d: Config) -> dict[str, int]:
    """Return the dimensions of the mesh by key; one of data parallelism may be -1 for the ranks
    left over.
    """
    replicate = d.training.data_parallel_replicate_degree
    shard = d.training.data_parallel_shard_degree
    if d.training.data_parallel_type == "ddp":
        shard = 1
        if replicate == 1:
            replicate = -1
    return {
        "training.data_parallel_replicate_degree": replicate,
        "training.data_parallel_shard_degree": shard,
        "training.tensor_parallel_degree": d.training.tensor_parallel_degree,
        "experimental.pipeline_parallel_degree": d.experimental.pipeline_parallel_degree,
        "experimental.context_parallel_degree": d.experimental.context_parallel_degree,
    }


def parallelism(key: str) -> str:
    """Return the name of a dimension of the mesh, by the key of its degree."""
    return key.rpartition(".")[2].removesuffix("_degree")


def _mesh(d: Config, world_size: int, notes: list[str]) -> MeshSizes:
    # A seed checkpoint holds whole tensors, which any mesh can load.
    if d.checkpoint.create_seed_checkpoint:
        notes.append(
            "one process for any degrees of parallelism: it makes a seed checkpoint and ends"
        )
        return MeshSizes(world_size)
    degrees = degrees_of(d)
    for key, degree in degrees.items():
        if degree == -1:
            degrees[key] = _ranks_left(d, key, degrees, world_size, notes)
    replicate, shard, tensor, pipeline, context = degrees.values()
    return MeshSizes(
        world_size=world_size,
        dp_replicate=replicate,
        dp_shard=shard,
        context=context,
        tensor=tensor,
        pipeline=pipeline,
        expert=d.parallelism.expert_parallel_degree,
    )


def _ranks_left(
    d: Config, key: str, degrees: dict[str, int], world_size: int, notes: list[str]
) -> int:
    """Return the degree of the dimension that takes the ranks left over."""
    fixed = {parallelism(other): degree for other, degree in degrees.items() if degree > 1}
    left = max(world_size // math.prod(fixed.values()), 1)
    divisors = "".join(f" / {name} {degree}" for name, degree in fixed.items())
    why = ' (data_parallel_type = "ddp")' if d.training.data_parallel_type == "ddp" else ""
    ranks = f"the ranks left over, {counted(world_size, 'ranks')}{divisors}{why}"
    notes.append(f"{parallelism(key)} = {left}: {ranks}")
    return left


def _batch(d: Config, mesh: MeshSizes, notes: list[str]) -> BatchSizes:
    micro = d.training.batch_size
    wanted = d.training.global_batch_size
    ranks = mesh.dp_degree
    at_once = micro * ranks
    accumulation = 1 if wanted == -1 else max(wanted // at_once, 1)
    total = at_once * accumulation
    tokens = total * d.training.seq_len
    share = f"batch_size {micro} * {counted(ranks, 'data-parallel ranks')}"
    if wanted == -1:
        notes.append(f"global batch = {counted(total, 'sequences')}: {share}")
    else:
        notes.append(
            f"accumulation = {counted(accumulation, 'micro-batches')}: global_batch_size {wanted} "
            f"/ ({share})"
        )
    notes.append(
        f"tokens per step = {tokens:,}: {counted(total, 'sequences')} * seq_len "
        f"{d.training.seq_len}"
    )
    return BatchSizes(micro, accumulation, total, d.training.seq_len, tokens)


def _course(d: Config, batch: BatchSizes, notes: list[str]) -> Course:
    """Return the sizes of all steps."""
    total = batch.global_batch_size
    if not d.data.phase:
        return Course.steady(StepSize(total, batch.seq_len, total))
    from titanlite.data.phases import Phases

    course = Phases(d.data.phase, {}, total, batch.tokens_per_step).course()
    for done, size in course.legs[1:]:
        notes.append(
            f"from step {done.steps + 1}: {counted(size.sequences, 'sequences')} * seq_len "
            f"{size.seq_len} = {size.tokens:,} tokens per step (data.phase)"
        )
    return course


# Sections that depend on others


def _filled(d: Config) -> Config:
    """Return the sections with folders below that of the run, and with values of other sections."""
    validation = replace_fields(
        d.validation,
        batch_size=d.validation.batch_size or d.training.batch_size,
        seq_len=d.validation.seq_len or d.training.seq_len,
    )
    folder = d.job.dump_folder
    return replace_fields(
        d,
        job=_below(folder, d.job, "save_config_file"),
        checkpoint=_below(folder, d.checkpoint, "folder"),
        metrics=_below(folder, d.metrics, "save_tb_folder"),
        profiling=_below(folder, d.profiling, "save_traces_folder", "save_memory_snapshot_folder"),
        validation=validation,
    )


def _below(folder: str, section: S, *names: str) -> S:
    """Return a section with the paths of these names below a folder; empty ones stay."""
    paths = {name: getattr(section, name) for name in names}
    joined = {name: below(folder, path) for name, path in paths.items() if path}
    return replace_fields(section, **joined)
