"""OLMo 2 (2 OLMo 2 Furious, 2024): Llama's decoder with norms after attention and feed-forward, and
QK norm over whole projections. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.models import llama_hf
from titanlite.models.llama import LlamaArgs, decoder_spec


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


def hf_config(args: Olmo2Args) -> dict[str, Any]:
    """Return the content of config.json, the arguments of `transformers.Olmo2Config`."""
    # By default the row of a padding token would not learn.
    return {**llama_hf.hf_config(args, "olmo2"), "pad_token_id": None}


def args_from_hf(config: Mapping[str, Any]) -> Olmo2Args:
    """Return the arguments that a config.json describes. Raises ValueError for another model."""
    return llama_hf.args_from_hf(config, "olmo2", Olmo2Args)


SPEC = decoder_spec("olmo2", FLAVORS, hf_config=hf_config, args_from_hf=args_from_hf)
