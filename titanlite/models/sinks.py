"""Attention with sinks (Agarwal et al. 2025, gpt-oss model card; Xiao et al. 2023).

Each head has a learned score that takes its share of the softmax and adds nothing to the result.
A sink is one more key, with that score for every query and the value zero. A kernel without sinks
returns its result and the logarithm of its sum of exponentials. Both are corrected afterwards, and
from the corrected ones its backward computes the gradients with the sink. So no scores [seq, seq]
exist, and every kernel of variable lengths will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.models.attention import attend, band
from titanlite.models.autograd import fresh
from titanlite.models.document_attention import no_kernel
from titanlite.models.layers import SdpaAttention

if TYPE_CHECKING:
    from titanlite.models.document_attention import DocumentMask

#: Numbers that are added to each head for a sink as a key: kernels want multiples of 8.
_MORE = 8


class SinkAttention(SdpaAttention):
    """`SdpaAttention` whose softmax has a sink in each head."""

    #: A class that replaces it gets the sinks too.
    has_sinks = True

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask | None, sinks: Tensor
    ) -> Tensor:
        """Shapes as for `SdpaAttention`; sinks: [heads]."""
        if mask is None:
            return attend_in_window(q, k, v, sinks, self.window)
        if no_kernel(q):
            return attend_masked(q, k, v, sinks, mask.seen(self.window))
        spans = _Spans(mask.begins, mask.begins, q.size(2), q.size(2))
        return _attend(q, k, v, sinks, spans, self.window)


def attend_in_window(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Return attention with sinks: q's shape.

    q: [batch, heads, seq, head_dim], k and v: [batch, kv_heads, keys, head_dim]; the last query is
    at the last key. sinks: [heads]. window: visible keys, the own included; None: all.
    """
    if no_kernel(q):
        return attend_masked(q, k, v, sinks, band(q.size(2), k.size(2), window, q.device))
    spans = _Spans(_begins(q), _begins(k), q.size(2), k.size(2))
    return _attend(q, k, v, sinks, spans, window)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    """Do as `attend_in_window` with a mask: [queries, keys] bool, also with leading [batch, 1].

    Every kernel can: the sink is a key whose product with each query is the sink's score.
    """
    head_dim = q.size(3)
    scale = head_dim**-0.5
    scores = (sinks / scale).to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, scores], 3), (0, _MORE - 1))
    k = F.pad(k, (0, _MORE, 0, 1))
    k[:, :, -1, head_dim] = 1
    v = F.pad(v, (0, _MORE, 0, 1))
    y = attend(q, k, v, F.pad(seen, (0, 1), value=True), scale)
    return y[..., :head_dim]


class _Spans(NamedTuple):
    """Starts of documents among queries and keys, laid end to end, and their longest lengths."""

    begins: Tensor
    key_begins: Tensor
    queries: int
    keys: int


def _begins(heads: Tensor) -> Tensor:
    """Return where rows of [batch, heads, seq, head_dim] begin, end to end: [batch + 1] int32."""
    batch, _, seq_len, _ = heads.shape
    return torch.arange(0, (batch + 1) * seq_len, seq_len, dtype=torch.int32, device=heads.device)


def _attend(  # noqa: PLR0913
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, spans: _Spans, window: int | None
) -> Tensor:
    batch = q.size(0)
    left = -1
    if window is not None and window < spans.keys:
        left = window - 1
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    y: Any = _AttendWithSinks.apply(q, k, v, sinks, spans, left)
    return y.unflatten(0, (batch, -1)).transpose(1, 2)


class _AttendWithSinks(torch.autograd.Function):
    """Attention of variable lengths with sinks. q: [queries, heads, head_dim], k and v alike."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, spans: _Spans, left: int
    ) -> Tensor:
        ctx.numbers = (spans.queries, spans.keys, left < 0)
        ctx.window = [left, 0]
        out, sums, state = torch.ops.torch_attn._varlen_attn(
            q, k, v, spans.begins, spans.key_begins, *ctx.numbers, None, ctx.window
        )
        # Logarithms of sums of exponentials: [heads, queries].
        with_sink = torch.logaddexp(sums, sinks.float().unsqueeze(1))
        share = (sums - with_sink).exp().t().unsqueeze(2)
        out = (out * share).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, spans.begins, spans.key_begins, out, with_sink, state)
        return fresh(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, begins, key_begins, out, sums, state = ctx.saved_tensors
        of_q, of_k, of_v = torch.ops.torch_attn._varlen_attn_backward(
            grad, q, k, v, out, sums, begins, key_begins, *ctx.numbers, state, None, ctx.window
        )
        share = (sinks.float().unsqueeze(1) - sums).exp()
        of_sinks = -((grad.float() * out).sum(2).t() * share).sum(1)
        return of_q, of_k, of_v, of_sinks.to(sinks.dtype), None, None
