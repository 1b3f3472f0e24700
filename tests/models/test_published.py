"""Published models: exact counts, FLOPs, and their config.json as published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from titanlite.config.model_sections import Model
from titanlite.models import SPECS, RopeScaling, resolve_args
from titanlite.models.args import model_args
from titanlite.models.counts import count_active_parameters, count_parameters, flops_per_token
from titanlite.models.families import family_of
from titanlite.models.llama import LLAMA2, LLAMA3

#: Parameters, as the model cards and the files have them; of mixtures also those of one token.
#: DeepSeek's and Llama 4's are those that torchtitan counts, without blocks for further tokens.
COUNTS: dict[str, dict[str, tuple[int, ...]]] = {
    "mistral": {
        "7B-v0.1": (7_241_732_096,),
        "7B": (7_248_023_552,),
        "mathstral-7B": (7_248_023_552,),
    },
    "mixtral": {
        "8x7B": (46_702_792_704, 12_879_925_248),
        "8x22B": (140_620_634_112, 39_152_031_744),
    },
    "deepseek_v3": {
        "16B": (15_706_484_224, 2_661_150_208),
        "236B": (235_741_434_880, 21_375_800_320),
        "671B": (671_026_404_352, 37_552_282_624),
    },
    "gpt_oss": {
        "20B": (20_914_757_184, 4_187_440_704),
        "120B": (116_829_156_672, 5_711_982_912),
    },
    "llama4": {
        "17Bx16E": (107_769_861_120, 17_172_894_720),
        "17Bx128E": (400_711_848_960, 17_184_691_200),
    },
    "qwen3_moe": {
        "30B-A3B": (30_532_122_624, 3_353_032_704),
        "235B-A22B": (235_093_634_560, 22_190_763_520),
    },
    "qwen3": {
        "0.6B": (596_049_920,),
        "1.7B": (1_720_574_976,),
        "4B": (4_022_468_096,),
        "8B": (8_190_735_360,),
        "14B": (14_768_307_200,),
        "32B": (32_762_123_264,),
    },
    "olmo2": {
        "1B": (1_484_916_736,),
        "7B": (7_298_617_344,),
        "13B": (13_716_198_400,),
        "32B": (32_234_279_936,),
    },
    "olmo3": {
        "7B": (7_298_011_136,),
        "32B": (32_233_522_176,),
    },
    "gemma3": {
        "270M": (268_098_176,),
        "1B": (999_885_952,),
        "4B": (3_880_263_168,),
        "12B": (11_766_034_176,),
        "27B": (27_009_346_304,),
    },
}


def test_counts():
    for family, counts in COUNTS.items():
        for flavor, expected in counts.items():
            args = SPECS[family].flavors[flavor]
            found = SPECS[family].count_parameters(args), count_active_parameters(args)
            assert found[: len(expected)] == expected, flavor


@pytest.mark.parametrize(
    ("family", "flavor", "seq_len", "flops"),
    [
        ("llama3", "3.2-1B", 8192, 10_636_111_872),
        ("mixtral", "8x7B", 4096, 82_935_570_432),
        # Six per active weight but the embedding's, and scores and values of 27 layers.
        (
            "deepseek_v3",
            "16B",
            4096,
            6 * (2_661_150_208 - 102400 * 2048) + 6 * 27 * 16 * (192 + 128) * 4096,
        ),
    ],
)
def test_flops_per_token(family, flavor, seq_len, flops):
    assert SPECS[family].flops_per_token(resolve_args(family, flavor), seq_len) == flops


@pytest.mark.parametrize(
    ("family", "flavor", "changes", "seq_len", "layers", "length"),
    [
        # A window; one in three of four blocks; a chunk in as many.
        ("mistral", "mathstral-7B", {"window": None}, 8192, 32, 4096),
        ("olmo3", "7B", {"full_every": 1}, 8192, 24, 4096),
        ("llama4", "17Bx16E", {"chunk": 0}, 32768, 36, 32768 - 8192),
    ],
)
def test_attention_outside_windows_and_chunks_costs_nothing(  # noqa: PLR0913
    family, flavor, changes, seq_len, layers, length
):
    spec, args = SPECS[family], SPECS[family].flavors[flavor]
    whole = spec.flops_per_token(replace(args, **changes), seq_len)
    assert whole - spec.flops_per_token(args, seq_len) == layers * 12 * args.dim * length


#: config.json of deepseek-ai/DeepSeek-V3-Base and DeepSeek-V2-Lite, without entries of generation.
V3_JSON: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE_JSON: dict[str, Any] = {
    **V3_JSON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**V3_JSON["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
#: As OpenAI's files have it, in the names of `transformers` 4.
GPT_OSS_JSON: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
#: Entries of `text_config` in the published files of both, as other projects quote them. The files
#: themselves need an accepted licence, and were not read.
LLAMA4_JSON: dict[str, Any] = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "use_cache": True,
    "vocab_size": 202048,
}
SCOUT: dict[str, Any] = {
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "floor_scale": 8192,
    "interleave_moe_layer_step": 1,
    "max_position_embeddings": 262144,
    "moe_layers": list(range(48)),
    "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_local_experts": 16,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "use_qk_norm": True,
}
MAVERICK: dict[str, Any] = {
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}


def text_part(entries: dict[str, Any]) -> dict[str, Any]:
    """A config.json of a Llama 4, which also reads images."""
    text = {**LLAMA4_JSON, **entries}
    return {"model_type": "llama4", "text_config": text, "vision_config": {}}


@pytest.mark.parametrize(
    ("family", "flavor", "config", "changes"),
    [
        ("deepseek_v3", "671B", V3_JSON, {"n_kv_heads": 128}),
        # Its experts were balanced by a loss; those of GPT-OSS train without it.
        (
            "deepseek_v3",
            "16B",
            V2_LITE_JSON,
            {"n_kv_heads": 16, "bias_update": 0.0, "aux_loss": 0.001},
        ),
        ("gpt_oss", "20B", GPT_OSS_JSON, {"aux_loss": 0.0}),
        ("llama4", "17Bx16E", text_part(SCOUT), {}),
        ("llama4", "17Bx128E", text_part(MAVERICK), {}),
    ],
)
def test_a_published_config_json_is_the_flavor(family, flavor, config, changes):
    text = config.get("text_config", config)
    wanted = replace(
        SPECS[family].flavors[flavor], max_seq_len=text["max_position_embeddings"], **changes
    )
    assert family_of(config) == family_of(text) == (family, wanted)


PUBLISHED = {
    ("llama2", "7B"): (4096, 32, 32, 32, 11008, 32000, 6_738_415_616),
    ("llama2", "13B"): (5120, 40, 40, 40, 13824, 32000, 13_015_864_320),
    ("llama2", "70B"): (8192, 80, 64, 8, 28672, 32000, 68_976_648_192),
    ("llama3", "8B"): (4096, 32, 32, 8, 14336, 128256, 8_030_261_248),
    ("llama3", "70B"): (8192, 80, 64, 8, 28672, 128256, 70_553_706_496),
    ("llama3", "3.1-405B"): (16384, 126, 128, 8, 53248, 128256, 405_853_388_800),
    ("llama3", "3.2-1B"): (2048, 16, 32, 8, 8192, 128256, 1_235_814_400),
    # A widely copied table says ffn 11008 for the 3B, and launch files say 2 kv heads for both:
    # wrong.
    ("llama3", "3.2-3B"): (3072, 28, 24, 8, 8192, 128256, 3_212_749_824),
}


@pytest.mark.parametrize(("family", "flavor"), PUBLISHED)
def test_published_shapes_and_exact_counts(family, flavor):
    args = resolve_args(family, flavor)
    shape = (args.dim, args.n_layers, args.n_heads, args.kv_heads, args.ffn_width, args.n_vocab)
    assert (*shape, count_parameters(args)) == PUBLISHED[family, flavor]
    assert args.norm_eps == 1e-5
    assert args.rope_theta == (1e4 if family == "llama2" else 5e5)
    assert args.tied is (flavor in ("3.2-1B", "3.2-3B"))


def test_rope_scaling_belongs_to_3_1_and_3_2_only():
    for flavor, args in LLAMA3.flavors.items():
        factor = (
            8.0 if flavor.startswith("3.1") or flavor == "405B" else 32.0 if args.tied else None
        )
        assert args.rope_scaling == (factor and RopeScaling(factor, 1.0, 4.0, 8192)), flavor
    assert all(a.rope_scaling is None for a in LLAMA2.flavors.values())


def test_flops_per_token_of_published_logs():
    mfu = 6785 * flops_per_token(resolve_args("llama3", "8B"), 8192) / 989e12
    assert f"{mfu:.2%}" == "39.73%"


def test_a_derived_width_follows_an_override():
    def width(**overrides):
        return resolve_args("llama3", "8B", overrides).ffn_width

    assert width() == 14336
    assert width(dim=2048) == 7168  # int(1.3 * 5461) = 7099, up to a multiple of 1024
    assert width(multiple_of=64) == 14208  # int(1.3 * 10922) = 14198
    assert width(ffn_dim_multiplier=1.0) == 11264
    assert width(dim=2048, ffn_dim=6000) == 6000
    assert resolve_args("llama3", "debugmodel", {"n_heads": 8}, tokenizer_size=512).kv_heads == 8
    own = resolve_args("qwen3", "8B", {"dim": 4112})
    assert (own.n_heads, own.head_dim, own.dim % own.n_heads) == (32, 128, 16)


def test_rope_scaling_as_a_toml_file_may_say_it():
    full = {"factor": 4.0, "low_freq_factor": 2.0, "original_context": 1024}
    section = Model(
        flavor="8B",
        rope_scaling=full,
        norm_type="fused_rmsnorm",
        vocab_size=64,
        overrides={"n_layers": 2},
    )
    args = model_args(section, 128)
    assert (args.rope_scaling, args.norm_type, args.n_vocab) == (
        RopeScaling(4.0, 2.0, 4.0, 1024),
        "fused_rmsnorm",
        64,
    )
    assert (args.n_layers, args.max_seq_len) == (2, 128)
    assert RopeScaling.parse(4) == RopeScaling(4.0)
    assert RopeScaling.parse(1.0) is None
    assert RopeScaling.parse("none") is None
    assert resolve_args("llama3", "3.1-8B", {"rope_scaling": "none"}).rope_scaling is None


def test_the_vocabulary_is_the_flavors_own_or_the_tokenizers():
    assert resolve_args("llama3", "debugmodel", tokenizer_size=2048).n_vocab == 2048
    assert resolve_args("llama3", "8B", tokenizer_size=2048).n_vocab == 128256
    assert resolve_args("llama3", "8B", vocab_size=2048, tokenizer_size=2048).n_vocab == 2048
    with pytest.raises(ValueError, match="128256 entries but the model's vocabulary only 32000"):
        resolve_args("llama2", "7B", tokenizer_size=128256)
    with pytest.raises(ValueError, match="takes its vocabulary from the tokenizer"):
        count_parameters(resolve_args("llama3", "debugmodel"))
