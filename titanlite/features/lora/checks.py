"""What adapters need of other keys, and of the model on its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import Rule, is_set
from titanlite.config.toml import quote
from titanlite.dist import ParallelismError
from titanlite.features.lora.settings import (
    ALL,
    COLUMNS_OR_ROWS,
    TOKENS,
    Adapters,
    adapters_of,
    candidates,
    is_target,
    names_at_hf,
)
from titanlite.models.linears import kind_of
from titanlite.models.spec import names_like

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

RANK = "lora.rank"
TARGETS = "lora.targets"
_TP = "training.tensor_parallel_degree"
_PP = "experimental.pipeline_parallel_degree"

NEEDS = [
    Rule(
        RANK,
        bool,
        "checkpoint.initial_load_path",
        is_set,
        "name the weights that the adapters belong to: a checkpoint, or a folder of Hugging "
        "Face's or Meta's",
    ),
]
EXCLUDES = [
    Rule(
        RANK,
        bool,
        "checkpoint.initial_load_model_only",
        False,
        "the frozen weights are all that is taken from there",
    ),
    Rule(
        RANK,
        bool,
        "checkpoint.last_save_in_hf",
        True,
        "`titanlite export` merges adapters into such a folder",
    ),
    Rule(
        RANK,
        bool,
        "checkpoint.create_seed_checkpoint",
        True,
        "new adapters are the same on any ranks",
    ),
    Rule(
        RANK,
        bool,
        "optimizer.early_step_in_backward",
        True,
        "gradients of adapters take little memory",
    ),
]


def problems(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Find targets that the model does not have, and adapters that its ranks cannot share."""
    known = replace(args, vocab_size=args.vocab_size or 1)
    yield from _unknown_targets(run, known)
    adapters = adapters_of(run.lora, run.spec, known)
    if not adapters.sizes:
        return
    yield from _too_wide(adapters)
    if run.mesh.tensor > 1:
        yield from _not_divided(run, known, adapters)
    if run.mesh.pipeline > 1:
        yield from _without_gradient(run, known, adapters)


def _unknown_targets(run: RunConfig, args: Any) -> Iterator[Problem]:
    sizes = candidates(run.spec, args)
    theirs = names_at_hf(run.spec, args)
    words: dict[str, None] = {}
    for name in sizes:
        words[kind_of(name).rpartition(".")[2]] = None
    for name in sizes:
        if theirs.get(name, name) != name:
            words[theirs[name].rpartition(".")[2]] = None
    for entry in run.lora.targets:
        if any(is_target(entry, name, theirs.get(name, "")) for name in sizes):
            continue
        message = f"{quote(entry)} is the end of no linear's name"
        if is_target(entry, run.spec.head, theirs.get(run.spec.head, "")):
            message = f"{quote(entry)} is the head, which gets no adapter"
        yield Problem("unknown-value", TARGETS, message, names_like(entry, [*words, ALL]))


def _too_wide(adapters: Adapters) -> Iterator[Problem]:
    """Find adapters that are no smaller than the weights beside them."""
    for name, size in adapters.sizes.items():
        narrow = min(size.in_features, size.out_features)
        if adapters.rank >= narrow:
            message = f"is {adapters.rank}, and {kind_of(name)} has rank {narrow} itself"
            yield Problem(
                "out-of-range", RANK, message, "take a smaller rank, or train all weights"
            )
            return


def _not_divided(run: RunConfig, args: Any, adapters: Adapters) -> Iterator[Problem]:
    plan = run.spec.tensor_plan(args) if run.spec.tensor_plan else {}
    known = (*COLUMNS_OR_ROWS, *TOKENS)
    others = [name for name in adapters.sizes if plan.get(name) not in known]
    if others:
        kinds = ", ".join(dict.fromkeys(map(kind_of, others)))
        message = f"has {kinds}, whose adapters {_TP} cannot divide"
        yield Problem("divide", TARGETS, message, f"leave them out, or set {_TP} = 1")
    by_tokens = [name for name in adapters.sizes if plan.get(name) in TOKENS]
    if by_tokens and run.lora.dropout:
        kinds = ", ".join(dict.fromkeys(map(kind_of, by_tokens)))
        message = f"is {run.lora.dropout:g}, and the ranks of {_TP} would drop alike in {kinds}"
        hint = f"set it to 0, leave them out of {TARGETS}, or set {_TP} = 1"
        yield Problem("conflict", "lora.dropout", message, hint)
    if run.float8.enable_float8_linear and not run.float8.is_mx:
        message = f"excludes float8.enable_float8_linear with {_TP} = {run.mesh.tensor}"
        hint = (
            "there linears get their inputs in float8 alone, and adapters compute in high "
            "precision; shard over data-parallel ranks instead"
        )
        yield Problem("conflict", RANK, message, hint)


def _without_gradient(run: RunConfig, args: Any, adapters: Adapters) -> Iterator[Problem]:
    """Find a first stage that trains nothing: its output would have no gradient."""
    pipeline = run.features.pipeline
    if pipeline is None:
        return
    try:
        layout = pipeline.layout(run.spec, args, 1)
    except ParallelismError:  # the pipeline reports it
        return
    if not run.spec.pipeline_costs:
        return
    for number, stage in enumerate(layout.stages):
        begins = tuple(f"{name}." for name in stage)
        if not any(name.startswith(begins) for name in adapters.sizes):
            message = f"leaves nothing to train in stage {number} of the pipeline ({stage[0]} …)"
            yield Problem(
                "divide", TARGETS, message, f"name linears of every stage, or set {_PP} = 1"
            )
            return
