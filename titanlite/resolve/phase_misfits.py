"""What of `[[data.phase]]`, and of a schedule in tokens, does not fit the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.config.rules import Finding, around
from titanlite.resolve.misfits import global_batch_misfits
from titanlite.run.config import RunConfig
from titanlite.utils import counted


def phase_misfits(run: RunConfig) -> Iterator[Finding]:
    """Check the batch and the length of each phase, and the unit of the schedule."""
    for number, phase in enumerate(run.data.phase):
        key = f"data.phase[{number}].global_batch_size"
        yield from global_batch_misfits(run, key, phase.global_batch_size or -1)
    yield from _length_misfits(run)
    yield from _unit_misfits(run)


def _length_misfits(run: RunConfig) -> Iterator[Finding]:
    """Check that each phase cuts the sequences of the longest one into pieces, and each rank has
    whole ones of them.
    """
    lengths = {**run.sequence_lengths}
    lengths.pop("validation.seq_len", None)
    longest = run.row_len
    if max(lengths.values()) == min(lengths.values()):
        return
    for key, length in lengths.items():
        if longest % length:
            message = f"is {length}, which does not divide {longest}, the longest of the run"
            hint = "sequences of each phase are whole, or equal pieces, of the longest"
            yield "divide", key, message, hint
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
        hint = f"these work: global_batch_size = {around(batch.global_batch_size, least)}"
        yield "batch", "data.phase", message, hint


def _unit_misfits(run: RunConfig) -> Iterator[Finding]:
    """Check that lengths of a schedule in tokens are not meant as steps."""
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
            hint = f"{length:,} steps are {key} = {length * per_step}"
            if key == "training.warmup_steps":
                hint += "; or give lr_scheduler.warmup_ratio"
            yield "batch", key, message, hint
