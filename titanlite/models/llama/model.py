"""The Llama decoder (Touvron et al. 2023; Llama 3, 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.ops import RMSNorm, silu_mul
from titanlite.models.rope import Rope, Rotation
from titanlite.models.shapes import LlamaArgs


def build_norm(args: LlamaArgs) -> nn.Module:
    """The normalisation of `args.norm_type` over the last dimension, without bias.

    torch's own RMSNorm is a fused kernel on GPUs, so "rmsnorm" and "fused_rmsnorm" are one thing.
    """
    if args.norm_type in ("rmsnorm", "fused_rmsnorm"):
        return RMSNorm(args.dim, eps=args.norm_eps)
    if args.norm_type == "layernorm":
        return nn.LayerNorm(args.dim, eps=args.norm_eps, bias=False)
    if args.norm_type == "np_layernorm":
        return nn.LayerNorm(args.dim, eps=args.norm_eps, elementwise_affine=False)
    raise ValueError(f"unknown norm_type {args.norm_type!r}")


class SdpaAttention(nn.Module):
    """Causal attention by `scaled_dot_product_attention`.

    A replacement (another kernel, a cache, attention over ranks) keeps both methods; `prepare` is called once per
    forward pass, on the first block's, and what it returns is handed to every block.
    """

    def prepare(self, doc_ids: Tensor | None) -> Tensor | None:
        """From doc_ids: [batch, seq] int, the mask [batch, 1, seq, seq] bool of who may look at whom; None: causal."""
        if doc_ids is None:
            return None
        seq_len = doc_ids.size(1)
        causal = torch.ones(seq_len, seq_len, dtype=torch.bool, device=doc_ids.device).tril()
        same = doc_ids.unsqueeze(2) == doc_ids.unsqueeze(1)
        return (same & causal).unsqueeze(1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q: [batch, heads, seq, head_dim], k and v: [batch, kv_heads, seq, head_dim]; returns q's shape."""
        # enable_gqa only where it is needed: it rules some CUDA kernels out.
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1)
        )


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.inner_attention = SdpaAttention()

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        q, k, v = (self.heads(linear(x)) for linear in (self.wq, self.wk, self.wv))
        # Rotated before heads and positions change places: attention gives its result the layout of q, and in this one
        # wo reads it without a copy.
        q, k, v = (t.transpose(1, 2) for t in (rotation(q), rotation(k), v))
        y = self.inner_attention(q, k, v, mask)
        return self.wo(y.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """[batch, seq, heads * head_dim] → [batch, seq, heads, head_dim].

        The number of heads is read from x: under tensor parallelism a rank holds some of them.
        """
        return x.unflatten(2, (-1, self.head_dim))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): w2(silu(w1 x) * w3 x)."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_width, bias=False)
        self.w2 = nn.Linear(args.ffn_width, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        return self.w2(silu_mul(self.w1(x), self.w3(x)))


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream after."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = build_norm(args)
        self.ffn_norm = build_norm(args)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The decoder: tokens in, logits out.

    Built on the meta device it holds no memory: `to_empty`, then draw the parameters, then `init_buffers`.
    """

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.n_vocab, args.dim)
        self.rope = Rope(args.head_dim, args.max_seq_len, args.rope_theta, args.rope_scaling)
        # A dictionary, not a list: a block keeps its name when others are dropped.
        self.layers = nn.ModuleDict({str(i): Block(args) for i in range(args.n_layers)})
        self.norm = build_norm(args)
        self.output = nn.Linear(args.dim, args.n_vocab, bias=False)
        self._tie()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        doc_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits [batch, seq, vocab], in the parameters' dtype.

        tokens: [batch, seq] int64. positions: [batch, seq] int64, rows of the RoPE tables; None: 0, 1, 2, …
        doc_ids: [batch, seq] int; a token sees only tokens of its own document; None: one document.
        labels, loss: for a head that computes the loss itself (`titanlite.loss.chunk_head`), which is then returned.
        Raises ValueError if the sequence is longer than the RoPE tables.

        A pipeline stage is a model whose other modules are None or gone: without an embedding it takes the hidden
        states [batch, seq, dim] of the stage before, without a head it returns its own.
        """
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        if self.layers:
            rotation = self.rope(tokens.size(1), positions)
            first_block = next(iter(self.layers.values()))
            inner: Any = first_block.get_submodule("attention.inner_attention")
            mask = inner.prepare(doc_ids)
            for block in self.layers.values():
                x = block(x, rotation, mask)
        x = x if self.norm is None else self.norm(x)
        if self.output is None:
            return x
        return self.output(x) if labels is None else self.output(x, labels, loss)

    def init_buffers(self) -> None:
        """Recompute what `to_empty` leaves as garbage and no checkpoint holds: the RoPE tables."""
        self.rope.init_buffers()

    def _tie(self) -> None:
        if self.args.tied:
            self.output.weight = self.tok_embeddings.weight

    def _apply(self, fn, recurse=True):
        # Leaving the meta device, torch makes a new parameter for each module that holds the shared one.
        super()._apply(fn, recurse)
        self._tie()
        return self
