"""Every entry of each family's config.json: honoured, refused by its name, or without effect.

`transformers` tells which entries there are, and what each one does to its logits.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.llamas import spec_of
from tests.support.reference import in_memory
from titanlite.models import SPECS, LlamaArgs
from titanlite.models.deepseek_v3 import DeepSeekV3Args
from titanlite.models.families import family_of
from titanlite.models.gemma3 import Gemma3Args
from titanlite.models.gpt_oss import GptOssArgs
from titanlite.models.llama4 import Llama4Args
from titanlite.models.mistral import MistralArgs
from titanlite.models.mixtral import MixtralArgs
from titanlite.models.olmo2 import Olmo2Args
from titanlite.models.olmo3 import Olmo3Args
from titanlite.models.qwen3 import Qwen3Args
from titanlite.models.qwen3_moe import Qwen3MoeArgs

#: `norm_eps` and `rope_theta` are no defaults, and large and small enough to matter.
SMALL: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "vocab_size": 64,
    "norm_eps": 1e-2,
    "rope_theta": 77.0,
    "max_seq_len": 64,
}
FOUR = {**SMALL, "n_layers": 4}
EXPERTS: dict[str, Any] = {"n_experts": 4, "top_k": 2, "aux_loss": 0.0}
LATENT: dict[str, Any] = {
    **{**SMALL, "n_kv_heads": None},
    **EXPERTS,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "expert_width": 16,
    "n_dense_layers": 1,
    "n_shared_experts": 1,
    "n_groups": 2,
    "top_groups": 1,
    "route_scale": 1.7,
}
#: `model_type` → arguments with which everything that the family can do is on.
MODELS: dict[str, LlamaArgs] = {
    "llama": LlamaArgs(**SMALL),
    "deepseek_v3": DeepSeekV3Args(**LATENT),
    "gpt_oss": GptOssArgs(**SMALL, **EXPERTS, head_dim=16, window=12),
    "mistral": MistralArgs(**SMALL, window=12),
    "mixtral": MixtralArgs(**SMALL, **EXPERTS),
    "qwen3": Qwen3Args(**SMALL, head_dim=16),
    "qwen3_moe": Qwen3MoeArgs(**FOUR, **EXPERTS, head_dim=16, expert_width=16, sparse_step=2),
    "olmo2": Olmo2Args(**SMALL),
    "olmo3": Olmo3Args(**FOUR, window=12, full_every=3),
    "gemma3_text": Gemma3Args(
        **FOUR, window=12, full_every=3, head_dim=16, query_scalar=24, local_theta=9.0, tied=True
    ),
    "deepseek_v2": DeepSeekV3Args(
        **LATENT, score="softmax", norm_topk=False, group_best=1, bias_update=0.0
    ),
    "llama4_text": Llama4Args(
        **FOUR,
        **{**EXPERTS, "top_k": 1},
        expert_width=16,
        sparse_step=2,
        nope_every=3,
        chunk=12,
        temperature=0.4,
        temperature_floor=8,
    ),
}
TOKENS = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1))
#: Stands for a file without the entry.
MISSING = "missing"
#: Values of entries that are no number and no switch.
CHOICES: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "relu"],
    "hidden_activation": ["silu", "gelu"],
    "topk_method": ["greedy", "noaux_tc"],
    "layer_types": [["full_attention"] * 4, ["sliding_attention"] * 4, ["chunked_attention"] * 4],
    "mlp_only_layers": [[1], [0]],
    "moe_layers": [[0, 2], [0, 1, 2, 3]],
    "no_rope_layers": [[1, 1, 1, 1], [1, 0, 1, 0], []],
}
#: Entries that older files have, or that other models have for the same thing.
OLDER: dict[str, list[Any]] = {
    "rope_theta": [50.0],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 0.5}],
    "partial_rotary_factor": [0.5],
    "sliding_window": [8],
    "use_sliding_window": [True],
    "layer_types": CHOICES["layer_types"],
    "rope_local_base_freq": [50.0],
    "sliding_window_pattern": [2],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": CHOICES["topk_method"],
    "norm_topk_prob": [True, False],
    "moe_layer_freq": [2],
    "head_dim": [6],
    "attention_bias": [True],
    "mlp_bias": [True],
    "final_logit_softcapping": [1.0],
    "attn_logit_softcapping": [1.0],
    "logits_scaling": [2.0],
    "clip_qkv": [0.1],
}
#: Entries of `rope_parameters`.
ROPE: list[dict[str, Any]] = [
    {"rope_theta": 50.0},
    {"partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]
#: Words of a refusal that name a part of an entry, or an entry that says the same.
PARTS = {
    "rope_parameters": ["rope_theta", "rope_type", "partial_rotary_factor"],
    "rope_scaling": ["rope_theta", "rope_type", "factor"],
}
#: Entries that change no logit of `transformers`, in any of these models.
NO_EFFECT = {
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",
    "num_nextn_predict_layers",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "use_cache",
}


def written(kind: str) -> dict[str, Any]:
    """config.json as `transformers` writes it, and the entries of older versions beside it."""
    from transformers import CONFIG_MAPPING

    args = MODELS[kind]
    return dict(CONFIG_MAPPING[kind](**spec_of(args).hf_config(args)).to_dict())


def own_fields(kind: str) -> dict[str, Any]:
    """Name -> type of each entry that is of this model, and not of all models."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    of_all = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    found = {field.name: field.type for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    in_files = CONFIG_MAPPING[kind].attribute_map
    return {in_files.get(name, name): found[name] for name in found.keys() - of_all}


