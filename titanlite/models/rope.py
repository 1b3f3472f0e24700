"""Rotary positions (Su et al. 2021), with Llama 3.1's longer wavelengths.

`titanlite.models.rope_formulas` has the other scalings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titanlite.models.rope_scaling import RopeScaling, Scaling

if TYPE_CHECKING:
    from titanlite.models.llama_args import LlamaArgs, Rotary


class Rotation:
    """The cosines and sines of one batch: [seq, 1, head_dim / 2], or [batch, seq, 1, head_dim / 2],
    fp32.

    Deliberately a plain object, neither tuple nor dataclass. Blocks receive it as an argument.
    `fully_shard` with `cast_forward_inputs=True` casts every floating-point tensor that it finds in
    a block's arguments, inside containers too, to the parameters' dtype. Casting back in the block
    could not restore what bf16's 8 bits lost.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def of(self, rotary: Rotary | None) -> Rotation:
        """Return the rotation of blocks with these tables: all blocks have these."""
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x: [batch, seq, heads, head_dim], pairs (i, i + head_dim / 2); same dtype back."""
        if x.device.type == "cuda" and not torch.compiler.is_compiling():
            return _Rotate.apply(x, self.cos, self.sin)
        # Explicitly in fp32. With bf16 operands the compiler would keep intermediates in fp32 that
        # eager mode rounds, and the two would differ.
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """The rotation in three kernels in each direction, for eager CUDA: the formula under autograd
    launches 21.

    It rounds once, to the dtype of x, as the formula does. Each sum of two products is one fused
    multiply-add.
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
        """Rotate the pairs of x by the angles of the tables times `sign`."""
        scaled = x.unflatten(-1, (2, -1)) * cos.unsqueeze(-2)  # fp32, as the tables
        first, second = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        low, high = result.chunk(2, dim=-1)
        torch.addcmul(scaled[..., 0, :], second, sin, value=-sign, out=low)
        torch.addcmul(scaled[..., 1, :], first, sin, value=sign, out=high)
        return result


class Rope(nn.Module):
    """Tables of cosines and sines for positions 0 … max_seq_len - 1, each [max_seq_len, head_dim /
    2] fp32.

    The tables are non-persistent buffers: a checkpoint does not carry them. After `to_empty` they
    are garbage until `init_buffers` has run.

    With a scaling whose frequencies depend on the length of the sequence, the tables are those of
    one length. A forward pass with another length makes new ones.
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
        #: The longest sequence whose tables are those of all shorter ones; None: of any length.
        self.varies_above = None if scaling is None else scaling.varies_above
        #: Ranks that share each sequence: it has this many times the positions of a call.
        self.sharing_ranks = 1
        #: Tokens of the sequence that the tables are for.
        self._length = max_seq_len
        for name in ("cos", "sin"):
            table = torch.empty(max_seq_len, head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fill the tables on the device they are on; on the meta device there is nothing to
        fill.
        """
        if self.cos.is_meta:
            return
        cos, sin = self._tables()
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines on the CPU, as many rows as the tables have now."""
        # Always on the CPU, so that all devices rotate by the same angles. And in fp32 like the
        # reference implementations, since published weights were trained with these roundings.
        with torch.device("cpu"):
            position = torch.arange(self.cos.size(0), dtype=torch.float32)
            angles = torch.outer(
                position,
                rope_frequencies(self.head_dim, self.theta, self.scaling, self._length),
            )
        cos = angles.cos()
        sin = angles.sin()
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
        if amplitude != 1.0:
            cos *= amplitude
            sin *= amplitude
        return cos, sin

    def forward(self, seq_len: int, positions: Tensor | None = None) -> Rotation:
        """Return the rotation of positions 0 … seq_len - 1, or of `positions`: [batch, seq] int64.

        Where the tables depend on the length of the sequence, `positions` are all of it, or this
        rank's part of it. Raises ValueError if the sequence is longer than the tables.
        """
        if self.varies_above is not None:
            self._fit(seq_len if positions is None else positions.size(-1), self.varies_above)
        if positions is not None:
            return Rotation(self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2))
        if seq_len > self.max_seq_len:
            raise ValueError(
                f"a sequence of {seq_len} tokens is longer than the model's RoPE tables "
                f"({self.max_seq_len}). Build it with max_seq_len of at least {seq_len}"
            )
        return Rotation(self.cos[:seq_len].unsqueeze(1), self.sin[:seq_len].unsqueeze(1))

    @torch.no_grad()
    def _fit(self, count: int, varies_above: int) -> None:
        """Make the tables those of the sequence that a call's `count` positions are of."""
        assert self.scaling is not None
        same = self.scaling.same_frequencies
        length = min(count * self.sharing_ranks, self.max_seq_len)
        if same(length) == same(self._length) and length <= self.cos.size(0):
            return
        rows = self.max_seq_len
        if same(rows) != same(length):
            # The tables end where they are no longer right: a position beyond is an error.
            rows = max(length, min(varies_above, rows))
        self._length = length
        # Others in their place: a backward pass may still need the old ones.
        self.cos = self.cos.new_empty(rows, self.cos.size(1))
        self.sin = self.sin.new_empty(rows, self.sin.size(1))
        self.init_buffers()

    def check_documents(self, row: int) -> None:
        """Raise ValueError where documents, shorter than their row of tokens, have other tables."""
        if self.varies_above is None or row <= self.varies_above:
            return
        assert self.scaling is not None
        raise ValueError(
            f"a row has {row} tokens, and above {self.varies_above} the RoPE tables of "
            f"{self.scaling.kind} depend on the length. Its documents have no common tables"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `model.to(torch.bfloat16)` would round the tables: follow it to another device, not to
        # another dtype.
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            self.cos, self.sin = self.cos.float(), self.sin.float()
            self.init_buffers()
        return self


def rope_frequencies(
    head_dim: int, theta: float, scaling: Scaling | None, length: int = 1
) -> Tensor:
    """Return the radians per position of each rotated pair, [head_dim / 2] fp32: theta ** (-2 i /
    head_dim).

    With `scaling`, its own; length: tokens of the sequence, for those that depend on it. Llama
    3.1's stretches wavelengths longer than original_context / low_freq_factor by `factor`. Those
    shorter than original_context / high_freq_factor stay. Those between are blended linearly in 1 /
    wavelength.
    """
    if scaling is not None and not isinstance(scaling, RopeScaling):
        from titanlite.models.rope_formulas import scaled_frequencies

        return scaled_frequencies(head_dim, theta, scaling, length)
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return plain
    turns_in_context = scaling.original_context / (2 * math.pi / plain)
    keep = (turns_in_context - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    keep = keep.clamp(0.0, 1.0).nan_to_num(0.0)
    return (1.0 - keep) * plain / scaling.factor + keep * plain


def build_rope(args: LlamaArgs) -> nn.Module:
    """Build the tables of a model: a `Rope`, or a `BlockRopes` where blocks differ."""
    kinds = args.rotaries()
    ropes: dict[Rotary, Rope] = {}
    for kind in kinds:
        if kind is not None:
            ropes[kind] = Rope(kind.width, args.max_seq_len, kind.theta, kind.scaling)
    if len(kinds) == len(ropes) == 1:
        return next(iter(ropes.values()))
    from titanlite.models.block_ropes import BlockRopes

    return BlockRopes(ropes, args.max_seq_len)
