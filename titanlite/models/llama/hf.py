"""A Llama's weights under other names: Hugging Face's, and Meta's own files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titanlite.models.llama.plan import block_names
from titanlite.models.shapes import LlamaArgs

_BLOCK_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

#: Values that older exports carry and that follow from the config.
_DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq|rope\.freqs)")


def hf_names(args: LlamaArgs) -> dict[str, str]:
    """Our parameter name → Hugging Face's, for every tensor that a file of this model holds (no head if tied)."""
    _needs_rmsnorm(args)
    names = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    for block in block_names(args):
        for ours, theirs in _BLOCK_MODULES.items():
            names[f"{block}.{ours}.weight"] = f"model.{block}.{theirs}.weight"
    if not args.tied:
        names["output.weight"] = "lm_head.weight"
    return names


def to_hf(state: Mapping[str, Tensor], args: LlamaArgs) -> dict[str, Tensor]:
    """A full state dictionary under Hugging Face's names; the tensors are shared, not copied.

    Raises ValueError if a parameter is missing or unknown.
    """
    names = hf_names(args)
    _compare(set(names), set(state) - ({"output.weight"} if args.tied else set()))
    return {theirs: state[ours] for ours, theirs in names.items()}


def from_hf(state: Mapping[str, Tensor], args: LlamaArgs) -> dict[str, Tensor]:
    """The inverse of `to_hf`; a tied head is the embedding's tensor itself.

    Raises ValueError if a parameter is missing or unknown, or if a file of a tied model holds a head of its own.
    """
    names = {theirs: ours for ours, theirs in hf_names(args).items()}
    return _adopt(state, names, args, head="lm_head.weight", embedding="model.embed_tokens.weight")


def from_meta(state: Mapping[str, Tensor], args: LlamaArgs) -> dict[str, Tensor]:
    """The state dictionary of Meta's own checkpoint file: our names, but q and k in the interleaved layout."""
    names = {ours: ours for ours in hf_names(args)}
    ours = _adopt(state, names, args, head="output.weight", embedding="tok_embeddings.weight")
    for block in block_names(args):
        for linear, n_heads in (("wq", args.n_heads), ("wk", args.kv_heads)):
            name = f"{block}.attention.{linear}.weight"
            ours[name] = permute(ours[name], n_heads)
    return ours


def permute(weight: Tensor, n_heads: int) -> Tensor:
    """q or k weight [n_heads * head_dim, dim]: rows of each head from Meta's layout to ours.

    Meta rotates the pairs (2 i, 2 i + 1), we (i, i + head_dim / 2): within a head the even rows come first.
    """
    heads = weight.unflatten(0, (n_heads, -1, 2))
    return heads.transpose(1, 2).flatten(0, 2)


def unpermute(weight: Tensor, n_heads: int) -> Tensor:
    """The inverse of `permute`."""
    heads = weight.unflatten(0, (n_heads, 2, -1))
    return heads.transpose(1, 2).flatten(0, 2)


def hf_config(args: LlamaArgs) -> dict[str, Any]:
    """Keyword arguments of `transformers.LlamaConfig` (5.x: RoPE under `rope_parameters`), also its config.json."""
    _needs_rmsnorm(args)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_context,
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_width,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.n_vocab,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": args.max_seq_len,
        "tie_word_embeddings": args.tied,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _adopt(
    state: Mapping[str, Tensor], names: Mapping[str, str], args: LlamaArgs, *, head: str, embedding: str
) -> dict[str, Tensor]:
    given = {name for name in state if not _DERIVED.fullmatch(name)}
    _compare(set(names), given - ({head} if args.tied else set()))
    ours = {names[name]: state[name] for name in names}
    if args.tied:
        if head in given and not torch.equal(state[head], state[embedding]):
            raise ValueError(f"{head} differs from {embedding}, but the model's head is tied to its embedding")
        ours["output.weight"] = ours["tok_embeddings.weight"]
    return ours


def _compare(wanted: set[str], given: set[str]) -> None:
    if wanted == given:
        return
    missing, unknown = sorted(wanted - given), sorted(given - wanted)
    parts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    raise ValueError(f"these weights are not of this model: {' and '.join(parts)}")


def _needs_rmsnorm(args: LlamaArgs) -> None:
    if args.norm_type not in ("rmsnorm", "fused_rmsnorm"):
        raise ValueError(f"Hugging Face's Llama has RMSNorm only; this model has norm_type = {args.norm_type!r}")
