"""The modules of Llama 4: attention within chunks, or without rotary positions; experts whose gate
and up are one matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.attention import attend
from titanlite.models.autograd import rms_norm, silu_mul
from titanlite.models.block_ropes import NoRotation
from titanlite.models.experts.grouped import Experts, grouped_mm, local
from titanlite.models.experts.layer import MoE, MoEBlock, MoEDecoder
from titanlite.models.latent_attention import halves
from titanlite.models.layers import Attention, SdpaAttention

if TYPE_CHECKING:
    from titanlite.models.document_attention import DocumentMask
    from titanlite.models.llama4 import Llama4Args
    from titanlite.models.rope import Rotation


class ChunkedAttention(SdpaAttention):
    """`SdpaAttention` within chunks of tokens, counted from the beginning of a document.

    What replaces it minds `chunk`; `window` is how far back a token can see.
    """

    def __init__(self, chunk: int) -> None:
        super().__init__(chunk)
        self.chunk = chunk

    def prepare(self, doc_ids: Tensor | None) -> DocumentMask | None:
        if doc_ids is None:
            return None
        from titanlite.models.document_attention import chunk_mask

        return chunk_mask(doc_ids, self.chunk)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask | None) -> Tensor:
        if mask is not None:
            return mask.attend(q, k, v)
        seq_len = q.size(2)
        if seq_len <= self.chunk:
            return attend(q, k, v)
        last = seq_len - seq_len % self.chunk
        whole = [self._as_rows(heads[:, :, :last]) for heads in (q, k, v)]
        y = attend(whole[0], whole[1], whole[2]).transpose(1, 2)
        y = y.unflatten(0, (q.size(0), -1)).flatten(1, 2).transpose(1, 2)
        if last == seq_len:
            return y
        return torch.cat([y, attend(q[:, :, last:], k[:, :, last:], v[:, :, last:])], 2)

    def _as_rows(self, heads: Tensor) -> Tensor:
        """Return [batch, heads, seq, head_dim] as [batch * chunks, heads, chunk, head_dim]."""
        chunks = heads.transpose(1, 2).unflatten(1, (-1, self.chunk))
        return chunks.flatten(0, 1).transpose(1, 2)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Return x: [..., width], divided by its root mean square, in float32."""
    if x.device.type == "cuda":
        return F.rms_norm(x, x.shape[-1:], None, eps)
    return rms_norm(x, None, eps)


class Llama4Attention(Attention):
    """Attention whose rotated pairs are neighbours, or without rotary positions.

    Weights keep Meta's order; queries and keys are permuted, which leaves scores alone.
    """

    def __init__(self, args: Llama4Args) -> None:
        super().__init__(args)
        self.eps = args.norm_eps
        self.has_rope = args.rotary is not None
        self.unit_qk = args.unit_qk
        self.temperature = args.temperature
        self.floor = args.temperature_floor
        if args.chunk:
            self.inner_attention = ChunkedAttention(args.chunk)

    def forward(
        self, x: Tensor, rotation: Rotation | NoRotation, mask: DocumentMask | None
    ) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        # Under tensor parallelism a rank holds some of the heads.
        heads = (-1, self.head_dim)
        q = self.wq(x).unflatten(2, heads)
        k = self.wk(x).unflatten(2, heads)
        v = self.wv(x).unflatten(2, heads)
        if self.has_rope:
            q = self._rotated(q, rotation)
            k = self._rotated(k, rotation)
        elif self.temperature:
            assert isinstance(rotation, NoRotation)
            positions = rotation.positions
            if positions is None:
                positions = torch.arange(q.size(1), device=q.device).unsqueeze(0)
            passed = torch.floor((positions.float() + 1.0) / self.floor)
            q = (q * (passed.log1p() * self.temperature + 1.0)[..., None, None]).to(q.dtype)
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(y.transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor, rotation: Rotation | NoRotation) -> Tensor:
        """Rotate x: [batch, seq, heads, head_dim], and normalise it."""
        rotated = rotation(halves(x, interleaved=True))
        return unit_norm(rotated, self.eps) if self.unit_qk else rotated


class Llama4Experts(Experts):
    """SwiGLU experts in the layout of Hugging Face: gate, then up."""

    def add_parameters(self, n_experts: int, dim: int, width: int) -> None:
        self.gate_up = nn.Parameter(torch.empty(n_experts, dim, 2 * width))
        self.down = nn.Parameter(torch.empty(n_experts, width, dim))

    def products(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = grouped_mm(x, local(self.gate_up), ends).chunk(2, -1)
        return grouped_mm(silu_mul(gate, up), local(self.down), ends)


class Llama4MoE(MoE):
    """An MoE layer with a shared expert."""

    experts_class = Llama4Experts


class Llama4Block(MoEBlock):
    """A block of Llama 4."""

    attention_class = Llama4Attention
    moe_class = Llama4MoE


class Llama4(MoEDecoder):
    """The decoder of family llama4."""

    block_class = Llama4Block
