"""Needs of products in MXFP8: other keys, and the model on its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.config.errors import Problem
from titanlite.config.rules import Rule, contains
from titanlite.config.sections import AUTO_FILTER
from titanlite.features.float8.checks import FILTERS, GATHER, PRECOMPUTE, RECIPE
from titanlite.features.float8.choice import Float8Choice
from titanlite.models.linears import Linears

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

DTYPE = "training.mixed_precision_param"
#: Numbers that share a scale, along the dimension that a product sums over (OCP Microscaling
#: Formats 1.0, section 5.2).
BLOCK = 32
#: Ways of tensor parallelism that divide a weight.
DIVIDED = ("colwise", "gathered", "rowwise")
#: Ratio of a block's scale to its largest number over the largest of E4M3, by recipe.
ROUNDED = {"mxfp8": "up", "mxfp8_floor": "down"}

# Other keys

EXCLUDES = [
    Rule(RECIPE, bool, GATHER, True, "FSDP gathers MX weights in mixed_precision_param"),
    Rule(RECIPE, bool, PRECOMPUTE, True, "each block of 32 numbers gets its scale in the product"),
    Rule(
        FILTERS,
        contains(AUTO_FILTER),
        RECIPE,
        bool,
        "torchao has no sizes: set float8.min_features",
    ),
]


# The model on its ranks


def divided(choice: Float8Choice, linears: Linears) -> Float8Choice:
    """Return the decision for a kind of linear under tensor parallelism.

    Each rank rounds its part of a weight. A whole weight has tokens of several ranks, and blocks of
    them.
    """
    if choice.reason or linears.tensor == 1 or linears.plan.get(choice.names[0]) in DIVIDED:
        return choice
    return replace(choice, reason="tensor parallelism does not divide it")


def high_precision(run: RunConfig) -> Iterator[Problem]:
    """Find products that no GPU can return: those of its MX units are bfloat16."""
    dtype = run.training.mixed_precision_param
    if run.float8.emulate or dtype == "bfloat16":
        return
    message = f'is "{run.float8.recipe_name}", which excludes {DTYPE} = "{dtype}"'
    yield Problem("conflict", RECIPE, message, "products of MX units are bfloat16")
