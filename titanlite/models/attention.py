"""Attention of one rank's queries, and where documents begin: functions that all forms of
attention share.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def document_begins(doc_ids: Tensor) -> Tensor:
    """Return which tokens begin a document, [batch, seq] bool, for doc_ids: [batch, seq] int."""
    first = torch.ones_like(doc_ids[:, :1], dtype=torch.bool)
    others = doc_ids[:, 1:] != doc_ids[:, :-1]
    return torch.cat([first, others], 1)


def document_positions(doc_ids: Tensor) -> Tensor:
    """Return each token's place in its document, [batch, seq] int64."""
    index = torch.arange(doc_ids.size(1), device=doc_ids.device)
    return index - (index * document_begins(doc_ids)).cummax(1).values


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return attention by `scaled_dot_product_attention`: q's shape.

    q: [batch, heads, seq, head_dim], k and v: [batch, kv_heads, keys, head_dim]. mask: [seq, keys]
    bool, also with leading [batch, 1]; or torch's `CausalBias`; None: causal. scale: of the scores;
    None: head_dim ** -0.5. `DistEnv` sets the order in which kernels are tried.
    """
    groups = q.size(1) // k.size(1)
    if groups > 1 and q.device.type == "cuda" and q.dtype == torch.float32:
        # In fp32 only a kernel without grouped queries is left, or one that holds all scores, [seq,
        # keys] per head.
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    # enable_gqa only where it is needed: it rules some CUDA kernels out.
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
    )


def band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each query may see, [queries, keys] bool; the last is at the last key."""
    first = keys - queries
    causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(first)
    return causal if window is None else causal.triu(first - window + 1)
