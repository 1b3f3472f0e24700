"""The modules of a Llama decoder (Touvron et al. 2023; Llama 3, 2024).

They know nothing of how they are sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titanlite.models.attention import attend, document_positions
from titanlite.models.autograd import RMSNorm, silu_mul
from titanlite.models.llama import AttentionKind, LlamaArgs
from titanlite.models.rope import Rotation, build_rope

if TYPE_CHECKING:
    from titanlite.models.document_attention import DocumentMask


def build_norm(args: LlamaArgs) -> nn.Module:
    """Build an RMSNorm of hidden states."""
    if args.norm_offset:
        from titanlite.models.norms import OffsetRMSNorm

        return OffsetRMSNorm(args.dim, args.norm_eps)
    return RMSNorm(args.dim, eps=args.norm_eps)


class SdpaAttention(nn.Module):
    """Causal attention by `scaled_dot_product_attention`, or by attention of variable lengths.

    window: tokens that a token attends to, itself included; None: all.

    A replacement keeps both methods and minds the window. `prepare` is called once per forward pass
    and `AttentionKind`; all blocks of that kind get its result.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def prepare(self, doc_ids: Tensor | None) -> DocumentMask | None:
        """Return the mask for doc_ids: [batch, seq] int; None: each row is one document."""
        if doc_ids is None:
            return None
        from titanlite.models.document_attention import document_mask

        return document_mask(doc_ids)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask | None) -> Tensor:
        """Return attention: q's shape.

        q: [batch, heads, seq, head_dim], k and v: [batch, kv_heads, seq, head_dim].
        """
        if mask is not None:
            return mask.attend(q, k, v, self.window)
        if self.window is None or self.window >= q.size(2):
            return attend(q, k, v)
        from titanlite.models.document_attention import attend_in_window

        return attend_in_window(q, k, v, self.window)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if args.qk_norm:
            from titanlite.models.norms import qk_norms

            self.q_norm, self.k_norm = qk_norms(args)
        self.inner_attention = SdpaAttention(args.window)

    def forward(self, x: Tensor, rotation: Rotation, mask: DocumentMask | None) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        # Under tensor parallelism a rank holds some of the heads.
        heads = (-1, self.head_dim)
        q = self.wq(x).unflatten(2, heads)
        k = self.wk(x).unflatten(2, heads)
        v = self.wv(x).unflatten(2, heads)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        # Rotated before heads and positions change places: attention gives its result the layout of
        # q. In this layout wo reads it without a copy.
        q = rotation(q)
        k = rotation(k)
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(y.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask | None) -> Tensor:
        """Shapes as for `SdpaAttention`."""
        return self.inner_attention(q, k, v, mask)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): w2(silu(w1 x) * w3 x), or the same with another `activation`."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_width, bias=False)
        self.w2 = nn.Linear(args.ffn_width, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_width, bias=False)
        self.gated = silu_mul
        if args.activation == "gelu_tanh":
            from titanlite.models.gelu_mul import gelu_mul

            self.gated = gelu_mul

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        return self.w2(self.gated(self.w1(x), self.w3(x)))


class Block(nn.Module):
    """Attention and feed-forward on the residual stream, with norms as `norm_placement` says.

    A subclass names its `attention_class` or `feed_forward_class`, and a subclass of `Llama` its
    `block_class`. A static method may choose by the block's arguments.
    """

    attention_class: Callable[[Any], nn.Module] = Attention
    feed_forward_class: Callable[[Any], nn.Module] = FeedForward

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.attention = self.attention_class(args)
        self.feed_forward = self.feed_forward_class(args)
        before = args.norm_placement != "after"
        after = args.norm_placement != "before"
        self.attention_norm = build_norm(args) if before else nn.Identity()
        self.ffn_norm = build_norm(args) if before else nn.Identity()
        self.attention_post_norm = build_norm(args) if after else nn.Identity()
        self.ffn_post_norm = build_norm(args) if after else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation, mask: DocumentMask | None) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        # `titanlite.plan.blocks.block_ops` has the same operators, with what each keeps and needs.
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rotation, mask))
        return x + self.ffn_post_norm(self.feed_forward(self.ffn_norm(x)))


class Llama(nn.Module):
    """The decoder. From the meta device: `to_empty`, draw the parameters, `init_buffers`."""

    block_class: type[Block] = Block

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.n_vocab, args.dim)
        self.rope: Any = build_rope(args)
        # A dictionary, not a list: a block keeps its name when others are dropped.
        self.layers = nn.ModuleDict()
        self.kinds: dict[str, AttentionKind] = {}
        for index, block in enumerate(args.blocks().values()):
            self.layers[str(index)] = self.block_class(block)
            self.kinds[str(index)] = block.attention_kind
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
        """Return logits [batch, seq, vocab], in the parameters' dtype.

        tokens: [batch, seq] int64. positions: [batch, seq] int64, rows of the RoPE tables; None: 0,
        1, 2, … in each document.
        doc_ids: [batch, whole sequence] int; attention stays within a document; None: one document.
        labels, loss: for a head that computes the loss itself (`titanlite.features.loss_chunks`),
        which is then returned.
        Raises ValueError if the sequence is longer than the RoPE tables.

        In a pipeline stage other modules are None or gone. Without an embedding it takes hidden
        states [batch, seq, dim]; without a head it returns them.
        """
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        if self.tok_embeddings is not None and self.args.embedding_scale != 1:
            x = x * torch.tensor(self.args.embedding_scale, dtype=x.dtype)
        if self.layers:
            if doc_ids is not None and positions is None:
                positions = document_positions(doc_ids)
            rotations = self.rope(tokens.size(1), positions)
            masks: dict[AttentionKind, Any] = {}
            for name, block in self.layers.items():
                kind = self.kinds[name]
                if kind not in masks:
                    inner: Any = block.get_submodule("attention.inner_attention")
                    masks[kind] = inner.prepare(doc_ids)
                x = block(x, rotations.of(kind.rotary), masks[kind])
        if self.norm is not None:
            x = self.norm(x)
        if self.output is None:
            return x
        if labels is None:
            return self.output(x)
        return self.output(x, labels, loss)

    def init_buffers(self) -> None:
        """Recompute the RoPE tables, which neither `to_empty` nor a checkpoint fills."""
        self.rope.init_buffers()

    def _tie(self) -> None:
        if self.args.tied:
            self.output.weight = self.tok_embeddings.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Leaving the meta device, torch makes a new parameter for each module that holds the shared
        # one.
        super()._apply(fn, recurse)
        self._tie()
        return self
