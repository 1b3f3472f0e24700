"""The frequencies that YaRN keeps (Peng et al. 2023, arXiv:2309.00071)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titanlite.models.rope_scaling import YarnScaling


def kept_by_yarn(head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Return the share of each pair's frequency that YaRN keeps (appendix A.2): [head_dim / 2]."""

    def pair_of(turns: float) -> float:
        """Return the pair, not rounded, with so many turns in the original context."""
        period = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(theta))

    first = pair_of(scaling.beta_fast)
    last = pair_of(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)
