"""Multi-head latent attention (MLA; DeepSeek-V2, 2024, section 2.1).

Keys and values of all heads are products of one narrow vector per token, the latent. A head's
query and key have a part without positions, and a part that is rotated. The rotated part of the key
is one for all heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.autograd import RMSNorm
from titanlite.models.deepseek_v3 import DeepSeekV3Args
from titanlite.models.experts.layer import MoEBlock, MoEDecoder
from titanlite.models.layers import SdpaAttention, build_norm
from titanlite.models.rope import Rotation

if TYPE_CHECKING:
    from titanlite.models.document_attention import DocumentMask


class RotatedKey(nn.Module):
    """The rotated part of the key, which all heads share.

    It has no weights; tensor parallelism makes its input whole here. interleaved: rotated pairs are
    neighbours, (2 i, 2 i + 1); else (i, i + rope_dim / 2).
    """

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved

    def forward(self, key: Tensor, rotation: Rotation) -> Tensor:
        """key: [batch, seq, rope_dim] → [batch, seq, 1, rope_dim]."""
        return rotation(halves(key.unsqueeze(2), self.interleaved))


class LatentAttention(nn.Module):
    """Attention whose keys and values come from a latent of `kv_lora_rank` numbers per token.

    Weights keep DeepSeek's order; queries and keys are permuted, which leaves scores alone.
    """

    def __init__(self, args: DeepSeekV3Args) -> None:
        super().__init__()
        self.nope_dim = args.qk_nope_head_dim
        self.rope_dim = args.qk_rope_head_dim
        self.v_dim = args.v_head_dim
        self.kv_lora_rank = args.kv_lora_rank
        self.interleaved = args.rope_interleave
        self.score_factor = args.score_factor
        queries = args.n_heads * args.qk_head_dim
        self.wq: nn.Linear | None = None
        if args.q_lora_rank:
            self.wq_a = nn.Linear(args.dim, args.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(args.q_lora_rank, eps=args.latent_norm_eps)
            self.wq_b = nn.Linear(args.q_lora_rank, queries, bias=False)
        else:
            self.wq = nn.Linear(args.dim, queries, bias=False)
        self.wkv_a = nn.Linear(args.dim, args.kv_lora_rank + args.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(args.kv_lora_rank, eps=args.latent_norm_eps)
        expanded = args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
        self.wkv_b = nn.Linear(args.kv_lora_rank, expanded, bias=False)
        self.rotated_key = RotatedKey(args.rope_interleave)
        self.wo = nn.Linear(args.n_heads * args.v_head_dim, args.dim, bias=False)
        self.inner_attention = SdpaAttention(args.window)

    def forward(self, x: Tensor, rotation: Rotation, mask: DocumentMask | None) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        q = self._queries(x, rotation)
        k, v = self._keys_and_values(x, rotation)
        # Flash kernels, and attention of variable lengths, take values as wide as queries only.
        # The zeros add nothing, and their results are cut off.
        v = F.pad(v, (0, q.size(-1) - self.v_dim))
        y = self.inner_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(y.transpose(1, 2)[..., : self.v_dim].flatten(2))

    def _queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return rotated and scaled queries: [batch, seq, heads, nope_dim + rope_dim]."""
        q = self.wq_b(self.q_norm(self.wq_a(x))) if self.wq is None else self.wq(x)
        q = q.unflatten(2, (-1, self.nope_dim + self.rope_dim))
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        q = torch.cat((q_nope, rotation(halves(q_rope, self.interleaved))), dim=-1)
        # Here, since what replaces `inner_attention` divides scores by the root of the width alone.
        return q if self.score_factor == 1.0 else q * self.score_factor

    def _keys_and_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys [batch, seq, heads, nope_dim + rope_dim] and values [..., v_dim]."""
        latent, shared_key = self.wkv_a(x).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        k_rope = self.rotated_key(shared_key, rotation)
        expanded = self.wkv_b(self.kv_norm(latent))
        # Under tensor parallelism a rank holds some of the heads.
        expanded = expanded.unflatten(2, (-1, self.nope_dim + self.v_dim))
        k_nope, v = expanded.split([self.nope_dim, self.v_dim], dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.size(2), -1)), dim=-1)
        return k, v


def halves(x: Tensor, interleaved: bool) -> Tensor:
    """Return x [..., width] with rotated pairs at (i, i + width / 2)."""
    if not interleaved:
        return x
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class DeepSeekV3Block(MoEBlock):
    """A block with latent attention, and an MoE layer or a dense feed-forward."""

    attention_class = LatentAttention


class DeepSeekV3(MoEDecoder):
    """The decoder of family deepseek_v3."""

    block_class = DeepSeekV3Block

    def __init__(self, args: DeepSeekV3Args) -> None:
        super().__init__(args)
        self.norm = build_norm(replace(args, norm_eps=args.last_eps))
