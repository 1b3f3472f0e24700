"""What a run asks of a model of `transformers` beside logits of whole rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from titanlite.models.hf.args import HFArgs


class Extras:
    """Documents and chunks of a model, with the facts of its arguments."""

    def __init__(self, args: HFArgs) -> None:
        self.args = args

    def packed(self, model: Any, doc_ids: Tensor) -> AbstractContextManager[dict[str, Tensor]]:
        """Let attention of a model stop at documents; return the arguments that its call needs.

        doc_ids: [batch, seq] int. Raises ValueError if it cannot.
        """
        from titanlite.models.hf import documents

        way, reason = documents.way_of(self.args)
        if not way:
            raise ValueError(f"attention cannot stop at documents: {reason}")
        if way == documents.VARLEN and model.config._attn_implementation != documents.NAME:
            documents.exchange(model)
        return documents.within(doc_ids, way)

    def loss(
        self,
        model: Any,
        run: Callable[[], Tensor],
        labels: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the loss that the head of a model computes while `run` runs the model."""
        from titanlite.models.hf.chunks import loss_of_head

        return loss_of_head(model, run, labels, loss)
