"""Llama 4's text models under Hugging Face's names: weights and config.json. No torch here.

Published files are of models that read images, too. Their text part is read, and written alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from titanlite.models import llama_hf
from titanlite.models.hf_names import HFName, entry_of, texts_of
from titanlite.models.llama4_args import PART_OF, Llama4Args

_TEXT = "llama4_text"
#: Kinds of attention: within chunks, and of all.
_CHUNKED = "chunked_attention"
_FULL = "full_attention"
#: Entry without which `transformers` takes this chunk.
_CHUNK = 8192
#: Of a file that somebody else wrote; lists of layers are made of it.
_MOST_LAYERS = 10000
#: What the names of tensors that read images begin with.
_OF_IMAGES = ("vision_model.", "multi_modal_projector.")
_REASON = "they read images, and the text model alone is trained here"
#: Ours → theirs, of one SwiGLU.
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def left_out(names: Collection[str]) -> dict[str, str]:
    """Return the names of tensors that read images → why they are left out."""
    return {name: _REASON for name in names if name.startswith(_OF_IMAGES)}


def hf_names(args: Llama4Args) -> dict[str, Any]:
    """Return our parameter name → Hugging Face's."""
    _check_router(args)
    return llama_hf.hf_names(
        args, lambda block: llama_hf.block_parts(block, _feed_forward_names(block))
    )


def _feed_forward_names(block: Llama4Args) -> dict[str, HFName]:
    """Return the names in a block, of its feed-forward. block: arguments of that block."""
    ours = "feed_forward.shared" if block.n_experts else "feed_forward"
    theirs = "feed_forward.shared_expert" if block.n_experts else "feed_forward"
    names: dict[str, HFName] = {}
    for one, other in _MATRICES.items():
        names[f"{ours}.{one}.weight"] = f"{theirs}.{other}.weight"
    if block.n_experts:
        names["feed_forward.gate.weight"] = "feed_forward.router.weight"
        names["feed_forward.experts.gate_up"] = "feed_forward.experts.gate_up_proj"
        names["feed_forward.experts.down"] = "feed_forward.experts.down_proj"
    return names


def _check_router(args: Llama4Args) -> None:
    """Raise ValueError for a router that has no form in `transformers`."""
    if args.expert_bias:
        raise ValueError(
            f"bias_update is {args.bias_update}, and Llama 4 in `transformers` has no biases of "
            "experts"
        )
    if args.score != "sigmoid":
        raise ValueError(f"score is {args.score!r}, and Llama 4 in `transformers` has 'sigmoid'")


def _no_rope_layers(args: Llama4Args) -> list[int]:
    """Return for each block 1 if it has rotary positions, else 0, as `transformers` writes it."""
    blocks = [args.of_block(index) for index in range(args.n_layers)]
    return [int(block.rotary is not None) for block in blocks]


def hf_config(args: Llama4Args) -> dict[str, Any]:
    """Return the content of config.json, the arguments of `transformers.Llama4TextConfig`. It has
    no losses of the router.

    Raises ValueError for a router that has no form there.
    """
    _check_router(args)
    config = llama_hf.hf_config(args, _TEXT)
    del config["mlp_bias"]
    has_rope = _no_rope_layers(args)
    kinds = [_CHUNKED if rotates and args.chunk else _FULL for rotates in has_rope]
    if args.nope_every:
        config["no_rope_layer_interval"] = args.nope_every
    return config | {
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size": args.expert_width,
        "intermediate_size_mlp": args.ffn_width,
        "num_local_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "interleave_moe_layer_step": args.sparse_step,
        "no_rope_layers": has_rope,
        # `transformers` wants a number, also where no layer has chunks.
        "attention_chunk_size": args.chunk or _CHUNK,
        "layer_types": kinds,
        "use_qk_norm": args.unit_qk,
        "attn_temperature_tuning": bool(args.temperature),
        "attn_scale": args.temperature or Llama4Args.temperature,
        "floor_scale": args.temperature_floor,
        "router_aux_loss_coef": args.aux_loss,
        "output_router_logits": False,
        # By default the row of a padding token would not learn.
        "pad_token_id": None,
    }


