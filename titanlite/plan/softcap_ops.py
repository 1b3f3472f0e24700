"""The memory of a soft cap of the logits, for `titanlite.plan.loss_ops`. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from titanlite.plan.lifetimes import Op

#: What the cap makes of the logits.
_CAPPED = "capped"


def with_cap(ops: Sequence[Op], size: int, holds: bool) -> list[Op]:
    """Return the operators of head and loss with a cap between: the loss takes what it returns.

    size: bytes of a number of the logits. holds: what it returns lives until the backward has
    passed it.
    """
    names = [op.name for op in ops]
    # Tensor-parallel ranks may gather logits before.
    logits = "whole" if "whole" in names else "logits"
    after = names.index(logits) + 1
    found = [*ops[:after], _cap(ops[after - 1], size, holds)]

    def of_capped(taken: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_CAPPED if name == logits else name for name in taken)

    for op in ops[after:]:
        reads, saves, held = map(of_capped, (op.reads, op.saves, op.holds))
        found.append(replace(op, reads=reads, saves=saves, holds=held))
    return found


def _cap(logits: Op, size: int, holds: bool) -> Op:
    """Return `titanlite.models.softcap.soft_cap`: it keeps the logits, and computes in float32."""
    tanh = 2 * logits.size if size == 2 else 0
    return Op(
        _CAPPED,
        logits.size,
        reads=(logits.name,),
        saves=(logits.name, _CAPPED) if holds else (logits.name,),
        forward=tanh,
        backward=tanh,
        holds=(logits.name,),
    )
