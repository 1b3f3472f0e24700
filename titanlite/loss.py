"""The training loss: cross-entropy summed over tokens, divided by the global number of valid tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from titanlite.data.packing import IGNORE


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over valid tokens of -log p(label), in float32.

    logits: [batch, seq, vocab]; labels: [batch, seq] int64, `IGNORE` where there is no target. Returns a scalar.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def count_valid(labels: torch.Tensor) -> torch.Tensor:
    """Number of targets in labels [batch, seq], a 0-dim int64 tensor on its device."""
    return (labels != IGNORE).sum()