def args_from_hf(config: Mapping[str, Any]) -> Llama4Args:
    """Return the arguments that a config.json describes: of a text model, or of the text part of
    one with images.

    Raises ValueError for another model, or one that this family does not do.
    """
    if config.get("model_type") == PART_OF:
        config = {"model_type": _TEXT, **entry_of(config, "text_config", dict)}
    layers = entry_of(config, "num_hidden_layers", int, 48)
    if not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}, expected 1 to {_MOST_LAYERS}")
    step = entry_of(config, "interleave_moe_layer_step", int, 1)
    if step < 1:
        raise ValueError(f"interleave_moe_layer_step is {step}, expected a positive integer")
    _check_moe_layers(config, layers, step)
    has_rope = _read_rope(config, layers)
    every = _nope_every(config, has_rope)
    tunes = _is_on(config, "attn_temperature_tuning")
    # Without the entries `transformers` takes its defaults.
    plain = {"rope_theta": 500000.0, "head_dim": 128, **config}
    plain["intermediate_size"] = entry_of(config, "intermediate_size_mlp", int, 16384)
    args: Llama4Args = llama_hf.args_from_hf(
        plain,
        _TEXT,
        Llama4Args,
        n_experts=entry_of(config, "num_local_experts", int, 16),
        top_k=entry_of(config, "num_experts_per_tok", int, 1),
        expert_width=entry_of(config, "intermediate_size", int, 8192),
        sparse_step=step,
        nope_every=every,
        chunk=_read_chunk(config, has_rope),
        unit_qk=_is_on(config, "use_qk_norm"),
        temperature=entry_of(config, "attn_scale", float, 0.1) if tunes else 0.0,
        temperature_floor=entry_of(config, "floor_scale", int, 8192),
        aux_loss=entry_of(config, "router_aux_loss_coef", float, 0.001),
    )
    if _no_rope_layers(args) != has_rope:
        raise ValueError(
            f"no_rope_layers has its first 0 at {every - 1}, and not one after every {every} "
            "layers, as in the family llama4 here"
        )
    return args


def _is_on(config: Mapping[str, Any], name: str) -> bool:
    """Return an entry that is true or false; published files have a number for true."""
    value = config.get(name)
    if type(value) is int:
        return value != 0
    return bool(entry_of(config, name, bool, True))


def _check_moe_layers(config: Mapping[str, Any], layers: int, step: int) -> None:
    """Raise ValueError unless every `step`th layer has experts."""
    wanted = list(range(step - 1, layers, step))
    given = entry_of(config, "moe_layers", list, wanted)
    if given != wanted:
        raise ValueError(
            f"moe_layers is {given!r:.80}, and here every layer with interleave_moe_layer_step = "
            f"{step} has experts: {wanted!r:.80}"
        )


def _read_rope(config: Mapping[str, Any], layers: int) -> list[int]:
    """Return for each layer 1 if it has rotary positions, else 0."""
    every = entry_of(config, "no_rope_layer_interval", int, 4)
    if every < 1:
        raise ValueError(f"no_rope_layer_interval is {every}, expected a positive integer")
    default = [int((index + 1) % every != 0) for index in range(layers)]
    # An empty list stands for the default, too.
    given = entry_of(config, "no_rope_layers", list, default) or default
    if len(given) != layers or any(one not in (0, 1) for one in given):
        raise ValueError(
            f"no_rope_layers is {given!r:.80}, expected 0 or 1 for each of {layers} layers"
        )
    return [int(one) for one in given]


def _nope_every(config: Mapping[str, Any], has_rope: list[int]) -> int:
    """Return every how many layers one has no rotary positions; 0: none has."""
    if 0 in has_rope:
        return has_rope.index(0) + 1
    # Of more layers than there are, as where a shape was cut.
    every: int = entry_of(config, "no_rope_layer_interval", int, 0)
    return every if every > len(has_rope) else 0


def _read_chunk(config: Mapping[str, Any], has_rope: list[int]) -> int:
    """Return the tokens of a chunk; 0: there are none.

    Raises ValueError where not just the layers with rotary positions have chunks.
    """
    kinds = texts_of(config, "layer_types")
    rotating = {kind for kind, rotates in zip(kinds, has_rope, strict=False) if rotates}
    others = {kind for kind, rotates in zip(kinds, has_rope, strict=False) if not rotates}
    if kinds and (len(kinds) != len(has_rope) or others - {_FULL} or len(rotating) > 1):
        raise ValueError(
            f"layer_types are not {_CHUNKED} where no_rope_layers has 1 and {_FULL} elsewhere, as "
            "in the family llama4 here"
        )
    if rotating == {_FULL}:
        return 0
    if rotating - {_CHUNKED}:
        raise ValueError(f"layer_types has {rotating.pop()!r}; there is {_CHUNKED!r} and {_FULL!r}")
    chunk: int = entry_of({"attention_chunk_size": _CHUNK, **config}, "attention_chunk_size", int)
    if chunk < 1:
        raise ValueError(f"attention_chunk_size is {chunk}, expected a positive integer")
    return chunk
