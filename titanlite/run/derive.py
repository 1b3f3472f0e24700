"""Derive a run from a config.

It adds what follows from two sections, the number of ranks or the length of the text.

It checks nothing: `titanlite.resolve.load.load_config` does both. No torch here.
"""

from __future__ import annotations

import math
import os
from typing import Any, TypeVar

from msgspec.structs import replace as replace_fields

from titanlite.config.idle_keys import idle_keys
from titanlite.config.loaded import LoadedConfig
from titanlite.config.notes import Note, Weight, by_weight
from titanlite.config.sections import Config
from titanlite.config.urls import is_url
from titanlite.data.step_sizes import Course, StepSize
from titanlite.run.config import BatchSizes, MeshSizes, PipelineSizes, RunConfig
from titanlite.run.features import features_of
from titanlite.run.length import steps_of
from titanlite.run.schedule_parts import schedule_of
from titanlite.utils import counted

S = TypeVar("S", bound=Any)


def derive(config: LoadedConfig, world_size: int) -> RunConfig:
    """Derive the run of a config on `world_size` ranks. It checks nothing.

    In epochs its steps are None and its schedule provisional until `with_length`.
    """
    d = config.sections
    notes = [*config.notes, *idle_keys(config)]
    mesh = _mesh(d, world_size, notes)
    batch = _batch(d, mesh)
    if mesh.weight_shards == 1 and d.training.prefetch:
        text = (
            f"training.prefetch = {d.training.prefetch} has no effect: every rank holds whole "
            "weights"
        )
        notes.append(Note(Weight.SPEED, text, warns=True))
    filled = _filled(d)
    sizes = PipelineSizes()
    pipeline = features_of(d).pipeline
    if pipeline is not None:
        filled, sizes, told = pipeline.cut(filled, mesh)
        notes += told
    course = _course(filled, batch, notes)
    steps = steps_of(filled, course)
    schedule = schedule_of(filled, steps, course, notes)
    if d.experimental.enable_async_tensor_parallel and d.training.batch_size == 1:
        # torch reshapes gathered tensors, and inductor finds no match.
        text = (
            "experimental.enable_async_tensor_parallel overlaps no all-gather at "
            "training.batch_size = 1: choose 2 or more"
        )
        notes.append(Note(Weight.SPEED, text, warns=True))
    return RunConfig(
        **{name: getattr(filled, name) for name in Config.__struct_fields__},
        mesh=mesh,
        batch=batch,
        course=course,
        pipeline=sizes,
        steps=steps,
        schedule=schedule,
        notes=by_weight(notes),
        toml=config.to_toml(),
    )


def below(folder: str, path: str) -> str:
    """Return a path below `folder`, unless it is absolute or a URL."""
    return path if is_url(path) else os.path.join(folder, path)


# Ranks and batches


def degrees_of(d: Config) -> dict[str, int]:
    """Return the mesh's dimensions by key; -1 in data parallelism takes the ranks left over."""
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
    """Return a mesh dimension's name by its degree's key."""
    return key.rpartition(".")[2].removesuffix("_degree")


def _mesh(d: Config, world_size: int, notes: list[Note]) -> MeshSizes:
    # A seed checkpoint holds whole tensors, which any mesh can load.
    if d.checkpoint.create_seed_checkpoint:
        text = "one process for any degrees of parallelism: it makes a seed checkpoint and ends"
        notes.append(Note(Weight.REST, text))
        return MeshSizes(world_size)
    degrees = degrees_of(d)
    fixed = math.prod(degree for degree in degrees.values() if degree > 1)
    for key, degree in degrees.items():
        if degree == -1:
            degrees[key] = max(world_size // fixed, 1)
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


def _batch(d: Config, mesh: MeshSizes) -> BatchSizes:
    micro = d.training.batch_size
    wanted = d.training.global_batch_size
    at_once = micro * mesh.dp_degree
    accumulation = 1 if wanted == -1 else max(wanted // at_once, 1)
    total = at_once * accumulation
    seq_len = d.training.seq_len
    return BatchSizes(micro, accumulation, total, seq_len, total * seq_len)


def _course(d: Config, batch: BatchSizes, notes: list[Note]) -> Course:
    total = batch.global_batch_size
    if not d.data.phase:
        return Course.steady(StepSize(total, batch.seq_len, total))
    from titanlite.data.phases import Phases

    course = Phases(d.data.phase, {}, total, batch.tokens_per_step).course()
    for done, size in course.legs[1:]:
        text = (
            f"from step {done.steps + 1}: {counted(size.sequences, 'sequences')} * seq_len "
            f"{size.seq_len} = {size.tokens:,} tokens per step (data.phase)"
        )
        notes.append(Note(Weight.REST, text))
    return course


# Sections that depend on others


def _filled(d: Config) -> Config:
    """Return the sections with folders and other sections' values filled in."""
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
    """Return a section with these paths below a folder; empty ones stay."""
    paths = {name: getattr(section, name) for name in names}
    joined = {name: below(folder, path) for name, path in paths.items() if path}
    return replace_fields(section, **joined)
