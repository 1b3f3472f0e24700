"""Seconds of a step's computing, for `titanlite.plan.speed`. No torch here."""

from __future__ import annotations

import math
from typing import NamedTuple

from titanlite.plan.optimizer import update_bytes
from titanlite.plan.parts import BYTES
from titanlite.plan.step_sizes import StepSizes

#: Seconds for which the host prepares the kernels of a block, forward and backward.
LAUNCHES_EAGER = 1.5e-3
LAUNCHES_COMPILED = 0.5e-3
#: Bytes that a loss moves per logit, forward and backward.
_LOSS_EAGER = 30
_LOSS_COMPILED = 14
#: Steps of Muon's iteration: products of m x n and n x m, m x m and m x m, m x m and m x n.
_ITERATIONS = 5
#: Bytes per second of a host's memory, for each GPU's share of it.
_HOST_MEMORY = 25e9
#: Backward over forward of attention, which computes its scores again.
_ATTENTION_BACKWARD = 2.5


class Pass(NamedTuple):
    """Seconds of one micro-batch in one direction, by kind of work."""

    products: float = 0.0
    attention: float = 0.0
    #: Norms, RoPE, SwiGLU, residuals, loss.
    memory: float = 0.0
    casts: float = 0.0

    def times(self, factor: float) -> Pass:
        return Pass(*(factor * seconds for seconds in self))

    def plus(self, other: Pass) -> Pass:
        return Pass(*(one + two for one, two in zip(self, other, strict=True)))


class Computing(NamedTuple):
    """Seconds of one micro-batch through the model; again: of recomputation."""

    forward: Pass
    backward: Pass
    again: Pass


def computing(step: StepSizes) -> Computing:
    """Return the seconds of products, attention and other kernels."""
    blocks = block_forward(step)
    head = head_forward(step)
    return Computing(
        blocks.plus(head),
        block_backward(step, blocks).plus(head.times(2)),
        recomputation(step, blocks),
    )


def block_forward(step: StepSizes) -> Pass:
    """Return the seconds of all blocks."""
    constants = step.rates.constants
    passes = constants.passes_compiled if step.compiled else constants.passes_eager
    memory = step.rates.moved(passes * step.itemsize * step.tokens * step.outputs)
    products = step.others.seconds
    for linear in step.linears:
        size = linear.size
        peak = step.products.peaks.get(linear.names[0])
        tokens = step.tokens * step.part(linear)
        one = step.rates.product(tokens, size.in_features, size.out_features, peak)
        products += len(linear.names) * one
    flops = step.attention_flops / 3 * step.pairs * step.tokens / step.mesh.tensor
    attention = flops / (step.rates.peak * step.rates.gpu.attention) * step.attention_slower
    return Pass(products, attention, memory, step.products.casts.forward)


def block_backward(step: StepSizes, forward: Pass) -> Pass:
    """Return the seconds of all blocks."""
    return Pass(
        forward.products * 2,
        forward.attention * _ATTENTION_BACKWARD,
        forward.memory * 2,
        step.products.casts.backward,
    )


def head_forward(step: StepSizes) -> Pass:
    """Return the seconds of head and loss."""
    compiled = step.run.training.compile and "loss" in step.run.compile.components
    per_logit = _LOSS_COMPILED if compiled else _LOSS_EAGER
    size = per_logit * step.tokens * step.vocabulary
    product = step.rates.product(step.tokens, step.width or 1, step.vocabulary)
    return Pass(product, memory=step.rates.moved(size) / 3)


def recomputation(step: StepSizes, forward: Pass) -> Pass:
    """Return the seconds of recomputation. forward: of all blocks.

    By operator: `StepSizes.repeated` of the products, and all but attention.
    """
    ac = step.run.activation_checkpoint
    if ac.mode == "budget":
        return Pass(forward.products / 2, memory=forward.memory).times(1 - ac.memory_budget)
    if not step.by_op:
        kept = forward.products * (1 - step.left_out)
        return forward._replace(products=kept).times(step.recomputed)
    repeated = step.repeated
    return forward._replace(
        products=forward.products * repeated, attention=0.0, casts=forward.casts * repeated
    )


def launches(step: StepSizes) -> float:
    """Return the seconds in which the host launches a step's kernels."""
    block = LAUNCHES_COMPILED if step.compiled else LAUNCHES_EAGER
    return step.micro_batches * step.stage_share * step.blocks * block


def update(step: StepSizes) -> float:
    """Return the seconds of the optimizer."""
    run = step.run
    size = step.owned * update_bytes(run.optimizer, BYTES[run.training.dtype])
    on_host = run.training.enable_cpu_offload
    moved = size / _HOST_MEMORY if on_host else step.rates.moved(size) / step.rates.gpu.update
    return moved + _orthogonal(step)


def _orthogonal(step: StepSizes) -> float:
    """Return the seconds of Muon, each matrix on one of its ranks."""
    if step.run.optimizer.name != "Muon":
        return 0.0
    ranks = step.mesh.dp_replicate * step.mesh.weight_shards * step.mesh.tensor
    flops = 0.0
    for size, count in step.matrices.items():
        m, n = sorted((size.in_features, size.out_features))
        on_rank = math.ceil(count * step.stage_share / ranks)
        flops += on_rank * _ITERATIONS * (4 * m * m * n + 2 * m**3)
    return flops / (step.rates.gpu.bf16 * step.rates.gpu.sustained)
