"""Causal attention within documents and windows of packed sequences, by torch's attention of
variable lengths.

A mask [seq, seq] does not exist. A kernel is told where documents begin, and how far back a token
sees. torch has one for GPUs (fp16 and bf16); the one for CPUs is below, and its masks are [window,
2 * window]. To `torch.compile` and to selective activation checkpointing both are the same
operator. A run without either does not import this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from titanlite.data.rows import max_documents
from titanlite.models.attention import attend, band, document_begins, document_positions

#: torch 2.11 has no such argument: there the kernels take fewer heads of keys unasked.
_ASKS_FOR_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


class DocumentMask(NamedTuple):
    """Where documents begin; its shapes follow from the batch's alone, so nothing is compiled
    again.

    `begins`: [most documents + 1] int32, first token of each document in the batch laid end to end,
    then the number of tokens. `doc_ids`: [batch, seq] int.
    """

    begins: Tensor
    doc_ids: Tensor

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """q: [batch, heads, seq, head_dim], k and v: [batch, kv_heads, seq, head_dim]; return q's
        shape.

        scale: None: head_dim ** -0.5.
        """
        if no_kernel(q):
            return attend(q, k, v, self.seen(window), scale)
        return _attend(q, k, v, self.begins, window, scale)

    def seen(self, window: int | None) -> Tensor:
        """Return which keys each query sees: [batch, 1, seq, seq] bool."""
        seq_len = self.doc_ids.size(1)
        same = self.doc_ids.unsqueeze(2) == self.doc_ids.unsqueeze(1)
        return (same & band(seq_len, seq_len, window, same.device)).unsqueeze(1)


def attend_in_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return attention to the last `window` tokens, the own included: q's shape."""
    batch, seq_len = q.size(0), q.size(2)
    if no_kernel(q):
        return attend(q, k, v, band(seq_len, seq_len, window, q.device))
    begins = torch.arange(0, (batch + 1) * seq_len, seq_len, dtype=torch.int32, device=q.device)
    return _attend(q, k, v, begins, window)


def no_kernel(q: Tensor) -> bool:
    """Return whether torch lacks attention of variable lengths for such queries."""
    return q.device.type == "cuda" and q.dtype not in (torch.bfloat16, torch.float16)


def _attend(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: Tensor,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    batch, heads, seq_len, _ = q.shape
    more: dict[str, Any] = {"enable_gqa": heads != k.size(1)} if _ASKS_FOR_GQA else {}
    more["scale"] = scale
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    size = (-1 if window is None or window >= seq_len else window - 1, 0)
    y: Any = varlen_attn(q, k, v, begins, begins, seq_len, seq_len, window_size=size, **more)
    return y.unflatten(0, (batch, seq_len)).transpose(1, 2)


def chunk_ids(doc_ids: Tensor, chunk: int) -> Tensor:
    """Return each token's chunk in its row, [batch, seq] int64.

    Chunks are counted from the beginning of each document.
    """
    return (document_positions(doc_ids) % chunk == 0).cumsum(1)


def chunk_mask(doc_ids: Tensor, chunk: int) -> DocumentMask:
    """Return the mask of chunks within documents. doc_ids: [batch, seq] int."""
    # Each document may end with a chunk that is not full.
    return document_mask(chunk_ids(doc_ids, chunk), more=doc_ids.size(1) // chunk)


def document_mask(doc_ids: Tensor, more: int = 0) -> DocumentMask:
    """Return the mask for doc_ids: [batch, seq] int, equal for neighbours of one document.

    more: documents of a row beside those of the data. On GPUs a row has at most
    `titanlite.data.rows.max_documents`: the kernel's time grows with the number of places.
    """
    batch, seq_len = doc_ids.shape
    number = document_begins(doc_ids).flatten().cumsum(0) - 1
    most = batch * seq_len
    if doc_ids.device.type == "cuda":
        most = batch * (max_documents(seq_len) + more)
        torch._assert_async(
            number[-1] < most, "more documents than titanlite.data.rows.max_documents"
        )
    places = torch.arange(most + 1, device=doc_ids.device)
    return DocumentMask(torch.searchsorted(number, places, out_int32=True), doc_ids)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _Part(NamedTuple):
    """Neighbouring queries and all keys that they see, as slices of the tokens."""

    queries: slice
    keys: slice
    #: [queries, keys] to add to the scores; None: causal.
    mask: Tensor | None


def _parts(
    begins: Tensor, begins_k: Tensor | None, window_size: list[int] | None, dtype: torch.dtype
) -> Iterator[_Part]:
    """Yield the documents; longer ones in windows, which also see the window before.

    A document may have more keys than queries: its last query is at its last key.
    """
    left, right = window_size or (-1, -1)
    if right != 0:
        raise NotImplementedError(
            "on CPUs attention of variable lengths is causal: window_size = (…, 0)"
        )
    places = begins.tolist()
    key_places = places if begins_k is None else begins_k.tolist()
    queries = zip(places, places[1:], strict=False)
    keys = zip(key_places, key_places[1:], strict=False)
    whole: Tensor | None = None
    for (begin, end), (begin_k, end_k) in zip(queries, keys, strict=True):
        earlier = end_k - begin_k - (end - begin)
        step = left + 1
        if left < 0:
            step = max(1, end - begin)
        for first in range(begin, end, step):
            last = min(first + step, end)
            before = earlier + first - begin
            if left >= 0:
                before = min(before, left)
            last_key = end_k - (end - last)
            key_span = slice(last_key - (last - first) - before, last_key)
            mask = None
            if before and left < 0:
                mask = _added(band(last - first, last - first + before, None, begins.device), dtype)
            elif before:
                if whole is None:
                    whole = _added(band(step, step + left, step, begins.device), dtype)
                mask = whole[: last - first, left - before : left + last - first]
            yield _Part(slice(first, last), key_span, mask)


def _added(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)


def _heads(tensor: Tensor, tokens: slice) -> Tensor:
    """Return [1, heads, tokens, …] without a copy."""
    return tensor[tokens].transpose(0, 1).unsqueeze(0)


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def _forward(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: Tensor,
    begins_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.size(1), len(q), dtype=torch.float32)
    for queries, keys, mask in _parts(begins, begins_k, window_size, q.dtype):
        inputs = _heads(q, queries), _heads(k, keys), _heads(v, keys)
        result, logsumexp = _flash(*inputs, 0.0, mask is None, attn_mask=mask, scale=scale)
        _heads(out, queries).copy_(result)
        _heads(lse.t(), queries).copy_(logsumexp)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
def _backward(  # noqa: PLR0913
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    begins: Tensor,
    begins_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys, mask in _parts(begins, begins_k, window_size, q.dtype):
        inputs = _heads(gradient, queries), _heads(q, queries), _heads(k, keys), _heads(v, keys)
        results = _heads(out, queries), _heads(lse.t(), queries)
        parts = _flash_backward(*inputs, *results, 0.0, mask is None, attn_mask=mask, scale=scale)
        _heads(of_q, queries).copy_(parts[0])
        _heads(of_k, keys).add_(parts[1])  # at most two pieces see a key
        _heads(of_v, keys).add_(parts[2])
    return of_q, of_k, of_v
