"""Small Llamas of all kinds, for comparisons."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from titanlite.models import SPECS, LlamaArgs, RopeScaling
from titanlite.models.layers import Llama
from titanlite.models.spec import ModelSpec

SMALL = LlamaArgs(dim=64, n_layers=2, n_heads=4, vocab_size=96, multiple_of=32, max_seq_len=128)
SCALED = RopeScaling(factor=8.0, original_context=32)
VARIANTS = {
    "gqa": LlamaArgs(64, 2, 8, n_kv_heads=2, vocab_size=96, rope_theta=5e5, max_seq_len=128),
    # 128 positions, four times the original context.
    "all": LlamaArgs(
        64,
        2,
        8,
        n_kv_heads=2,
        vocab_size=96,
        rope_theta=5e5,
        rope_scaling=SCALED,
        tied=True,
        max_seq_len=128,
    ),
}


def built(args: LlamaArgs) -> Llama:
    """A model whose every parameter, norms too, is random and large enough to matter."""
    torch.manual_seed(0)
    model = Llama(args)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                1 + 0.2 * torch.randn_like(p)
                if "norm" in name
                else torch.randn_like(p) * p.size(-1) ** -0.5
            )
    return model


def spec_of(args: LlamaArgs) -> ModelSpec:
    """Return the first family whose arguments have this class."""
    return next(spec for spec in SPECS.values() if spec.args_class is type(args))


def tokens_of(args: LlamaArgs, batch: int = 2, seq: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(args.n_vocab, (batch, seq or args.max_seq_len), generator=generator)


def relative(a: Tensor, b: Tensor) -> float:
    """Return the distance as a share of `b`, by Frobenius norms."""
    return float((a.detach() - b.detach()).norm() / b.detach().norm())


def assert_near(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], within: float) -> None:
    """The same names, and tensors within a relative distance."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert relative(ours[name], tensor) < within, name
