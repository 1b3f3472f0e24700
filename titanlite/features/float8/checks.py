"""Needs of float8: other keys, the model on its ranks, and the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import Rule, contains, several
from titanlite.config.sections import AUTO_FILTER, Float8
from titanlite.config.toml import quote
from titanlite.features.float8.choice import Float8Choice, name_filters
from titanlite.models.linears import Linears, linears_of
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

ENABLE = "float8.enable_float8_linear"
FILTERS = "float8.filter_fqns"
GATHER = "float8.enable_fsdp_float8_all_gather"
PRECOMPUTE = "float8.precompute_float8_dynamic_scale_for_fsdp"
RECIPE = "float8.recipe_name"


# Other keys


def _not_tensorwise(recipe: str) -> bool:
    return recipe != "tensorwise"


NEEDS = [
    Rule(PRECOMPUTE, True, GATHER, True, "other weights get their scales after the gathering"),
]
EXCLUDES = [
    Rule(
        RECIPE,
        _not_tensorwise,
        "training.tensor_parallel_degree",
        several,
        'torchao divides products of "tensorwise" only',
    ),
    Rule(GATHER, True, RECIPE, _not_tensorwise, "it needs one scale for each weight: tensorwise"),
    Rule(
        GATHER,
        True,
        "training.reshard_after_forward",
        lambda value: isinstance(value, int),
        "torch gathers float8 weights from all ranks only",
    ),
    Rule(
        PRECOMPUTE,
        True,
        "training.enable_cpu_offload",
        True,
        "weights in host memory lose their scales",
    ),
    Rule(
        FILTERS,
        contains(AUTO_FILTER),
        RECIPE,
        "rowwise_with_gw_hp",
        "torchao has no sizes: set float8.min_features",
    ),
]


# The model on its ranks


#: Decides for all linears of a model.
Choose = Callable[[Linears], list[Float8Choice]]


def problems(run: RunConfig, args: Any, choose: Choose, multiple: int) -> Iterator[Problem]:
    """Check that float8 takes some products of the model, each of whose dimensions `multiple` must
    divide.
    """
    # A head of any size stays.
    known = replace(args, vocab_size=args.vocab_size or 1)
    linears = linears_of(run.spec, known, run.mesh.tensor)
    choices = choose(linears)
    unknown = list(_unknown_filters(run.float8, linears))
    yield from unknown
    if not unknown and not any(choice.converted for choice in choices):
        shown = "; ".join(f"{choice.kind} ({choice.reason})" for choice in choices)
        numbers = run.float8.recipe_name if run.float8.is_mx else "float8"
        message = f"leaves no product in {numbers}: {shown}"
        yield Problem("model", ENABLE, message, "convert some linears, or set it to false")
    tokens = run.tokens_at_once
    if tokens % multiple:
        rows = counted(run.sequences_at_once, "sequences")
        by = f"{rows} x {run.rank_len} tokens on each rank = {tokens}"
        message = f"needs a multiple of {multiple} tokens in a product, and there are {by}"
        fitting = multiple // math.gcd(multiple, run.rank_len) * run.pipeline.microbatches
        batch = f"training.batch_size = {fitting} or a multiple of it"
        hint = f"these work: {batch}, or another training.seq_len"
        yield Problem("divide", ENABLE, message, hint)
    shards = run.mesh.weight_shards
    odd = [one for one in choices if one.converted and one.size.out_features % shards]
    if odd and run.float8.enable_fsdp_float8_all_gather:
        which = ", ".join(f"{one.kind} has {one.size.out_features}" for one in odd)
        message = (
            f"needs weights whose rows divide over the {shards} ranks that share them; {which}"
        )
        kept = f"keep them with {FILTERS} = {quote([one.kind for one in odd])}"
        yield Problem("divide", GATHER, message, f"{kept}, or set it to false")


def _unknown_filters(settings: Float8, linears: Linears) -> Iterator[Problem]:
    components = [part for name in linears.sizes for part in name.split(".") if not part.isdigit()]
    hint = (
        f"parts of names are {', '.join(dict.fromkeys(components))}; the head is "
        f"{linears.head}, and it always stays in high precision"
    )
    for part in name_filters(settings):
        if not part or not any(part in name for name in linears.sizes):
            message = f"{quote(part)} is part of no linear's name"
            yield Problem("unknown-value", FILTERS, message, hint)


# The machine


def machine_problems(settings: Float8) -> Iterator[Problem]:
    """Find what this machine lacks for float8 products that are not emulated."""
    if settings.emulate:
        return
    from titanlite.features.float8.package import lack_of_machine

    if lack := lack_of_machine():
        hint = (
            "set it to false; float8.emulate = true computes with the same rounded numbers in "
            "float32, which is slow and for tests"
        )
        yield Problem("does-not-fit", ENABLE, lack, hint)
