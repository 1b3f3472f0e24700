"""GPT-OSS beside `test_families.py`: experts one token at a time, published configs, biases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.models.test_families import pair
from tests.support.llamas import relative, tokens_of
from tests.support.reference import in_memory
from titanlite.config.model_sections import Optimizer
from titanlite.models import get_spec
from titanlite.models.counts import count_active_parameters
from titanlite.models.gpt_oss import GptOssArgs
from titanlite.models.gpt_oss_layers import GptOssMoE
from titanlite.optim.groups import parameter_groups

SPEC = get_spec("gpt_oss")
ARGS = GptOssArgs(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=48,
    vocab_size=96,
    n_experts=5,
    top_k=3,
    head_dim=8,
    aux_loss=0.0,
)


def test_gates_and_what_they_multiply_are_clamped_as_in_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs, _, args = pair("gpt_oss")
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("gate_up"):
                parameter *= 6
    theirs.load_state_dict(in_memory(SPEC.to_hf(ours.state_dict(), args)))
    tokens = tokens_of(args)
    found = ours(tokens)
    expected = theirs(tokens).logits
    assert relative(found, expected) < 1e-5
    for out in (found, expected):
        out.square().sum().backward()
    names = SPEC.hf_names(args)
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, theirs.get_parameter(names[name]).grad) < 2e-5, name
    monkeypatch.setattr("titanlite.models.gpt_oss_layers._LIMIT", 1e9)
    assert relative(ours(tokens), found) > 1e-2


def test_an_expert_without_rows_has_no_gradient_and_harms_no_other() -> None:
    moe = GptOssMoE(ARGS)
    with torch.no_grad():
        for parameter in moe.parameters():
            nn.init.normal_(parameter, std=0.9)
        moe.gate.bias[2] = -1e4
    x = torch.randn(1, 7, 32, requires_grad=True)
    moe(x).sum().backward()
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad[2].abs().max() == 0, name
        assert parameter.grad.isfinite().all(), name


def test_the_published_config_json_is_the_flavor() -> None:
    """Entries as OpenAI's files have them, in the names of `transformers` 4."""
    published = {
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
    args = SPEC.args_from_hf(published)
    # The published model is trained without that loss.
    wanted = replace(SPEC.flavors["20B"], aux_loss=0.0, max_seq_len=131072)
    assert args == wanted
    assert count_active_parameters(SPEC.flavors["120B"]) == 5_711_982_912
    assert count_active_parameters(args) == 4_187_440_704


def test_biases_and_sinks_begin_at_zero_and_have_no_decay() -> None:
    model = SPEC.build(ARGS)
    zeros = set()
    for name, _ in model.named_parameters():
        if SPEC.init_rule(name, ARGS).kind == "zeros":
            zeros.add(name.partition(".")[2].partition(".")[2])
    assert zeros == {
        *(f"attention.w{one}.bias" for one in "qkvo"),
        "attention.sinks.weight",
        "feed_forward.gate.bias",
        "feed_forward.experts.gate_up_bias",
        "feed_forward.experts.down_bias",
    }
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    blocks = SPEC.block_names(ARGS)
    decayed = Optimizer(no_decay_on_norms=True)
    without = set()
    for group in parameter_groups(parameters, decayed, blocks):
        if group.get("weight_decay") == 0.0:
            without |= {names[id(parameter)] for parameter in group["params"]}
    assert without == {name for name in parameters if "norm" in name or "bias" in name} | {
        f"{block}.attention.sinks.weight" for block in blocks
    }
    (muon,) = (
        group
        for group in parameter_groups(parameters, Optimizer(name="Muon"), blocks)
        if group.get("muon")
    )
    assert not any("bias" in names[id(parameter)] for parameter in muon["params"])
    assert len(muon["params"]) == 2 * (4 + 1 + 2)


def test_windows_are_in_every_second_block() -> None:
    args = replace(ARGS, n_layers=4)
    assert [block.window for block in args.blocks().values()] == [128, None, 128, None]


def test_biases_of_experts_have_no_name_in_files() -> None:
    args = replace(ARGS, bias_update=0.001)
    for function in (SPEC.hf_names, SPEC.hf_config):
        with pytest.raises(ValueError, match="no biases of experts"):
            function(args)
