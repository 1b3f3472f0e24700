"""Rotary positions (Su et al. 2021), and the frequencies of each scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titanlite.models.rope_scaling import LinearScaling, RopeScaling, Scaling, YarnScaling

if TYPE_CHECKING:
    from titanlite.models.llama import LlamaArgs, Rotary


class Rotation:
    """One batch's cosines and sines: [seq, 1, head_dim / 2] or [batch, seq, 1, head_dim / 2], fp32.

    Deliberately neither tuple nor dataclass: `fully_shard` with `cast_forward_inputs=True` casts
    floating-point tensors in a block's arguments, inside containers too, to the parameters' dtype.
    Casting back could not restore what bf16's 8 bits lost.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def of(self, rotary: Rotary | None) -> Rotation:
        """Return itself: all blocks share these tables."""
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x: [batch, seq, heads, head_dim], pairs (i, i + head_dim / 2); same dtype."""
        if x.device.type == "cuda" and not torch.compiler.is_compiling():
            return _Rotate.apply(x, self.cos, self.sin)
        # Explicitly in fp32. With bf16 operands the compiler would keep intermediates in fp32 that
        # eager mode rounds, and the two would differ.
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """The rotation in three kernels in each direction for eager CUDA, where autograd launches 21.

    It rounds once, to the dtype of x; each sum of two products is one fused multiply-add.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _Rotate.by(x, cos, sin, sign=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.by(grad, cos, sin, sign=-1), None, None

    @staticmethod
    def by(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
        scaled = x.unflatten(-1, (2, -1)) * cos.unsqueeze(-2)  # fp32, as the tables
        first, second = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        low, high = result.chunk(2, dim=-1)
        torch.addcmul(scaled[..., 0, :], second, sin, value=-sign, out=low)
        torch.addcmul(scaled[..., 1, :], first, sin, value=sign, out=high)
        return result


class Rope(nn.Module):
    """Tables of cosines and sines for max_seq_len positions, each [max_seq_len, head_dim / 2] fp32.

    Buffers are non-persistent: after `to_empty` they are garbage until `init_buffers` has run.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, head_dim: int, max_seq_len: int, theta: float, scaling: Scaling | None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.scaling = scaling
        for name in ("cos", "sin"):
            table = torch.empty(max_seq_len, head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fill the tables, unless they are on the meta device."""
        if self.cos.is_meta:
            return
        # Always on the CPU, so that all devices rotate by the same angles. And in fp32 like the
        # reference implementations, since published weights were trained with these roundings.
        with torch.device("cpu"):
            position = torch.arange(self.cos.size(0), dtype=torch.float32)
            frequencies = rope_frequencies(self.head_dim, self.theta, self.scaling)
            angles = torch.outer(position, frequencies)
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
        self.cos.copy_(angles.cos() * amplitude)
        self.sin.copy_(angles.sin() * amplitude)

    def forward(self, seq_len: int, positions: Tensor | None = None) -> Rotation:
        """Return the rotation of 0 … seq_len - 1, or of `positions`: [batch, seq] int64.

        Raises ValueError if the sequence is longer than the tables.
        """
        if positions is not None:
            return Rotation(self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2))
        if seq_len > self.max_seq_len:
            raise ValueError(
                f"a sequence of {seq_len} tokens is longer than the model's RoPE tables "
                f"({self.max_seq_len}). Build it with max_seq_len of at least {seq_len}"
            )
        return Rotation(self.cos[:seq_len].unsqueeze(1), self.sin[:seq_len].unsqueeze(1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `model.to(torch.bfloat16)` would round the tables: follow it to another device, not to
        # another dtype.
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            self.cos, self.sin = self.cos.float(), self.sin.float()
            self.init_buffers()
        return self


def rope_frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> Tensor:
    """Return the radians per position of each pair, [head_dim / 2] fp32: theta ** (-2 i /
    head_dim), scaled.

    The order of operations is the reference implementations': published weights were trained with
    these roundings.
    """
    periods: Tensor = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / periods
    match scaling:
        case LinearScaling():
            return plain / scaling.factor
        case YarnScaling():
            from titanlite.models.yarn import kept_by_yarn

            keep = kept_by_yarn(head_dim, theta, scaling)
            return 1.0 / (scaling.factor * periods) * (1 - keep) + plain * keep
        case RopeScaling():
            turns_in_context = scaling.original_context / (2 * math.pi / plain)
            keep = (turns_in_context - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            keep = keep.clamp(0.0, 1.0).nan_to_num(0.0)
            return (1.0 - keep) * plain / scaling.factor + keep * plain
    return plain


def build_rope(args: LlamaArgs) -> nn.Module:
    """Build the tables: a `Rope`, or a `BlockRopes` where blocks differ."""
    kinds = args.rotaries()
    ropes: dict[Rotary, Rope] = {}
    for kind in kinds:
        if kind is not None:
            ropes[kind] = Rope(kind.width, args.max_seq_len, kind.theta, kind.scaling)
    if len(kinds) == len(ropes) == 1:
        return next(iter(ropes.values()))
    from titanlite.models.block_ropes import BlockRopes

    return BlockRopes(ropes, args.max_seq_len)