def values_of(name: str, value: Any, type_: Any) -> list[Any]:
    """Other values of an entry."""
    if name in CHOICES:
        return CHOICES[name]
    if name == "rope_parameters":
        return ropes_of(value)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1]
    if isinstance(value, float):
        return [value + 0.3]
    if "bool" in str(type_):
        return [True]
    if "float" in str(type_):
        return [0.7]
    assert "int" in str(type_), f"{name}: {value!r} of type {type_}: give it values in CHOICES"
    return [2, 7]


def ropes_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Other tables of the rotary positions; with one for each kind of layer, each changed."""
    nested = [kind for kind, value in table.items() if isinstance(value, dict)]
    if not nested:
        return [{**table, **change} for change in ROPE]
    return [{**table, kind: {**table[kind], **change}} for kind in nested for change in ROPE]


def changes_of(kind: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and other value of each entry that may change a logit."""
    own = own_fields(kind)
    for name, type_ in sorted(own.items()):
        if name in NO_EFFECT:
            continue
        value = config.get(name)
        for other in [MISSING, None, *values_of(name, value, type_)]:
            if other != value or type(other) is not type(value):
                yield name, other
    for name in OLDER.keys() - own.keys():
        yield from ((name, other) for other in OLDER[name])


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The file with other entries, as JSON has it."""
    found = json.loads(json.dumps({**config, **changes}))
    return {name: value for name, value in found.items() if value != MISSING}


def weights_of(shapes: Mapping[str, Tensor], offset: bool) -> dict[str, Tensor]:
    """Random weights that follow from name and shape, large enough to matter."""
    found = {}
    for name, tensor in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            found[name] = 0.2 * noise + (0 if offset else 1)
        elif tensor.dim() == 1 or name.endswith("_bias"):
            found[name] = 0.2 * noise
        else:
            found[name] = noise * tensor.shape[-1] ** -0.5
    return found


@cache
@torch.no_grad()
def ours_of(family: str, args: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the weights under the names that `transformers` has in memory."""
    model = SPECS[family].build(args).eval()
    state = weights_of(model.state_dict(), args.norm_offset)
    model.load_state_dict(state)
    return model(TOKENS), in_memory(SPECS[family].to_hf(model.state_dict(), args))


@torch.no_grad()
def theirs_of(kind: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """Logits of `transformers`, or the reason why there is no such model."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        read = CONFIG_MAPPING[kind].from_dict(dict(config))
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(read)](read).eval()
        missing, unknown = model.load_state_dict(weights, strict=False)
        if unknown or {*missing} - {"lm_head.weight"}:
            return f"other weights: {[*missing, *unknown]}"
        return model(TOKENS).logits
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refusal(config: Mapping[str, Any]) -> str:
    """Why the file is refused; empty: it is not."""
    try:
        family_of(config)
    except ValueError as error:
        return str(error)
    return ""


def is_a_model(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether `transformers` takes the file."""
    from transformers import CONFIG_MAPPING

    try:
        CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception:
        return False
    return True


def judge(kind: str, config: Mapping[str, Any], name: str) -> str:
    """What is wrong with how an entry of the file is read; empty: nothing."""
    reason = refusal(config)
    if reason:
        words = [name, *PARTS.get(name, [])]
        is_named = any(re.search(rf"\b{word}\b", reason) for word in words)
        if is_named or not is_a_model(kind, config):
            return ""
        return f"refused, but not by its name: {reason}"
    ours, weights = ours_of(*family_of(config))
    theirs = theirs_of(kind, config, weights)
    if isinstance(theirs, str):
        # There is no such model.
        return ""
    if ours.shape != theirs.shape:
        return f"logits {list(ours.shape)}, and {list(theirs.shape)} of transformers"
    error = float((ours - theirs).norm() / theirs.norm())
    return "" if error < 1e-5 else f"logits differ by {error:.1e} of their norm"


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("kind", MODELS)
def test_every_entry_of_config_json_is_honoured_or_refused_by_its_name(kind):
    config = written(kind)
    family, args = family_of(config)
    ours, weights = ours_of(family, args)
    base = theirs_of(kind, config, weights)
    assert float((ours - base).norm() / base.norm()) < 1e-5
    for which in (0, 1):
        # All that has no effect, at once.
        silent = {}
        for name, type_ in own_fields(kind).items():
            if name in NO_EFFECT:
                other = [MISSING, *values_of(name, config.get(name), type_)][which]
                if name not in refusal(changed(config, {name: other})):
                    silent[name] = other
        other = changed(config, silent)
        assert ours_of(*family_of(other))[0].equal(ours)
        assert theirs_of(kind, other, weights).equal(base)
    wrong = {}
    for name, value in changes_of(kind, config):
        problem = judge(kind, changed(config, {name: value}), name)
        if problem:
            wrong[f"{name} = {value!r}"] = problem
    assert not wrong
