"""The text models of Gemma 3 (technical report, 2025). No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.models.hf_names import entry_of
from titanlite.models.llama import decoder_spec
from titanlite.models.llama_hf import ENTRIES, NAMES, NO_PADDING, Entry, HFTable
from titanlite.models.rope_scaling import LinearScaling
from titanlite.models.window_pattern import PATTERN_ENTRIES, PatternArgs, full_every, one_rope

#: Bases of RoPE in blocks that see all, and in those with a window.
_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0


@dataclass(frozen=True)
class Gemma3Args(PatternArgs):
    """Arguments of Gemma 3's decoder."""

    window: int | None = 1024
    full_every: int = 6
    #: Width of a head; it does not depend on `dim`.
    head_dim: int = 256
    #: Scores are divided by its root; `query_pre_attn_scalar` of config.json.
    query_scalar: int = 256
    local_theta: float = _LOCAL_THETA
    # No fields: these are the same for all.
    qk_norm = True
    norm_placement = "around"
    norm_offset = True
    activation = "gelu_tanh"

    @property
    def query_scale(self) -> float:
        return math.sqrt(self.head_dim / self.query_scalar)

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.dim)

    @property
    def published_context(self) -> int:
        return 32768 if self.rope_scaling is None else 131072


def _gemma3(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **rest: Any) -> Gemma3Args:
    shape = {"vocab_size": 262208, "norm_eps": 1e-6, "rope_theta": _THETA, "tied": True}
    return Gemma3Args(dim, n_layers, n_heads, ffn_dim=ffn_dim, **{**shape, **rest})


_SMALL: dict[str, Any] = {"n_kv_heads": 1, "vocab_size": 262144, "window": 512}
_LONG: dict[str, Any] = {"rope_scaling": LinearScaling(factor=8.0)}
FLAVORS = {
    "debugmodel": _gemma3(
        256, 8, 4, 1024, n_kv_heads=2, head_dim=64, query_scalar=64, vocab_size=None, window=64
    ),
    "270M": _gemma3(640, 18, 4, 2048, **_SMALL),
    "1B": _gemma3(1152, 26, 4, 6912, **_SMALL),
    "4B": _gemma3(2560, 34, 8, 10240, n_kv_heads=4, **_LONG),
    "12B": _gemma3(3840, 48, 16, 15360, n_kv_heads=8, **_LONG),
    "27B": _gemma3(5376, 62, 32, 21504, n_kv_heads=16, head_dim=128, query_scalar=168, **_LONG),
}


HF = HFTable(
    "gemma3_text",
    Gemma3Args,
    {
        **{
            name: entry for name, entry in ENTRIES.items() if name not in ("hidden_act", "mlp_bias")
        },
        "head_dim": Entry("head_dim", 256),
        "tie_word_embeddings": Entry("tied", True, null=False),
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        **PATTERN_ENTRIES,
        **NO_PADDING,
        "query_pre_attn_scalar": Entry("query_scalar", 256),
        "rope_local_base_freq": Entry("local_theta", only="written"),
        "sliding_window_pattern": Entry("full_every", only="written"),
    },
    {**NAMES, "ffn_norm.weight": "pre_feedforward_layernorm.weight"},
    "Gemma3ForCausalLM",
)


def args_from_hf(config: Mapping[str, Any]) -> Gemma3Args:
    """Return the arguments of a config.json. Raises ValueError for another model."""
    older_local = entry_of(config, "rope_local_base_freq", float, _LOCAL_THETA)
    flat = one_rope(config, _THETA, older_local)
    if flat.get("hidden_activation") is None:
        flat.pop("hidden_activation", None)
    every = full_every(config, entry_of(config, "sliding_window_pattern", int, 6))
    args: Gemma3Args = HF.args_from_hf(flat, local_theta=flat["local_theta"], full_every=every)
    return args


SPEC = decoder_spec("gemma3", FLAVORS, HF, args_from_hf=args_from_hf)
