"""The time of products in float8, for `titanlite.plan.speed`.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titanlite.config.errors import unfit
from titanlite.config.sections import Float8
from titanlite.features.float8.choice import Float8Choice, choose_linears
from titanlite.plan.product_speed import ProductSpeed
from titanlite.plan.rates import Directions

if TYPE_CHECKING:
    from titanlite.plan.step_sizes import StepSizes

#: Bytes that a cast moves per number, with its maximum; eager, a mean of 33 forward and 35
#: backward.
CAST_EAGER = 34
CAST_COMPILED = 5


def float8_speed(section: Float8, step: StepSizes) -> ProductSpeed:
    """Return the speed of a step whose chosen linears compute in float8.

    Raises ConfigError for a GPU that has no float8.
    """
    gpu = step.rates.gpu
    if gpu.float8 is None:
        hint = "set it to false, or name another GPU"
        raise unfit("float8.enable_float8_linear", f"{gpu.key} has no float8", hint)
    choices = choose_linears(step.model_linears, section)
    converted = [choice for choice in choices if choice.converted]
    gathers_less = 0.0
    if section.enable_fsdp_float8_all_gather:
        gathers_less = step.stage_share * sum(choice.weights for choice in converted)
    peak = step.rates.constants.float8 * gpu.float8
    # The backward casts gradients of outputs, and reorders inputs; eager code casts all again for
    # each of its two products.
    forward = 0.0
    backward = 0.0
    for linear in converted:
        inputs = len(linear.names) * step.tokens * _cast_inputs(step, linear, choices)
        outputs = len(linear.names) * step.tokens * linear.size.out_features
        weights = 0 if section.enable_fsdp_float8_all_gather else linear.weights
        forward += inputs + weights
        if step.compiled:
            backward += outputs + inputs / 2
        else:
            backward += 2 * outputs + inputs + weights
    size = CAST_COMPILED if step.compiled else CAST_EAGER
    casts = Directions(step.rates.moved(size * forward), step.rates.moved(size * backward))
    return ProductSpeed(
        choices,
        {choice.names[0]: peak for choice in converted},
        assumptions=("the MFU is of the peak in bf16, though products run in float8",),
        saves_inputs_late=True,
        casts=casts,
        gathers_less=gathers_less,
        # Two gathers of the forward send half the bytes.
        tensor_gathers_less=section.recipe_name == "tensorwise",
    )


def _cast_inputs(step: StepSizes, linear: Float8Choice, choices: Sequence[Float8Choice]) -> float:
    """Return how many of a token's numbers are cast for the input of a linear.

    Compiled linears share the cast of an input; tensor-parallel ranks cast before the gather.
    """
    name = linear.names[0]
    how = step.tensor_plan.get(name)
    if how in ("gathered", "sequence", "heads"):
        return linear.size.in_features / step.mesh.tensor
    if how != "colwise":
        return linear.size.in_features
    module = name.rpartition(".")[0]
    firsts = [choice.names[0] for choice in choices]
    takers = [one for one in firsts if step.tensor_plan.get(one) == "colwise"]
    sharing = sum(one.rpartition(".")[0] == module for one in takers) if step.compiled else 1
    return linear.size.in_features / step.mesh.tensor / sharing
