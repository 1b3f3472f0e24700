"""DeepSeek-V3 and V2 under Hugging Face's names: weights and config.json. No torch here.

`transformers` has two classes: one scores experts by a sigmoid (V3), the other by a softmax (V2).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from titanlite.models import llama_hf
from titanlite.models.deepseek_args import LATENT_NORM_EPS, DeepSeekV3Args
from titanlite.models.experts.hf_names import feed_forward_names
from titanlite.models.hf_names import HFName, entry_of

#: Names in a block, ours → theirs.
_ATTENTION = {
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_V3 = "deepseek_v3"
_V2 = "deepseek_v2"
#: Names of the choices in V2: of all experts, and by groups of which the best expert counts.
_PLAIN = "greedy"
_BY_GROUPS = "group_limited_greedy"
#: Name of the choice with biases of experts, by groups of which the best two experts count.
_WITH_BIASES = "noaux_tc"
#: Entries without which `transformers` takes these numbers, by `model_type`.
_DEFAULTS: dict[str, dict[str, Any]] = {
    _V3: {
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
    _V2: {
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
}


def hf_names(args: DeepSeekV3Args) -> dict[str, Any]:
    """Return our parameter name → Hugging Face's; a stack of experts → the names of its
    matrices.
    """
    return llama_hf.hf_names(args, _block_names)


def _block_names(args: DeepSeekV3Args) -> dict[str, HFName]:
    """Return the names in a block. args: of that block."""
    ours = (*args.attention_linears(), *args.attention_extras(), *args.block_norms())
    found: dict[str, HFName] = {}
    for name in ours:
        found[f"{name}.weight"] = f"{_ATTENTION[name]}.weight"
    return {**found, **feed_forward_names(args)}


def hf_config(args: DeepSeekV3Args) -> dict[str, Any]:
    """Return the content of config.json. `transformers` has no z-loss.

    Raises ValueError for a router that has no name there, and for epsilons of norms that it does
    not have.
    """
    _check_epsilons(args)
    is_v3 = args.score == "sigmoid"
    config = llama_hf.hf_config(args, _V3 if is_v3 else _V2)
    # It is that of the rotated part, and the published files do not have it.
    del config["head_dim"]
    return config | {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "q_lora_rank": args.q_lora_rank or None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "n_routed_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "moe_intermediate_size": args.expert_width,
        "n_shared_experts": args.n_shared_experts,
        "first_k_dense_replace": args.n_dense_layers,
        "moe_layer_freq": 1,
        "scoring_func": args.score,
        "topk_method": _method(args),
        "norm_topk_prob": args.norm_topk,
        "routed_scaling_factor": args.route_scale,
        "n_group": args.n_groups,
        "topk_group": args.top_groups,
        **(
            {"rope_interleave": args.rope_interleave}
            if is_v3
            else {"aux_loss_alpha": args.aux_loss}
        ),
        # No blocks that predict further tokens.
        "num_nextn_predict_layers": 0,
    }


def why_not(args: DeepSeekV3Args, key: str) -> str:
    """Return why weights cannot be written for `transformers`, see `ModelSpec.why_not`."""
    if key != "checkpoint.last_save_in_hf" or args.score == "sigmoid" or not args.expert_bias:
        return ""
    return (
        "DeepSeek-V2 in `transformers` has no biases of experts: train with "
        'model.overrides.bias_update = 0, or model.overrides.score = "sigmoid"'
    )


def _check_epsilons(args: DeepSeekV3Args) -> None:
    if args.latent_norm_eps != LATENT_NORM_EPS:
        raise ValueError(
            f"latent_norm_eps is {args.latent_norm_eps}, and DeepSeek in `transformers` has "
            f"{LATENT_NORM_EPS} for norms on latents: train with "
            f"model.overrides.latent_norm_eps = {LATENT_NORM_EPS}"
        )
    if args.last_eps != args.norm_eps:
        raise ValueError(
            f"last_norm_eps is {args.last_eps}, and DeepSeek in `transformers` has that of the "
            f"blocks for its last norm: train with model.overrides.last_norm_eps = {args.norm_eps}"
        )


def _method(args: DeepSeekV3Args) -> str:
    """Return `topk_method`. Raises ValueError for a router that has no name."""
    is_grouped = args.n_groups > 1
    if args.expert_bias:
        if is_grouped and args.group_best != 2:
            raise ValueError(
                f"group_best is {args.group_best}, and DeepSeek-V3 in `transformers` takes the "
                "best two experts of a group: train with model.overrides.group_best = 2"
            )
        return _WITH_BIASES
    if args.norm_topk:
        raise ValueError(
            "norm_topk is true, and DeepSeek-V2 in `transformers` does not divide softmax scores "
            "by their sum"
        )
    if is_grouped and args.group_best != 1:
        raise ValueError(
            f"group_best is {args.group_best}, and DeepSeek-V2 in `transformers` takes the best "
            "expert of a group: train with model.overrides.group_best = 1"
        )
    return _BY_GROUPS if is_grouped else _PLAIN


def args_from_hf(config: Mapping[str, Any]) -> DeepSeekV3Args:
    """Return the arguments that a config.json describes.

    Raises ValueError for another model, or for a router that is not the same here.
    """
    kind = _V2 if config.get("model_type") == _V2 else _V3
    is_v3 = kind == _V3
    known = {**_DEFAULTS[kind], **config}
    score = "sigmoid" if is_v3 else "softmax"
    _check_router(known, score)
    has_biases = is_v3 or known.get("topk_method") == _WITH_BIASES
    is_plain = known["q_lora_rank"] is None
    # `transformers` does not read it: it is the width of the rotated part.
    others = {name: value for name, value in known.items() if name != "head_dim"}
    return llama_hf.args_from_hf(
        others,
        kind,
        DeepSeekV3Args,
        q_lora_rank=0 if is_plain else entry_of(known, "q_lora_rank", int),
        kv_lora_rank=entry_of(known, "kv_lora_rank", int, 512),
        qk_nope_head_dim=entry_of(known, "qk_nope_head_dim", int, 128),
        qk_rope_head_dim=entry_of(known, "qk_rope_head_dim", int, 64),
        v_head_dim=entry_of(known, "v_head_dim", int, 128),
        rope_interleave=_is_on(known, "rope_interleave", True),
        n_experts=entry_of(known, "n_routed_experts", int),
        top_k=entry_of(known, "num_experts_per_tok", int),
        expert_width=entry_of(known, "moe_intermediate_size", int),
        n_shared_experts=entry_of(known, "n_shared_experts", int),
        n_dense_layers=entry_of(known, "first_k_dense_replace", int),
        score=score,
        norm_topk=_is_on(known, "norm_topk_prob", is_v3),
        route_scale=entry_of(known, "routed_scaling_factor", float),
        **_groups_of(known, is_v3),
        bias_update=0.001 if has_biases else 0.0,
        aux_loss=0.0 if is_v3 else entry_of(known, "aux_loss_alpha", float, 0.0),
    )


def _is_on(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a switch; null is off, as in `transformers`. default: for a file without it."""
    if name in config and config[name] is None:
        return False
    return bool(entry_of(config, name, bool, default))


