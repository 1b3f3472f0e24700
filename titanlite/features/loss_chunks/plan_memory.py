"""The memory of head and loss in chunks, for `titanlite.plan.memory`.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.plan.lifetimes import Op

if TYPE_CHECKING:
    from titanlite.plan.blocks import Shape
    from titanlite.plan.loss_ops import Loss


def chunked_loss(s: Shape, loss: Loss, x: str) -> list[Op]:
    """Return head and loss as one operator. x: name of the hidden states."""
    table = s.vocabulary * s.args.dim
    low = s.size == 2
    logits = _chunk_of_logits(s, loss)
    if not s.products.trains:
        gradient = _rows_of_chunk(s, loss) * s.vocabulary * s.size
        forward = max(logits, gradient)
        return [Op("loss", 4, reads=(x,), keeps=s.whole, forward=forward, holds=("x", "n"))]
    # A chunk's gradient, and its product with x, which float32 adds to the sum at once.
    product = _rows_of_chunk(s, loss) * s.vocabulary * s.size
    if low:
        product += table * s.size
    # In the end the sum becomes the gradient: by a copy in the dtype of the weight.
    sums = 4 * table
    copied = 4 * table if low else 0
    return [
        Op(
            "loss",
            4,
            reads=(x,),
            keeps=s.whole + table * s.size,
            forward=max(sums + max(logits, product) - table * s.size, copied),
            weight=table * s.size,
            holds=("x", "n"),
        )
    ]


def _rows_of_chunk(s: Shape, loss: Loss) -> int:
    return -(-s.tokens // loss.chunks)


def _chunk_of_logits(s: Shape, loss: Loss) -> int:
    """Return the bytes of a chunk's logits and of all that its loss makes of them."""
    rows = _rows_of_chunk(s, loss)
    part = rows * s.vocabulary
    low = s.size == 2
    if loss.divided == "in place":
        # The tensor in float32, and the gradient; in float32 it takes the place of that tensor.
        return part * (s.size + (4 + s.size if low else 4))
    if loss.divided == "compiled":
        # Probabilities, and one tensor that is the gradient of both; in the end that of the logits.
        return part * (s.size + 8 + (s.size if low else 0))
    # Probabilities, and gradients of them and of the copy in float32.
    per_logit = 12
    if loss.penalized:
        # Its peak is in the forward, where one more takes the gradients' place beside the whole
        # logits.
        per_logit += 4 + (s.size if low and s.tp > 1 else 0)
    in_float = rows * s.args.n_vocab * per_logit
    return in_float + part * s.size
