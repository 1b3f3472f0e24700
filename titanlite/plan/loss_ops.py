"""The operators of last norm, head and loss, with what they keep: inputs of
`titanlite.plan.lifetimes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from titanlite.plan.blocks import Shape
from titanlite.plan.lifetimes import Op, OpList
from titanlite.run.config import RunConfig


def loss_ops(s: Shape, loss: Loss, x: str) -> list[Op]:
    """Return the operators of head and loss. x: the hidden states."""
    logits = s.linear("logits", x, s.vocabulary, s.args.dim)
    if loss.divided == "in place":
        return [logits, loss_in_place(s, loss)]
    return [logits, *loss_of_torch(s, loss)]


@dataclass(frozen=True)
class Loss:
    """How a run computes its loss."""

    operators: Callable[[Shape, Loss, str], list[Op]] = loss_ops
    #: Pieces of the tokens.
    chunks: int = 1
    #: How it takes the logits of tensor-parallel ranks. Each has all of them, or its part of the
    #: vocabulary. The loss of a part works in place, or is a graph of torch's operators.
    divided: Literal["whole", "in place", "compiled"] = "in place"
    #: It has a z-loss or label smoothing.
    penalized: bool = False
    #: The logits live until the backward, as the result of a pipeline stage.
    holds_logits: bool = False


def loss_of(run: RunConfig) -> Loss:
    """Return how a run computes its loss in one piece."""
    training = run.training
    divided: Literal["whole", "in place", "compiled"] = "in place"
    if not training.enable_loss_parallel or training.loss != "cross_entropy":
        # A function of the user takes whole logits.
        divided = "whole"
    elif training.compile and "loss" in run.compile.components:
        divided = "compiled"
    return Loss(
        divided=divided,
        penalized=bool(training.z_loss or training.label_smoothing),
        holds_logits=run.mesh.pipeline > 1,
    )


def head_ops(s: Shape, loss: Loss) -> OpList:
    """Return the operators of last norm, head and loss, from "x" on."""
    x = "n"
    ops = [s.norm("n", "x", s.rows, s.args.dim)]
    if s.tp > 1:
        x = "n whole"
        ops.append(s.gather(x, "n"))
    else:
        loss = replace(loss, divided="whole")
    return OpList([*ops, *loss.operators(s, loss, x)], {"x": s.hidden})


def loss_in_place(s: Shape, loss: Loss) -> Op:
    """Return `divided_cross_entropy`: a float32 tensor becomes the gradient of logits."""
    values = 4 * s.tokens * s.args.n_vocab // s.tp
    return Op(
        "loss",
        4,
        reads=("logits",),
        saves=("logits",) if loss.holds_logits else (),
        keeps=values,
        backward=-values if s.size == 4 else 0,
        holds=("logits",),
    )


def loss_of_torch(s: Shape, loss: Loss) -> list[Op]:
    """Return the operators of `torch.nn.functional.cross_entropy` in float32."""
    whole = loss.divided == "whole"
    logits = s.tokens * (s.args.n_vocab if whole else s.vocabulary)
    ops: list[Op] = []
    given = "logits"
    if whole and s.tp > 1:
        # Received by rank, then put in order.
        given = "whole"
        ops.append(Op("whole", logits * s.size, ("logits",), forward=logits * s.size))
    last = given
    if s.size == 2:
        last = "float"
        ops.append(Op("float", 4 * logits, (given,)))
    # With divided logits `_ShardedLoss` keeps its input too, and one tensor is the gradient of
    # both.
    saves = ("p", given) if not whole or loss.holds_logits else ("p",)
    ops.append(Op("p", 4 * logits, (last,), saves, passes=not whole))
    if not loss.penalized or not whole:
        ops.append(Op("loss", 4, ("p",), holds=(given, last)))
        return ops
    # A sum beside cross-entropy: of the exponentials of the logits less the largest.
    ops.append(Op("entropy", 4, ("p",)))
    ops.append(Op("shifted", 4 * logits, (last,), passes=True))
    ops.append(Op("sum", 4, ("shifted",), keeps=4 * logits))
    holds = (last, given) if s.tp > 1 else (last,)
    ops.append(Op("loss", 4, ("entropy", "sum"), holds=holds))
    return ops
