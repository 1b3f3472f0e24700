"""A Llama in plain torch, by its formulas and with titanlite's names of weights: the reference of
runs whose model `transformers` lacks.

A variant subclasses `PlainBlock` and `PlainLlama`; `REFERENCES` of grid.py gives it a word.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models import LlamaArgs


def rotated(x: Tensor, theta: float) -> Tensor:
    """Rotate [batch, seq, heads, head_dim] by positions, pairs half a head apart."""
    half = x.size(-1) // 2
    frequencies = theta ** (-torch.arange(half).double() / half)
    angles = torch.outer(torch.arange(x.size(1)).double(), frequencies)[:, None]
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = x.split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class PlainAttention(nn.Module):
    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.args = args
        heads, groups = args.n_heads * args.head_dim, args.kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, heads, bias=False)
        self.wk = nn.Linear(args.dim, groups, bias=False)
        self.wv = nn.Linear(args.dim, groups, bias=False)
        self.wo = nn.Linear(heads, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.args
        q, k, v = (w(x).unflatten(-1, (-1, a.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, a.rope_theta), rotated(k, a.rope_theta)
        k, v = (one.repeat_interleave(a.n_heads // a.kv_heads, dim=2) for one in (k, v))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class PlainFeedForward(nn.Module):
    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_width, bias=False)
        self.w2 = nn.Linear(args.ffn_width, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PlainBlock(nn.Module):
    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.attention = PlainAttention(args)
        self.feed_forward = PlainFeedForward(args)
        self.attention_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class PlainLlama(nn.Module):
    block_class = PlainBlock

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.n_vocab, args.dim)
        self.layers = nn.ModuleList(self.block_class(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.n_vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x)
        return self.output(self.norm(x))
