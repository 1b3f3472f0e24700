"""Family deepseek_v3: latent attention and router equal to `transformers`, files, counts,
refusals.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_families import V3, pair
from tests.support.hf import check_files
from tests.support.llamas import tokens_of
from tests.support.reference import in_our_names
from titanlite.checkpoint.foreign_formats import open_weights
from titanlite.models import get_spec, resolve_args
from titanlite.models.argument_fields import deciding
from titanlite.models.counts import count_active_parameters
from titanlite.models.deepseek_v3 import DeepSeekV3Args
from titanlite.models.families import family_of
from titanlite.models.spec import ShapeError

SPEC = get_spec("deepseek_v3")


def test_documents_in_one_row_are_as_rows_of_their_own() -> None:
    model = pair("deepseek_v3")[0]
    tokens = tokens_of(V3, batch=1, seq=40)
    doc_ids = (torch.arange(40) >= 17).int().unsqueeze(0)
    together = model(tokens, doc_ids=doc_ids)
    apart = torch.cat([model(tokens[:, :17]), model(tokens[:, 17:])], 1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek_v3, as v2"])
def test_files_of_transformers_there_and_back(variant: str, tmp_path: Path) -> None:
    ours, theirs, _, args = pair(variant)
    check_files(theirs, ours.state_dict(), SPEC, args, tmp_path)


def test_blocks_for_further_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """test_hf.py of checkpoints reads linears in float8."""
    from safetensors.torch import save_file

    values = SPEC.to_hf(pair("deepseek_v3")[0].state_dict(), V3)
    more = {}
    for name in ("eh_proj", "enorm", "self_attn.o_proj", "shared_head.head"):
        more[f"model.layers.{V3.n_layers}.{name}.weight"] = torch.randn(8, 8)
    copies = {name: tensor.clone() for name, tensor in {**values, **more}.items()}
    save_file(copies, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {**SPEC.hf_config(V3), "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level("INFO"):
        weights = open_weights(tmp_path)
    wanted = in_our_names(values, SPEC.hf_names(V3))
    assert weights.parts.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights.read(name), tensor), name
    (line,) = caplog.messages
    assert "4 tensors left out, model.layers.3.eh_proj.weight and others" in line
    assert "multi-token prediction" in line


def published(name: str) -> DeepSeekV3Args:
    args: DeepSeekV3Args = resolve_args("deepseek_v3", name)
    return args


def test_counts_of_the_published_models() -> None:
    """As torchtitan 0.2.2 builds them; 671,026,404,352 + 58 * 256 biases are DeepSeek-V3's files
    without the blocks that predict further tokens.
    """
    counts = {
        "16B": (15_706_484_224, 2_661_150_208),
        "236B": (235_741_434_880, 21_375_800_320),
        "671B": (671_026_404_352, 37_552_282_624),
    }
    for flavor, expected in counts.items():
        args = published(flavor)
        assert (SPEC.count_parameters(args), count_active_parameters(args)) == expected


def test_flops_are_six_per_active_weight_and_attention() -> None:
    args = published("16B")
    active = count_active_parameters(args) - 102400 * 2048
    attention = 6 * 27 * 16 * (192 + 128) * 4096
    assert SPEC.flops_per_token(args, 4096) == 6 * active + attention


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


def test_the_published_config_json_describes_the_flavors() -> None:
    assert SPEC.args_from_hf(V3_JSON) == replace(
        published("671B"), max_seq_len=163840, n_kv_heads=128
    )
    lite = SPEC.args_from_hf(V2_LITE_JSON)
    wanted = replace(published("16B"), max_seq_len=163840, n_kv_heads=16)
    # Its experts were balanced by a loss.
    assert lite == replace(wanted, bias_update=0.0, aux_loss=0.001)
    for config in (V3_JSON, V2_LITE_JSON):
        family, args = family_of(config)
        assert family == "deepseek_v3"
        written = SPEC.hf_config(args)
        assert SPEC.args_from_hf(written) == args
        for name in written.keys() & config.keys() - {"rope_scaling", "num_nextn_predict_layers"}:
            if name != "aux_loss_alpha":
                assert written[name] == config[name], name


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (V3_JSON, {"num_key_value_heads": 64}, "num_key_value_heads = 64 is not num_attention_he"),
        (V3_JSON, {"v_head_dim": 256}, "v_head_dim = 256 is wider than a query"),
        (V3_JSON, {"topk_group": 9}, "topk_group must be at most n_group = 8"),
        (
            V2_LITE_JSON,
            {"topk_method": "other"},
            "topk_method is 'other', and it must be one of 'greedy', 'group_limited_greedy'",
        ),
        (V2_LITE_JSON, {"norm_topk_prob": True}, "norm_topk_prob is true"),
    ],
)
def test_another_config_json_is_refused(
    config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        SPEC.args_from_hf({**config, **changes})


def test_a_router_without_a_name_is_not_exported() -> None:
    softmax = replace(V3, score="softmax", bias_update=0.0)
    with pytest.raises(ValueError, match="norm_topk is true"):
        SPEC.hf_config(softmax)
    with pytest.raises(
        ValueError, match="group_best is 2, .*-V2 .* model.overrides.group_best = 1"
    ):
        SPEC.hf_config(replace(softmax, norm_topk=False))
    with pytest.raises(
        ValueError, match="group_best is 1, .*-V3 .* model.overrides.group_best = 2"
    ):
        SPEC.hf_config(replace(V3, group_best=1))


def test_norms_have_the_epsilons_of_their_place() -> None:
    model = SPEC.build(replace(V3, norm_eps=1e-3, latent_norm_eps=1e-4, last_norm_eps=1e-5))
    block = model.layers["1"]
    assert (block.attention.q_norm.eps, block.attention.kv_norm.eps) == (1e-4, 1e-4)
    assert (block.attention_norm.eps, block.ffn_norm.eps) == (1e-3, 1e-3)
    assert model.norm.eps == 1e-5
    assert SPEC.build(replace(V3, norm_eps=1e-3)).norm.eps == 1e-3


def test_epsilons_decide_logits_and_others_than_those_of_transformers_are_not_exported() -> None:
    assert deciding(replace(V3, last_norm_eps=1e-6)) == deciding(V3)
    written = SPEC.hf_config(V3)
    other = replace(V3, norm_eps=1e-5, last_norm_eps=1e-5)
    assert SPEC.hf_config(other) == {**written, "rms_norm_eps": 1e-5}
    for name, words in (
        ("latent_norm_eps", "latent_norm_eps is 1e-05, and DeepSeek .* has 1e-06"),
        ("last_norm_eps", r"train with model\.overrides\.last_norm_eps = 1e-06"),
    ):
        changed = replace(V3, **{name: 1e-5})
        assert deciding(changed) == {**deciding(V3), name: 1e-5}
        with pytest.raises(ValueError, match=words):
            SPEC.hf_config(changed)


def test_misfits() -> None:
    with pytest.raises(ShapeError, match='score must be "sigmoid" or "softmax"'):
        replace(V3, score="softmax_of_chosen")


def test_softmax_scores_with_biases_are_not_exported() -> None:
    spec = get_spec("deepseek_v3")
    key = "checkpoint.last_save_in_hf"
    debug = spec.flavors["debugmodel"]
    assert (debug.score, debug.expert_bias) == ("softmax", True)
    assert "has no biases of experts" in spec.why_not(debug, key)
    assert not spec.why_not(replace(debug, bias_update=0.0), key)
    assert not spec.why_not(spec.flavors["671B"], key)
