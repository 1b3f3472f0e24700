"""A loss of your own: cross-entropy plus a penalty on the size of the logits (z-loss; PaLM, section
5).

[training]
loss = "./z_loss.py:z_loss"
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # label of a position that is no target


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss summed over tokens; titanlite divides it by the valid tokens of the whole
    step.

    logits: [tokens, vocab]; labels: [tokens] int64. It also measures the validation loss.
    """
    logits = logits.float()
    log_z = torch.logsumexp(logits, dim=-1)
    penalty = (log_z.square() * (labels != IGNORE)).sum()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") + 1e-4 * penalty
