"""Files of torchtitan 0.2.x: the defaults and models that they expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from titanlite.config.aliases import MicrobatchSize
from titanlite.config.errors import DEFAULT, Source
from titanlite.config.toml import quote

if TYPE_CHECKING:
    from titanlite.config.load import Layers

#: Defaults of torchtitan 0.2.x where they differ.
LATER_DEFAULTS: dict[str, Any] = {
    "checkpoint.keep_latest_k": 10,
    "optimizer.implementation": "fused",
    "metrics.enable_color_printing": True,
    "experimental.pipeline_parallel_microbatches": MicrobatchSize(1),
    "lr_scheduler.style": "titan-0.2",
}


@dataclass(frozen=True)
class Later:
    """What a model of torchtitan 0.2.x is here."""

    #: Flavor here.
    flavor: str
    #: What the flavor there is, beside its name, for a note.
    difference: str
    #: Family here, where it has another name.
    name: str = ""
    #: Keys that the model brings, where nothing else sets them.
    settings: Mapping[str, Any] = field(default_factory=dict)


_OF_8 = "RoPE scaled by 8"
_DEBUG = f"6 layers and {_OF_8}. The vocabulary is the tokenizer's, not 2048"
_IN_DOCUMENTS = "attention within each document"
_MASKED = {"data.mask_documents": True}
_QWEN3_DEBUG = {
    "model.overrides.n_heads": 16,
    "model.overrides.n_kv_heads": 8,
    "model.overrides.head_dim": 128,
    "model.overrides.ffn_dim": 3072,
    "model.overrides.tied": True,
}
_NO_LOSS = {"model.overrides.aux_loss": 0.0}
_QWEN3_MOE_DEBUG = {
    "model.overrides.n_layers": 8,
    "model.overrides.n_heads": 16,
    "model.overrides.n_kv_heads": 8,
    "model.overrides.head_dim": 128,
    "model.overrides.n_experts": 64,
    "model.overrides.top_k": 8,
    "model.overrides.expert_width": 768,
    **_NO_LOSS,
}
_GPT_OSS = "biases of experts that balance the load, no auxiliary loss"
_GPT_OSS_BALANCE = {**_NO_LOSS, "model.overrides.bias_update": 0.001}
_GPT_OSS_DEBUG = {
    "model.overrides.n_heads": 64,
    "model.overrides.n_kv_heads": 8,
    "model.overrides.head_dim": 64,
    "model.overrides.ffn_dim": 2880,
    **_GPT_OSS_BALANCE,
}
_LLAMA4 = (
    "attention to all tokens with RoPE in each layer, no norms of q and k, biases of experts that "
    "balance the load, no auxiliary loss"
)
_LLAMA4_PLAIN = {
    "model.overrides.nope_every": 0,
    "model.overrides.chunk": 0,
    "model.overrides.unit_qk": False,
    **_NO_LOSS,
    "model.overrides.bias_update": 0.001,
}
_DEEPSEEK = "norms with epsilon 1e-5, and the last one with that of float32"
_DEEPSEEK_EPS = {
    "model.overrides.norm_eps": 1e-5,
    "model.overrides.latent_norm_eps": 1e-5,
    # torch's RMSNorm without an epsilon takes it for every dtype.
    "model.overrides.last_norm_eps": 2.0**-23,
}
#: (`model.name`, `model.flavor`) in torchtitan 0.2.x → the model here.
LATER_MODELS: dict[tuple[str, str], Later] = {
    ("llama3", "debugmodel"): Later("3.1-debugmodel", _DEBUG),
    ("llama3", "debugmodel_flex_attn"): Later(
        "3.1-debugmodel", f"{_IN_DOCUMENTS}, {_DEBUG}", settings=_MASKED
    ),
    ("llama3", "debugmodel_varlen_attn"): Later(
        "3.1-debugmodel", f"{_IN_DOCUMENTS}, {_DEBUG}", settings=_MASKED
    ),
    ("llama3", "8B"): Later("3.1-8B", _OF_8),
    ("llama3", "8B_flex"): Later("3.1-8B", f"{_OF_8}, {_IN_DOCUMENTS}", settings=_MASKED),
    ("llama3", "8B_varlen"): Later("3.1-8B", f"{_OF_8}, {_IN_DOCUMENTS}", settings=_MASKED),
    ("llama3", "70B"): Later("3.1-70B", _OF_8),
    ("llama3", "405B"): Later("3.1-405B", _OF_8),
    ("qwen3", "debugmodel"): Later(
        "debugmodel",
        "heads, feed-forward and tied weights of that one. The vocabulary is the tokenizer's",
        settings=_QWEN3_DEBUG,
    ),
    ("qwen3", "debugmodel_moe"): Later(
        "debugmodel",
        "heads, layers and experts of that one, no auxiliary loss. The vocabulary is the "
        "tokenizer's",
        "qwen3_moe",
        _QWEN3_MOE_DEBUG,
    ),
    ("qwen3", "30B-A3B"): Later("30B-A3B", "no auxiliary loss", "qwen3_moe", _NO_LOSS),
    ("qwen3", "235B-A22B"): Later(
        "235B-A22B",
        "no auxiliary loss, RoPE with theta 5e6",
        "qwen3_moe",
        {**_NO_LOSS, "model.overrides.rope_theta": 5e6},
    ),
    ("gpt_oss", "debugmodel"): Later(
        "debugmodel",
        f"heads and experts of that one, {_GPT_OSS}. The vocabulary is the tokenizer's",
        settings=_GPT_OSS_DEBUG,
    ),
    ("gpt_oss", "20b"): Later("20B", _GPT_OSS, settings=_GPT_OSS_BALANCE),
    ("gpt_oss", "120b"): Later("120B", _GPT_OSS, settings=_GPT_OSS_BALANCE),
    ("llama4", "debugmodel"): Later(
        "debugmodel", f"{_LLAMA4}. The vocabulary is the tokenizer's", settings=_LLAMA4_PLAIN
    ),
    ("llama4", "17bx16e"): Later("17Bx16E", _LLAMA4, settings=_LLAMA4_PLAIN),
    ("llama4", "17bx128e"): Later("17Bx128E", _LLAMA4, settings=_LLAMA4_PLAIN),
    ("deepseek_v3", "debugmodel"): Later("debugmodel", _DEEPSEEK, settings=_DEEPSEEK_EPS),
    ("deepseek_v3", "debugmodel_flex_attn"): Later(
        "debugmodel", f"{_DEEPSEEK}, {_IN_DOCUMENTS}", settings={**_DEEPSEEK_EPS, **_MASKED}
    ),
    ("deepseek_v3", "16B"): Later(
        "16B", f"{_DEEPSEEK}, {_IN_DOCUMENTS}", settings={**_DEEPSEEK_EPS, **_MASKED}
    ),
    ("deepseek_v3", "236B"): Later(
        "236B", f"{_DEEPSEEK}, {_IN_DOCUMENTS}", settings={**_DEEPSEEK_EPS, **_MASKED}
    ),
    ("deepseek_v3", "671B"): Later(
        "671B", f"{_DEEPSEEK}, {_IN_DOCUMENTS}", settings={**_DEEPSEEK_EPS, **_MASKED}
    ),
}
#: Context of the published DeepSeek models. torchtitan scales RoPE for longer sequences only.
_DEEPSEEK_CONTEXT = 4096
#: Flavor of deepseek_v3 in torchtitan → its `mscale`.
_DEEPSEEK_MSCALE = {"debugmodel": 0.7, "debugmodel_flex_attn": 0.7, "16B": 0.7}
#: Name of a model of transformers in a file of torchtitan's experiment of that name.
TRANSFORMERS = "transformers_modeling_backend"
#: Flavor of that experiment → entries of the config.json that it replaces.
TRANSFORMERS_FLAVORS: dict[str, dict[str, Any]] = {
    "debugmodel": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "full": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def apply_later(layers: Layers, sign: Source, why: str) -> None:
    """Give a file of torchtitan 0.2.x the model and the defaults it expects, for keys that no layer
    sets.

    sign: what says that it is one. why: what it says.
    """
    source = Source("dialect", sign.file, sign.line)
    if "job.dialect" not in layers.values:
        layers.put("job.dialect", "2026", source)
    taken = _put_missing(layers, LATER_DEFAULTS, source)
    if taken:
        layers.notes.append(f"{sign.place} {why}: later defaults for {', '.join(taken)}")
    if "lr_scheduler.style" in taken:
        layers.notes.append(
            'the warm-up of torchtitan 0.2.x is n / W at step n: lr_scheduler.style = "titan-0.2"'
        )
    _apply_transformers(layers, source)
    model = (layers.get("model.name"), layers.get("model.flavor"))
    if model in LATER_MODELS:
        _take_later_model(layers, model, sign)


def _put_missing(layers: Layers, settings: Mapping[str, Any], source: Source) -> list[str]:
    """Set keys that no layer sets; return them."""
    taken = [key for key in settings if key not in layers.values]
    for key in taken:
        layers.put(key, settings[key], source)
    return taken


def _take_later_model(layers: Layers, model: tuple[str, str], sign: Source) -> None:
    """Replace a model of torchtitan 0.2.x by ours, with a note. sign: what says that it is one."""
    name, flavor = model
    later = LATER_MODELS[model]
    if later.name:
        layers.put("model.name", later.name, _written_as(layers, "model.name", name, sign))
    if later.flavor != flavor:
        layers.put("model.flavor", later.flavor, _written_as(layers, "model.flavor", flavor, sign))
    source = Source("dialect", sign.file, sign.line)
    if name == "deepseek_v3" and not layers.gives_scaling:
        _scale_deepseek(layers, flavor, source)
    taken = _put_missing(layers, later.settings, source)
    here = quote(later.flavor)
    if later.name:
        here = f"{here} of {later.name}"
    note = f"model.flavor {quote(flavor)} of torchtitan 0.2.x is {here}: {later.difference}"
    if taken:
        note = f"{note} ({', '.join(taken)})"
    layers.notes.append(note)


def _scale_deepseek(layers: Layers, flavor: str, source: Source) -> None:
    """Scale RoPE of a DeepSeek model as torchtitan does: by YaRN, for sequences longer than the
    published context, and not at all for others.
    """
    if layers.get("training.seq_len") <= _DEEPSEEK_CONTEXT:
        layers.put("model.rope_scaling", "none", source)
        layers.notes.append(
            f"torchtitan scales RoPE of deepseek_v3 for sequences over {_DEEPSEEK_CONTEXT} tokens "
            'alone: model.rope_scaling = "none"'
        )
        return
    mscale = _DEEPSEEK_MSCALE.get(flavor, 1.0)
    scaling = {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": _DEEPSEEK_CONTEXT,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }
    layers.put("model.rope_scaling", scaling, source)


def _written_as(layers: Layers, key: str, value: str, sign: Source) -> Source:
    """Return the source of a key's value that follows from the one that is written."""
    settled = layers.values.get(key)
    given = DEFAULT if settled is None else settled.source
    if given.file == sign.file or given.kind == "command line":
        return replace(given, written=f"{key} = {quote(value)}")
    return Source("dialect", sign.file, sign.line)


def _apply_transformers(layers: Layers, source: Source) -> None:
    """Give a file of torchtitan's experiment with models of transformers the shape of its
    flavor.
    """
    name = layers.values.get("model.name")
    if name is None or name.raw != TRANSFORMERS:
        return
    flavor = layers.get("model.flavor")
    if flavor in TRANSFORMERS_FLAVORS:
        # Models of transformers have no flavors here: the default stands for none.
        given = _written_as(layers, "model.flavor", flavor, source)
        layers.put("model.flavor", "debugmodel", given)
    entries = TRANSFORMERS_FLAVORS.get(flavor, {})
    settings = {f"model.overrides.{entry}": value for entry, value in entries.items()}
    if _put_missing(layers, settings, source):
        layers.notes.append(
            f"model.flavor {quote(flavor)} of torchtitan's {TRANSFORMERS} replaces entries of the "
            f"config.json: {', '.join(entries)}"
        )
