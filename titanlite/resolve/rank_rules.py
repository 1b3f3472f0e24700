"""Rules of a config on its ranks: what does not fit their number, in batches and phases too.

Each feature has its own (`titanlite.run.features.Feature.model_problems`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from titanlite.config.errors import Problem
from titanlite.config.rules import around, divisors
from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.parallel.schedules import SCHEDULES, find_schedule
from titanlite.run.config import RunConfig
from titanlite.run.derive import degrees_of, parallelism
from titanlite.utils import counted

_SHARD = "training.data_parallel_shard_degree"
_RESHARD = "training.reshard_after_forward"


def mesh_problems(d: Config, run: RunConfig) -> Iterator[Problem]:
    """Check that the degrees of parallelism make the number of ranks.

    d: the sections as written; the run's have -1 filled in.
    """
    ranks = run.mesh.world_size
    if d.checkpoint.create_seed_checkpoint:
        if ranks > 1:
            key = "checkpoint.create_seed_checkpoint"
            remedy = (
                "start it with `python train.py …` and the same config; its degrees of parallelism "
                "may stay"
            )
            yield Problem("ranks", key, f"is made by one process, and there are {ranks}", remedy)
        return
    degrees = degrees_of(d)
    fixed = {key: degree for key, degree in degrees.items() if degree != -1}
    product = math.prod(fixed.values())
    has_rest = len(fixed) < len(degrees)
    if product == ranks or (has_rest and ranks % product == 0):
        return
    factors = [f"{parallelism(key)} {degree}" for key, degree in fixed.items() if degree != 1]
    equation = " * ".join(factors) or "all degrees 1"
    rest = "replicate_degree = 1" if d.training.data_parallel_type == "ddp" else "shard_degree = -1"
    relation = "which is not"
    others = f"set training.data_parallel_{rest} for the ranks left over"
    if has_rest:
        relation = "which does not divide"
        others = "on a multiple of it"
    shown = f"{equation} = {product}, {relation} the world size {ranks}"
    remedy = f"run on {counted(product, 'ranks')}, or {others}"
    divided = [key for key, degree in degrees.items() if degree > 1]
    key = divided[-1] if divided else _SHARD
    yield Problem("ranks", key, f"the degrees do not fit the ranks: {shown}", remedy)


def _reshard(d: Config, run: RunConfig) -> Iterator[Problem]:
    reshard = run.training.reshard_after_forward
    shards = run.mesh.weight_shards
    if not isinstance(reshard, int) or shards % reshard == 0:
        return
    message = (
        f"is {reshard}, which does not divide the {shards} ranks that share one copy of the "
        f"weights ({run.mesh.weight_shards_in_words})"
    )
    numbers = "".join(f"{number}, " for number in divisors(shards)[1:])
    remedy = f'these work: {numbers}"default", "always" or "never"'
    yield Problem("ranks", _RESHARD, message, remedy)


def _batches(d: Config, run: RunConfig) -> Iterator[Problem]:
    """Check that ranks share each global batch in whole micro-batches, and the updates in the
    backward have one.
    """
    batch = max(run.legs.values(), key=lambda batch: batch.accumulation)
    if run.optimizer.early_step_in_backward and batch.accumulation > 1:
        message = f"excludes accumulation, and a step has {batch.accumulation} micro-batches"
        largest = batch.global_batch_size // batch.accumulation
        remedy = (
            "take more ranks, a larger training.batch_size, or training.global_batch_size = "
            f"{largest}"
        )
        yield Problem("batch", "optimizer.early_step_in_backward", message, remedy)
    size = run.training.batch_size
    at_once = size * run.mesh.dp_degree
    batches = {"training.global_batch_size": run.training.global_batch_size}
    for number, phase in enumerate(run.data.phase):
        batches[f"data.phase[{number}].global_batch_size"] = phase.global_batch_size or -1
    for key, wanted in batches.items():
        if wanted == -1 or wanted % at_once == 0:
            continue
        width = counted(run.mesh.dp_degree, "data-parallel ranks")
        message = f"is {wanted}, not a multiple of batch_size {size} * {width} = {at_once}"
        remedy = f"these work: global_batch_size = {around(wanted, at_once)}"
        if wanted % size == 0:
            numbers = ", ".join(map(str, divisors(wanted // size)))
            remedy += f"; or one of {numbers} data-parallel ranks"
        yield Problem("batch", key, message, remedy)


def _phase_lengths(d: Config, run: RunConfig) -> Iterator[Problem]:
    """Check that phases divide the longest one's sequences, and ranks have whole ones."""
    lengths = {**run.sequence_lengths}
    lengths.pop("validation.seq_len", None)
    longest = run.row_len
    if max(lengths.values()) == min(lengths.values()):
        return
    for key, length in lengths.items():
        if longest % length:
            message = f"is {length}, which does not divide {longest}, the longest of the run"
            remedy = "sequences of each phase are whole, or equal pieces, of the longest"
            yield Problem("divide", key, message, remedy)
            return
    ranks = run.mesh.dp_degree
    for first, batch in run.legs.items():
        if batch.tokens_per_step % (longest * ranks) == 0:
            continue
        width = counted(ranks, "data-parallel ranks")
        message = (
            f"steps from {first} on have {batch.global_batch_size} sequences of {batch.seq_len} "
            f"tokens, not a multiple of the longest of {longest} * {width}"
        )
        least = longest // batch.seq_len * ranks
        remedy = f"these work: global_batch_size = {around(batch.global_batch_size, least)}"
        yield Problem("batch", "data.phase", message, remedy)


def _schedules(d: Config, run: RunConfig) -> Iterator[Problem]:
    """Check that tokens of the learning rate's schedule are not meant as steps, and the name of a
    pipeline's, also without a pipeline.
    """
    name = d.experimental.pipeline_parallel_schedule
    if find_schedule(name) is None:
        key = "experimental.pipeline_parallel_schedule"
        remedy = f"there are {', '.join(SCHEDULES)}"
        yield Problem("unknown-value", key, f"no schedule {quote(name)}", remedy)
    if run.lr_scheduler.unit == "steps":
        return
    lengths = {
        "lr_scheduler.decay_steps": run.lr_scheduler.decay_steps,
        "lr_scheduler.total_steps": run.lr_scheduler.total_steps,
    }
    if run.lr_scheduler.warmup_ratio is None:
        lengths["training.warmup_steps"] = run.training.warmup_steps
    per_step = run.batch.tokens_per_step
    for key, length in lengths.items():
        if length and length < per_step:
            message = (
                f"is {length:,} tokens, as lr_scheduler.unit says, and the first step has "
                f"{per_step:,}"
            )
            remedy = f"{length:,} steps are {key} = {length * per_step}"
            if key == "training.warmup_steps":
                remedy += "; or give lr_scheduler.warmup_ratio"
            yield Problem("batch", key, message, remedy)


RankRule = Callable[[Config, RunConfig], Iterable[Problem]]
#: Rules of a config whose degrees make its ranks, with its sections as they are written.
RULES: tuple[RankRule, ...] = (_reshard, _batches, _phase_lengths, _schedules)
