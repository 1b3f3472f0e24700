"""A Llama under other names: Hugging Face's weights and config.json, and the order of rows in
Meta's own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from titanlite.models.hf_names import HFName, entry_of
from titanlite.models.hf_words import in_words_of_files
from titanlite.models.llama import LlamaArgs
from titanlite.models.rope_hf import read_scaling, rope_of, written_rope
from titanlite.models.spec import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

#: Names in a block, ours → theirs.
_ATTENTION = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
}
_QK_NORM = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
#: By `norm_placement`.
_NORMS = {
    "before": {
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    },
    "after": {
        "attention_post_norm.weight": "post_attention_layernorm.weight",
        "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
    },
    "around": {
        "attention_norm.weight": "input_layernorm.weight",
        "attention_post_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
    },
}
FEED_FORWARD: Mapping[str, HFName] = {
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
#: Entries of config.json that are the same for all decoders here.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def block_parts(
    args: LlamaArgs, feed_forward: Mapping[str, HFName] = FEED_FORWARD
) -> dict[str, HFName]:
    """Return our parameter name in a block → Hugging Face's. args: of that block.

    feed_forward: those of its feed-forward. Several names for one: it is the stack of their
    tensors.
    """
    qk_norm = _QK_NORM if args.qk_norm else {}
    return {**_ATTENTION, **qk_norm, **feed_forward, **_NORMS[args.norm_placement]}


def hf_names(
    args: LlamaArgs, parts: Callable[[Any], Mapping[str, HFName]] = block_parts
) -> dict[str, Any]:
    """Return our parameter name → Hugging Face's, for every tensor that a file holds (no head if
    tied).

    parts: names in a block, from the arguments of that block.
    """
    _needs_rmsnorm(args)
    names: dict[str, Any] = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
    }
    for block, own in args.blocks().items():
        for ours, theirs in parts(own).items():
            if isinstance(theirs, str):
                names[f"{block}.{ours}"] = f"model.{block}.{theirs}"
            else:
                names[f"{block}.{ours}"] = tuple(f"model.{block}.{name}" for name in theirs)
    if not args.tied:
        names["output.weight"] = "lm_head.weight"
    return names


def permute(weight: Tensor, n_heads: int) -> Tensor:
    """Bring the rows of a q or k weight [n_heads * head_dim, dim] from Meta's layout to ours, head
    by head.

    Meta rotates the pairs (2 i, 2 i + 1), we (i, i + head_dim / 2). Within a head the even rows
    come first.
    """
    heads = weight.unflatten(0, (n_heads, -1, 2))
    return heads.transpose(1, 2).flatten(0, 2)


def hf_config(args: LlamaArgs, model_type: str = "llama") -> dict[str, Any]:
    """Return the content of config.json: the arguments of the model's class in `transformers` 5 and
    4.

    model_type: that of `transformers`, whose class has the same name. A family adds its own
    entries. Raises ValueError for a model that it is not.
    """
    _needs_rmsnorm(args)
    return {
        "model_type": model_type,
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_width,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.n_vocab,
        "rms_norm_eps": args.norm_eps,
        **written_rope(args.rope_scaling, args.rope_theta),
        "max_position_embeddings": args.context,
        "tie_word_embeddings": args.tied,
        **_FIXED,
    }


def args_from_hf(
    config: Mapping[str, Any],
    model_type: str = "llama",
    args_class: type[LlamaArgs] = LlamaArgs,
    **more: Any,
) -> Any:
    """Return the arguments that a config.json of Hugging Face describes, of `transformers` 5 or an
    older one.

    more: arguments of a family that are its own. Raises ValueError for a model that is not of the
    family.
    """
    if config.get("model_type") != model_type:
        raise ValueError(
            f"model_type is {config.get('model_type')!r}, and this family is {model_type!r}"
        )
    for name, ours in _FIXED.items():
        if config.get(name, ours) != ours:
            raise ValueError(f"{name} is {config[name]!r}; the models here have {ours!r}")
    rope = rope_of(config)
    dim = entry_of(config, "hidden_size", int)
    heads = entry_of(config, "num_attention_heads", int)
    scaling = read_scaling(config)
    try:
        args = args_class(
            dim=dim,
            n_layers=entry_of(config, "num_hidden_layers", int),
            n_heads=heads,
            n_kv_heads=entry_of(config, "num_key_value_heads", int, heads),
            ffn_dim=entry_of(config, "intermediate_size", int),
            vocab_size=entry_of(config, "vocab_size", int),
            norm_eps=entry_of(config, "rms_norm_eps", float),
            rope_theta=entry_of(
                rope, "rope_theta", float, entry_of(config, "rope_theta", float, 10000.0)
            ),
            rope_scaling=scaling,
            tied=entry_of(config, "tie_word_embeddings", bool, False),
            max_seq_len=entry_of(config, "max_position_embeddings", int),
            **more,
        )
    except ShapeError as error:
        raise in_words_of_files(error, config) from error
    head_dim = entry_of(config, "head_dim", int, args.head_dim)
    if head_dim != args.head_dim:
        raise ValueError(
            f"head_dim is {head_dim}; here it is hidden_size / num_attention_heads = {dim // heads}"
        )
    return args


def _needs_rmsnorm(args: LlamaArgs) -> None:
    if args.norm_type not in ("rmsnorm", "fused_rmsnorm"):
        raise ValueError(
            f"Hugging Face's Llama has RMSNorm only; this model has norm_type = {args.norm_type!r}"
        )
