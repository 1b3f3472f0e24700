"""Norms that only some families have: over whole projections, with weights stored less one, or
scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from titanlite.models.autograd import RMSNorm, rms_norm

if TYPE_CHECKING:
    from titanlite.models.llama import LlamaArgs


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose factor is (1 + weight) * scale (Gemma).

    One autograd node, factors in float32: in bfloat16, 1 + weight would lose most of a small
    weight.
    """

    def __init__(self, width: int, eps: float, scale: float = 1.0) -> None:
        super().__init__(width, eps=eps)
        self.scale = scale

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width]; same shape and dtype back."""
        factor = 1.0 + self.weight.float()
        if self.scale != 1.0:
            factor = factor * self.scale
        return rms_norm(x, factor, self.eps)


class WholeNorm(RMSNorm):
    """RMSNorm of q or k over all heads together (OLMo 2)."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., heads, head_dim]."""
        return super().forward(x.flatten(-2)).view_as(x)


def qk_norms(args: LlamaArgs) -> tuple[nn.Module, nn.Module]:
    """Build the norms of q and k before rotation (Henry et al. 2020)."""
    q_width, k_width = args.attention_extras().values()
    kind = WholeNorm if args.qk_norm_whole else RMSNorm
    if args.norm_offset:
        q_norm = OffsetRMSNorm(q_width, args.norm_eps, args.query_scale)
        return q_norm, OffsetRMSNorm(k_width, args.norm_eps)
    return kind(q_width, eps=args.norm_eps), kind(k_width, eps=args.norm_eps)
