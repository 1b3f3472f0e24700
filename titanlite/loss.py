"""The training loss: cross-entropy summed over tokens, divided by the global number of valid
tokens.

`titanlite.features.loss_chunks` computes it piece by piece. `titanlite.regularized_loss`
adds label smoothing and the z-loss to its gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.data.rows import IGNORE

#: (logits [batch, seq, vocab], labels [batch, seq] int64) → the loss summed over valid tokens, a
#: scalar.
LossFunction = Callable[[Tensor, Tensor], Tensor]


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over valid tokens of -log p(label), in float32.

    logits: [batch, seq, vocab]; labels: [batch, seq] int64, `IGNORE` where there is no target.
    Returns a scalar.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def of_tokens(loss: LossFunction) -> LossFunction:
    """Return `loss`, a function of logits [tokens, vocab] and labels [tokens], as one of whole
    batches.
    """

    def flat(logits: Tensor, labels: Tensor) -> Tensor:
        return loss(logits.flatten(0, 1), labels.flatten())

    flat.__name__ = getattr(loss, "__name__", "loss")  # for reports of compilation
    return flat


def count_valid(labels: Tensor) -> Tensor:
    """Return the number of targets in labels [batch, seq], a 0-dim int64 tensor on its device."""
    return (labels != IGNORE).sum()


def batch_loss(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    loss_function: LossFunction,
    documents: Tensor | None = None,
) -> Tensor:
    """Return a micro-batch's loss, a scalar. After `chunk_head` not all its logits exist at a time.

    tokens, labels: [batch, seq] int64. documents: of a `Batch`.
    """
    masked = {} if documents is None else {"doc_ids": documents}
    if in_chunks(model):
        return model(tokens, labels=labels, loss=loss_function, **masked)
    return loss_function(model(tokens, **masked), labels)


def in_chunks(model: nn.Module) -> bool:
    """Whether the loss is the model's own business: `chunk_head` was told of it."""
    return hasattr(model, "loss_chunks")
