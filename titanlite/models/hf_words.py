"""What is wrong with a model's arguments, in the words of config.json. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from titanlite.models.spec import ShapeError

#: Our argument → its entry of config.json; of several names the first one that a file has.
_ENTRIES: dict[str, tuple[str, ...]] = {
    "dim": ("hidden_size",),
    "n_layers": ("num_hidden_layers",),
    "n_heads": ("num_attention_heads",),
    "n_kv_heads": ("num_key_value_heads",),
    "kv_heads": ("num_key_value_heads",),
    "ffn_dim": ("intermediate_size_mlp", "intermediate_size"),
    "norm_eps": ("rms_norm_eps",),
    "max_seq_len": ("max_position_embeddings",),
    "window": ("sliding_window",),
    "query_scalar": ("query_pre_attn_scalar",),
    "n_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_width": ("moe_intermediate_size", "intermediate_size"),
    "n_dense_layers": ("first_k_dense_replace",),
    "n_groups": ("n_group",),
    "top_groups": ("topk_group",),
    "route_scale": ("routed_scaling_factor",),
    "aux_loss": ("aux_loss_alpha", "router_aux_loss_coef"),
    "sparse_step": ("interleave_moe_layer_step", "decoder_sparse_step"),
    "dense_blocks": ("mlp_only_layers",),
    "temperature": ("attn_scale",),
    "temperature_floor": ("floor_scale",),
}
_WORD = re.compile(r"\w+")


def in_words_of_files(error: ShapeError, config: Mapping[str, Any]) -> ValueError:
    """Return the error with the names of entries that `config`, a config.json, has."""

    def entry(word: re.Match[str]) -> str:
        names = _ENTRIES.get(word[0], (word[0],))
        for name in names:
            if name in config:
                return name
        return names[-1]

    return ValueError("; ".join(_WORD.sub(entry, problem.message) for problem in error.problems))
