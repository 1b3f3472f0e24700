"""Memory of a rank by formulas: a training step replayed on sizes, at the grain of FSDP groups.

No torch here. `StepEvents` lists when tensors begin and end, `replay` adds them up, and
`lifetimes.measure` does the same inside of a module.

FORMULAS.md derives each formula. `titanlite.cli.plan.memory_trace` runs the real code instead.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as replace_fields

from titanlite.models.llama import LlamaArgs
from titanlite.parallel.schedules import SCHEDULES
from titanlite.plan.events import replay
from titanlite.plan.parts import VOCABULARY, RankMemory
from titanlite.plan.rank_sizes import RankSizes
from titanlite.plan.step_events import StepEvents
from titanlite.run.config import RunConfig


class NoFormula(ValueError):
    """A model or setting without formulas; `titanlite.cli.plan.memory_trace` can plan it."""


def estimate(run: RunConfig, rank: int | None = None, device: str = "cuda") -> RankMemory:
    """Return a rank's memory over a step that is not the first, at most two micro-batches of it.

    Of phases the largest peak counts. rank: None for the worst. device: "cuda" or "cpu". Raises
    NoFormula for a model whose arguments are no `LlamaArgs`, and for norms other than RMSNorm.
    Also for `training.fsdp_units` by classes, and for zero-bubble schedules of a pipeline.
    """
    if len(run.course.legs) > 1:
        legs = [estimate(run.steady_at(first), rank, device) for first in run.legs]
        return max(legs, key=lambda memory: memory.peak.total)
    args = run.model_args()
    if not isinstance(args, LlamaArgs):
        raise NoFormula(f"there are no formulas for the memory of this model ({run.model.name})")
    units = run.training.fsdp_units
    if units not in ("block", "root"):
        raise NoFormula(f"there are no formulas for training.fsdp_units = {units!r}")
    schedule = run.experimental.pipeline_parallel_schedule
    if run.mesh.pipeline > 1 and SCHEDULES[schedule].splits_backward:
        raise NoFormula(f"there are no formulas for the memory of the schedule {schedule}")
    args = replace(args, vocab_size=args.vocab_size or VOCABULARY)
    # The first of each pipeline stage.
    ranks = range(0, run.mesh.world_size, run.mesh.world_size // run.mesh.pipeline)
    memories = [
        replay(rank, StepEvents(RankSizes(run, args, rank, device)).events())
        for rank in (ranks if rank is None else [rank])
    ]
    return max(memories, key=lambda memory: memory.peak.total)


def with_vocabulary(run: RunConfig, tokenizer_size: int | None = None) -> RunConfig:
    """Return the run with its vocabulary's size, so that no plan needs the tokenizer.

    tokenizer_size: None: read from the tokenizer if necessary. Raises DataError.
    """
    size = run.model_args(tokenizer_size).vocab_size
    if size is None:
        from titanlite.data.tokenizer import load_tokenizer

        size = load_tokenizer(run.model.tokenizer_path, run.model.name).vocab_size
    return replace_fields(run, model=replace_fields(run.model, vocab_size=size))
