"""OLMo 3 (2025): OLMo 2's decoder with windows in three of four blocks. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.models.llama import decoder_spec
from titanlite.models.llama_hf import ENTRIES, NAMES, NO_PADDING, HFTable
from titanlite.models.olmo2 import Olmo2Args
from titanlite.models.rope_scaling import YarnScaling
from titanlite.models.window_pattern import PATTERN_ENTRIES, PatternArgs, full_every, one_rope

_THETA = 500000.0


@dataclass(frozen=True)
class Olmo3Args(PatternArgs, Olmo2Args):
    """Arguments of OLMo 3's decoder."""

    @property
    def published_context(self) -> int:
        return 8192 if self.rope_scaling is None else 65536


def _olmo3(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **rest: Any) -> Olmo3Args:
    shape = {"vocab_size": 100278, "norm_eps": 1e-6, "rope_theta": _THETA}
    return Olmo3Args(dim, n_layers, n_heads, ffn_dim=ffn_dim, **{**shape, **rest})


#: Scaling of published models, whose last phase of training made the context eight times as long.
_LONG = YarnScaling(factor=8.0, original_max_position_embeddings=8192)
FLAVORS = {
    # Two blocks that see all, and a window shorter than the sequences of its config.
    "debugmodel": _olmo3(256, 8, 8, 768, n_kv_heads=4, vocab_size=None, window=64),
    "7B": _olmo3(4096, 32, 32, 11008, rope_scaling=_LONG),
    "32B": _olmo3(5120, 64, 40, 27648, n_kv_heads=8, rope_scaling=_LONG),
}


HF = HFTable("olmo3", Olmo3Args, {**ENTRIES, **PATTERN_ENTRIES, **NO_PADDING}, NAMES)


def args_from_hf(config: Mapping[str, Any]) -> Olmo3Args:
    """Return a config.json's arguments. Raises ValueError for another model or two RoPE bases."""
    # Without a table for it, `transformers` 5 takes its default where there are windows.
    flat = one_rope(config, _THETA, _THETA)
    theta = flat["rope_parameters"]["rope_theta"]
    if flat["local_theta"] != theta:
        raise ValueError(
            f"rope_theta is {theta} in layers without a window and {flat['local_theta']} in the "
            "others; an OLMo 3 here has one"
        )
    args: Olmo3Args = HF.args_from_hf(flat, full_every=full_every(config, 4))
    return args


SPEC = decoder_spec("olmo3", FLAVORS, HF, args_from_hf=args_from_hf)
