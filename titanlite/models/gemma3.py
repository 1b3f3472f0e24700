"""The text models of Gemma 3 (technical report, 2025). No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.models import llama_hf
from titanlite.models.hf_names import entry_of
from titanlite.models.llama import decoder_spec
from titanlite.models.rope_scaling import LinearScaling
from titanlite.models.window_pattern import PatternArgs, one_rope, pattern_of, written_pattern

#: Bases of RoPE in blocks that see all, and in those with a window.
_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0
#: Entries of config.json that are the same for all; null is the same.
_FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


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


def hf_config(args: Gemma3Args) -> dict[str, Any]:
    """Return the content of config.json, the arguments of `transformers.Gemma3TextConfig`."""
    config = llama_hf.hf_config(args, "gemma3_text")
    del config["hidden_act"], config["mlp_bias"]
    own = {
        "architectures": ["Gemma3ForCausalLM"],
        # By default the row of a padding token would not learn.
        "pad_token_id": None,
        "query_pre_attn_scalar": args.query_scalar,
        "rope_local_base_freq": args.local_theta,
        "sliding_window_pattern": args.full_every,
    }
    return {**config, **_FIXED, **written_pattern(args), **own}


def args_from_hf(config: Mapping[str, Any]) -> Gemma3Args:
    """Return the arguments that a config.json describes. Raises ValueError for another model."""
    for name, ours in _FIXED.items():
        if config.get(name) not in (ours, None):
            raise ValueError(f"{name} is {config[name]!r}; a Gemma 3 here has {ours!r}")
    older_local = entry_of(config, "rope_local_base_freq", float, _LOCAL_THETA)
    flat = {"tie_word_embeddings": True, **one_rope(config, _THETA, older_local)}
    own: dict[str, Any] = {
        **pattern_of(config, entry_of(config, "sliding_window_pattern", int, 6)),
        "query_scalar": entry_of(config, "query_pre_attn_scalar", int, 256),
        "head_dim": entry_of(config, "head_dim", int, 256),
        "local_theta": flat["local_theta"],
    }
    return llama_hf.args_from_hf(flat, "gemma3_text", Gemma3Args, **own)


SPEC = decoder_spec("gemma3", FLAVORS, hf_config=hf_config, args_from_hf=args_from_hf)
