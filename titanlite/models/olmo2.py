"""OLMo 2 (2 OLMo 2 Furious, 2024): Llama's decoder with norms after attention and feed-forward, and
QK norm over whole projections. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.models.llama import LlamaArgs, decoder_spec
from titanlite.models.llama_hf import ENTRIES, NAMES, NO_PADDING, HFTable


@dataclass(frozen=True)
class Olmo2Args(LlamaArgs):
    """Arguments of OLMo 2's decoder."""

    qk_norm = True
    qk_norm_whole = True
    norm_placement = "after"

    @property
    def published_context(self) -> int:
        return 4096


def _olmo2(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **rest: Any) -> Olmo2Args:
    shape = {"vocab_size": 100352, "norm_eps": 1e-6, "rope_theta": 5e5}
    return Olmo2Args(dim, n_layers, n_heads, ffn_dim=ffn_dim, **{**shape, **rest})


FLAVORS = {
    "debugmodel": _olmo2(256, 8, 8, 768, n_kv_heads=4, vocab_size=None),
    "1B": _olmo2(2048, 16, 16, 8192),
    "7B": _olmo2(4096, 32, 32, 11008),
    "13B": _olmo2(5120, 40, 40, 13824),
    "32B": _olmo2(5120, 64, 40, 27648, n_kv_heads=8),
}


HF = HFTable("olmo2", Olmo2Args, {**ENTRIES, **NO_PADDING}, NAMES)
SPEC = decoder_spec("olmo2", FLAVORS, HF)
