"""A model of your own: GPT-2's layout (Radford et al. 2019) with learned positions. One file, no
change in titanlite.

[model]
name = "./tiny_gpt.py:SPEC"
flavor = "small"
overrides = { n_layers = 6 }    # any field of GPTArgs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite import Init, ModelSpec, Size


@dataclass(frozen=True)
class GPTArgs:
    """`vocab_size` and `max_seq_len` must be there: the tokenizer and `training.seq_len`
    set them.
    """

    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int | None = None
    max_seq_len: int = 1024

    def __post_init__(self) -> None:
        if self.dim % self.n_heads:
            raise ValueError(f"n_heads = {self.n_heads} does not divide dim = {self.dim}")


class Block(nn.Module):
    """Attention and feed-forward, each normalized before and added to the residual stream."""

    def __init__(self, args: GPTArgs) -> None:
        super().__init__()
        self.n_heads = args.n_heads
        self.norm1, self.norm2 = nn.LayerNorm(args.dim), nn.LayerNorm(args.dim)
        self.qkv = nn.Linear(args.dim, 3 * args.dim, bias=False)
        self.out = nn.Linear(args.dim, args.dim, bias=False)
        self.up = nn.Linear(args.dim, 4 * args.dim, bias=False)
        self.down = nn.Linear(4 * args.dim, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens [batch, seq] int64 in, logits [batch, seq, vocab] out."""

    def __init__(self, args: GPTArgs) -> None:
        super().__init__()
        assert args.vocab_size is not None
        self.embedding = nn.Embedding(args.vocab_size, args.dim)
        self.positions = nn.Embedding(args.max_seq_len, args.dim)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        x = self.embedding(tokens) + self.positions(
            torch.arange(tokens.size(1), device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        # With training.loss_chunks the head computes the loss, and gets the labels for it.
        return self.head(x) if labels is None else self.head(x, labels, loss)


def init_rule(name: str, args: GPTArgs) -> Init:
    """Return the distribution of a parameter: GPT-2's."""
    if name.endswith("bias"):
        return Init("zeros")
    if "norm" in name:
        return Init("ones")
    residual = name.endswith(("out.weight", "down.weight"))
    return Init("normal", std=0.02 / (2 * args.n_layers) ** 0.5 if residual else 0.02)


def block_names(args: GPTArgs) -> list[str]:
    return [f"blocks.{i}" for i in range(args.n_layers)]


def linears(args: GPTArgs) -> dict[str, Size]:
    """Return the linears, for `[float8]`."""
    d = args.dim
    sizes = {"qkv": Size(d, 3 * d), "out": Size(d, d), "up": Size(d, 4 * d), "down": Size(4 * d, d)}
    found = {f"{block}.{name}": size for block in block_names(args) for name, size in sizes.items()}
    return {**found, "head": Size(d, args.vocab_size or 0)}


def count_parameters(args: GPTArgs) -> int:
    matrices = sum(size.in_features * size.out_features for size in linears(args).values())
    tables = ((args.vocab_size or 0) + args.max_seq_len) * args.dim
    return matrices + tables + (2 * args.n_layers + 1) * 2 * args.dim


def flops_per_token(args: GPTArgs, seq_len: int) -> int:
    """Return 6 per weight that is multiplied, plus attention (PaLM, appendix B)."""
    matrices = sum(size.in_features * size.out_features for size in linears(args).values())
    return 6 * matrices + 12 * args.n_layers * args.dim * seq_len


SPEC = ModelSpec(
    name="tiny_gpt",
    args_class=GPTArgs,
    flavors={
        "tiny": GPTArgs(dim=64, n_layers=2, n_heads=4),
        "small": GPTArgs(dim=512, n_layers=8, n_heads=8),
    },
    build=GPT,
    init_rule=init_rule,
    block_names=block_names,
    count_parameters=count_parameters,
    flops_per_token=flops_per_token,
    head="head",
    linears=linears,
)
