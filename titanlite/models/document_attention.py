"""Causal attention within the documents of packed sequences, by torch's attention of variable lengths.

A mask [seq, seq] does not exist: a kernel is told where documents begin. torch has one for GPUs (fp16 and bf16); the
one for CPUs is below. To `torch.compile` and to selective activation checkpointing both are the same operator. A run
without masks does not import this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from titanlite.data.rows import max_documents
from titanlite.models.layers import document_begins


class DocumentMask(NamedTuple):
    """Where documents begin in a batch; its shapes depend on those of the batch alone, so nothing is compiled again.

    `begins`: [most documents + 1] int32, first token of each document in the batch laid end to end; after the last
    one the number of tokens. `doc_ids`: [batch, seq] int.
    """

    begins: Tensor
    doc_ids: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [batch, heads, seq, head_dim], k and v: [batch, kv_heads, seq, head_dim]; return q's shape."""
        batch, heads, seq_len, _ = q.shape
        gqa = heads != k.size(1)
        if q.device.type == "cuda" and q.dtype not in (torch.bfloat16, torch.float16):  # the kernel has no other
            same = self.doc_ids.unsqueeze(2) == self.doc_ids.unsqueeze(1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=same.tril().unsqueeze(1), enable_gqa=gqa)
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        places, causal = self.begins, (-1, 0)
        y: Any = varlen_attn(q, k, v, places, places, seq_len, seq_len, window_size=causal, enable_gqa=gqa)
        return y.unflatten(0, (batch, seq_len)).transpose(1, 2)


def document_mask(doc_ids: Tensor) -> DocumentMask:
    """Return the mask for doc_ids: [batch, seq] int. Neighbours with the same number are of one document.

    On GPUs a row has at most `titanlite.data.rows.max_documents`: the kernel's time grows with the number of places.
    """
    batch, seq_len = doc_ids.shape
    number = document_begins(doc_ids).flatten().cumsum(0) - 1
    most = batch * seq_len
    if doc_ids.device.type == "cuda":
        most = batch * max_documents(seq_len)
        torch._assert_async(number[-1] < most, "more documents than titanlite.data.rows.max_documents")
    places = torch.arange(most + 1, device=doc_ids.device)
    return DocumentMask(torch.searchsorted(number, places, out_int32=True), doc_ids)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _documents(begins: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield the tensors [tokens, heads, …] document by document, as [1, heads, tokens, …]."""
    places = begins.unique_consecutive().tolist()
    for begin, end in zip(places, places[1:], strict=False):
        yield [t[begin:end].transpose(0, 1).unsqueeze(0) for t in tensors]


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: Tensor,
    begins_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if not is_causal:
        raise NotImplementedError("on CPUs attention of variable lengths is causal: window_size=(-1, 0)")
    out, lse = torch.empty_like(q), q.new_empty(q.size(1), len(q), dtype=torch.float32)
    for *qkv, y, sums in _documents(begins, q, k, v, out, lse.t()):
        result, logsumexp = _flash(*qkv, 0.0, True, scale=scale)
        y.copy_(result)
        sums.copy_(logsumexp)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
def _backward(
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
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    found = tuple(torch.empty_like(t) for t in (q, k, v))
    for *inputs, of_q, of_k, of_v in _documents(begins, gradient, q, k, v, out, lse.t(), *found):
        for mine, part in zip((of_q, of_k, of_v), _flash_backward(*inputs, 0.0, True, scale=scale), strict=True):
            mine.copy_(part)
    return found[0], found[1], found[2]