def _groups_of(config: Mapping[str, Any], is_v3: bool) -> dict[str, int]:
    """Return the arguments of the choice by groups. config: with the defaults."""
    method = _WITH_BIASES if is_v3 else entry_of(config, "topk_method", str, _PLAIN)
    # Its files may name groups all the same, and `transformers` does not heed them.
    if method == _PLAIN:
        return {}
    groups = entry_of(config, "n_group", int, 1)
    found = {"n_groups": groups, "top_groups": entry_of(config, "topk_group", int, 1)}
    if method == _BY_GROUPS and groups > 1:
        found["group_best"] = 1
    return found


def _check_router(config: Mapping[str, Any], score: str) -> None:
    """Raise ValueError for a router that is not the same here. config: with the defaults."""
    given = entry_of(config, "scoring_func", str, score)
    if given != score:
        kind = config.get("model_type")
        raise ValueError(f"scoring_func is {given!r}; `transformers` has {score!r} for {kind}")
    if entry_of(config, "moe_layer_freq", int, 1) != 1:
        raise ValueError("moe_layer_freq is not 1; all blocks after the dense ones have experts")
    if score == "sigmoid":
        return
    method = entry_of(config, "topk_method", str, _PLAIN)
    known = (_PLAIN, _BY_GROUPS, _WITH_BIASES)
    if method not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"topk_method is {method!r}, and it must be one of {names}")
    if entry_of(config, "norm_topk_prob", bool, False) and method != _WITH_BIASES:
        raise ValueError("norm_topk_prob is true; `transformers` does not heed it in deepseek_v2")


#: A tensor that only a block for further tokens has.
_FURTHER = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
_REASON = "it predicts further tokens (multi-token prediction), which is not trained here"


def left_out(names: Collection[str]) -> dict[str, str]:
    """Return the names of tensors in blocks that predict further tokens → why they are left out."""
    blocks = set()
    for name in names:
        match = _FURTHER.fullmatch(name)
        if match is not None:
            blocks.add(match[1])
    return {name: _REASON for name in names if name.startswith(tuple(blocks))}
