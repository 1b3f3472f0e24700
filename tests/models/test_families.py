"""Every family against `transformers` with the same random weights: logits, gradients, generated
tokens, counts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.hf import check_files
from tests.support.llamas import SCALED, relative, spec_of, tokens_of
from tests.support.llamas import VARIANTS as LLAMAS
from tests.support.reference import in_memory, in_our_names
from titanlite.checkpoint.foreign_formats import open_weights
from titanlite.contrib.evidence.module_differences import compare, trace_ours, trace_transformers
from titanlite.models import SPECS, LlamaArgs
from titanlite.models.args import as_record
from titanlite.models.argument_fields import deciding
from titanlite.models.deepseek_v3 import DeepSeekV3Args
from titanlite.models.gemma3 import Gemma3Args
from titanlite.models.gpt_oss import GptOssArgs
from titanlite.models.llama4 import Llama4Args
from titanlite.models.mistral import MistralArgs
from titanlite.models.mixtral import MixtralArgs
from titanlite.models.olmo2 import Olmo2Args
from titanlite.models.olmo3 import Olmo3Args
from titanlite.models.qwen3 import Qwen3Args
from titanlite.models.qwen3_moe import Blocks, Qwen3MoeArgs
from titanlite.models.recorded_args import from_record
from titanlite.models.rope_scaling import LinearScaling, RopeScaling, YarnScaling
from titanlite.models.spec import ModelSpec

SMALL: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "vocab_size": 96,
    "max_seq_len": 128,
}
MISTRAL = MistralArgs(**SMALL, window=24)
QWEN3 = Qwen3Args(**SMALL, head_dim=16)
GPT_OSS = GptOssArgs(
    **{**SMALL, "n_layers": 4},
    head_dim=16,
    ffn_dim=48,
    n_experts=4,
    top_k=2,
    aux_loss=0.0,
    window=24,
    rope_scaling=YarnScaling(factor=4.0, original_max_position_embeddings=32, truncate=False),
)
#: Block 2 sees all tokens before.
OLMO3 = Olmo3Args(**{**SMALL, "n_layers": 4}, window=24, full_every=3)
GEMMA3 = Gemma3Args(
    **{**SMALL, "n_layers": 4, "tied": True, "norm_eps": 1e-6, "rope_theta": 1e6},
    window=24,
    full_every=3,
    head_dim=16,
    query_scalar=24,
    local_theta=100.0,
)
#: A chunk shorter than the sequence, with which its last one is not full; every second block dense,
#: block 2 without RoPE. Positions of three floors.
LLAMA4 = Llama4Args(
    **{**SMALL, "n_layers": 4},
    ffn_dim=80,
    expert_width=48,
    n_experts=4,
    sparse_step=2,
    nope_every=3,
    chunk=24,
    temperature=0.4,
    temperature_floor=20,
    aux_loss=0.0,
    rope_scaling=RopeScaling(
        factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_context=64
    ),
)
QWEN3_MOE = Qwen3MoeArgs(
    **{**SMALL, "n_layers": 3, "max_seq_len": 64},
    ffn_dim=96,
    head_dim=16,
    n_experts=8,
    top_k=3,
    expert_width=40,
    aux_loss=0.0,
)
#: All that DeepSeek-V3 has, small: a latent of queries, groups of experts, a dense first block.
V3 = DeepSeekV3Args(
    dim=64,
    n_layers=3,
    n_heads=4,
    ffn_dim=96,
    vocab_size=96,
    max_seq_len=128,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    expert_width=32,
    n_experts=8,
    top_k=3,
    n_groups=4,
    top_groups=2,
    route_scale=2.5,
    rope_scaling=YarnScaling(
        factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.9
    ),
)
V2 = replace(
    V3,
    score="softmax",
    norm_topk=False,
    group_best=1,
    bias_update=0.0,
    n_shared_experts=2,
    route_scale=1.0,
)
MIXTRAL = MixtralArgs(**SMALL, ffn_dim=48, n_experts=4, rope_theta=1e6, aux_loss=0.0)
#: Family, and what the variant is → arguments: a window shorter than the sequence and one as long,
#: heads wider than dim / heads, each RoPE.
VARIANTS: dict[str, LlamaArgs] = {
    "llama3": LLAMAS["gqa"],
    "llama3, scaled, tied": LLAMAS["all"],
    "mistral, window": MISTRAL,
    "mistral, no window, tied": replace(
        MISTRAL, window=None, tied=True, n_kv_heads=None, rope_theta=1e6
    ),
    "qwen3": QWEN3,
    "qwen3, tied, scaled": replace(
        QWEN3, tied=True, rope_scaling=SCALED, n_kv_heads=8, head_dim=24
    ),
    "gpt_oss": GPT_OSS,
    "gpt_oss, long window, all experts": replace(
        GPT_OSS, window=128, top_k=4, rope_scaling=None, n_kv_heads=8
    ),
    "llama4": LLAMA4,
    "llama4, experts everywhere, no unit norm": replace(
        LLAMA4, sparse_step=1, unit_qk=False, rope_scaling=None, n_kv_heads=8, chunk=23
    ),
    "llama4, two experts, no chunks, tied": replace(
        LLAMA4, top_k=2, chunk=0, temperature=0.0, norm_eps=1e-6, tied=True
    ),
    "mixtral": replace(MIXTRAL, top_k=3),
    # With one layer the losses of the routers are equal too: `transformers` takes shares over the
    # tokens of all layers.
    "mixtral, balanced": replace(MIXTRAL, n_layers=1, aux_loss=0.5),
    "qwen3_moe, every second block": replace(QWEN3_MOE, sparse_step=2, norm_topk=False),
    "qwen3_moe, dense blocks, tied": replace(
        QWEN3_MOE, dense_blocks=Blocks((0, 2)), tied=True, top_k=8
    ),
    "deepseek_v3": V3,
    "deepseek_v3, no latent of queries, no groups": replace(
        V3, q_lora_rank=0, n_groups=1, top_groups=1, n_dense_layers=0, n_shared_experts=2
    ),
    "deepseek_v3, as v2": V2,
    "olmo2": Olmo2Args(**SMALL),
    "olmo3": OLMO3,
    "olmo3, scaled where it sees all": replace(
        OLMO3, rope_scaling=YarnScaling(factor=4.0, original_max_position_embeddings=32)
    ),
    "gemma3": GEMMA3,
    "gemma3, scaled where it sees all": replace(
        GEMMA3, rope_scaling=LinearScaling(factor=8.0), query_scalar=16
    ),
}


def theirs_of(config: dict[str, Any]) -> Any:
    """The class of `transformers` that a config.json names, with the weights it makes."""
    import transformers

    (name,) = config["architectures"]
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


def pair(variant: str) -> tuple[nn.Module, Any, ModelSpec, LlamaArgs]:
    """Ours and theirs, of the same weights: every parameter, norms too, is random and large enough
    to matter.
    """
    spec, args = SPECS[variant.partition(",")[0]], VARIANTS[variant]
    torch.manual_seed(0)
    ours = spec.build(args)
    theirs = theirs_of(spec.hf_config(args))
    with torch.no_grad():
        one = 0 if args.norm_offset else 1
        for name, tensor in ours.state_dict().items():
            noise = torch.randn_like(tensor)
            tensor.copy_(
                one + 0.2 * noise if "norm" in name else noise * _width(name, tensor) ** -0.5
            )
    weights = in_memory(spec.to_hf(ours.state_dict(), args))
    theirs.load_state_dict(weights, strict=not args.tied)
    return ours, theirs, spec, args


def _width(name: str, p: Tensor) -> int:
    """Numbers that a result of a matrix is the sum of; biases and sinks are small beside it."""
    if name.endswith(("bias", "sinks.weight")):
        return 100 if name.endswith("expert_bias") else 16
    # Experts of GPT-OSS and Llama 4 are matrices [in, out].
    return p.size(-2) if name.endswith(("gate_up", "down")) else p.size(-1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_modules_logits_and_gradients_equal_those_of_transformers(variant, tmp_path):
    ours, theirs, spec, args = pair(variant)
    tokens = tokens_of(args)
    balanced = getattr(args, "aux_loss", 0.0) > 0
    theirs.config.output_router_logits = balanced
    trace = trace_transformers(theirs, spec, args, tokens, tmp_path)
    found = compare(trace_ours(ours, tokens), trace)
    if balanced:
        # Here the losses of routers have gradients alone.
        del found["loss"]
    compared = {one.name for one in chain(*found.values())}
    assert max(chain(*found.values())).relative < 4e-6
    parameters = {name for name, _ in ours.named_parameters()}
    # Experts have their own order of tokens; factors of Gemma are in other modules.
    own = ("experts", "sinks", "tok_embeddings", "q_norm")
    modules = {name.rpartition(".")[0] for name in parameters}
    assert parameters | {spec.head} <= compared
    assert not {name for name in modules - compared if not name.endswith(own)}


@pytest.mark.parametrize("variant", ["gemma3", "llama4", "deepseek_v3"])
@torch.no_grad()
def test_documents_of_a_row_compute_what_each_computes_alone(variant):
    """One is longer than a window, a chunk and a floor of the temperature, and one is short."""
    ours, theirs, _, args = pair(variant)
    tokens = tokens_of(args)
    lengths = [50, 3, tokens.size(1) - 53]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand_as(tokens)
    found = ours(tokens, doc_ids=documents).split(lengths, 1)
    for part, own in zip(found, tokens.split(lengths, 1), strict=True):
        torch.testing.assert_close(part, theirs(own).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "variant",
    ["deepseek_v3", "deepseek_v3, as v2", "mixtral", "qwen3_moe, every second block"],
)
def test_files_of_transformers_there_and_back(variant, tmp_path):
    ours, theirs, spec, args = pair(variant)
    check_files(theirs, ours.state_dict(), spec, args, tmp_path)


@pytest.mark.parametrize(
    "family", [name for name, spec in SPECS.items() if issubclass(spec.args_class, LlamaArgs)]
)
def test_each_flavor_has_as_many_parameters_as_in_transformers_and_its_config_json_describes_it(
    family,
):
    spec = SPECS[family]
    for flavor, published in spec.flavors.items():
        # Further blocks are alike; PUBLISHED counts whole models.
        layers = 3 + getattr(published, "n_dense_layers", 0)
        args = replace(published, vocab_size=published.vocab_size or 512, n_layers=layers)
        with torch.device("meta"):
            model = spec.build(args)
            theirs = theirs_of(spec.hf_config(args))
        count = sum(p.numel() for p in model.parameters())
        assert (
            count == sum(p.numel() for p in theirs.parameters()) == spec.count_parameters(args)
        ), flavor
        back = spec.args_from_hf(spec.hf_config(args))
        wanted = replace(
            args,
            max_seq_len=back.max_seq_len,
            ffn_dim=args.ffn_width,
            n_kv_heads=args.kv_heads,
            ffn_dim_multiplier=1.0,
            multiple_of=256,
        )
        assert back == wanted and spec.hf_config(back) == spec.hf_config(args), flavor
        assert from_record(as_record(family, args)) == (family, args)


@pytest.mark.parametrize(
    ("args", "changes", "words"),
    [
        (MISTRAL, {"model_type": "llama"}, "model_type is 'llama', and this family is 'mistral'"),
        (MISTRAL, {"num_hidden_layers": 10**9}, "num_hidden_layers is more than 10000"),
        (LLAMA4, {"interleave_moe_layer_step": 9}, "no block has experts"),
        (V3, {"topk_group": 9}, "topk_group must be at most n_group = 4"),
        (LLAMA4, {"model_type": "llama4"}, "text_config is missing"),
        (
            OLMO3,
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e5}}},
            "is 10000.0 in layers without a window and 100000.0 in the others; an OLMo 3 here",
        ),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; the models"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive, got 0"),
    ],
)
def test_another_config_json_is_refused(args, changes, words):
    """Entries that `transformers` takes or ignores; test_config_fields.py has all others."""
    spec = spec_of(args)
    with pytest.raises(ValueError, match=words):
        spec.args_from_hf({**spec.hf_config(args), **changes})


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (V2, {"norm_topk": True}, "norm_topk is true"),
        (V2, {"group_best": 2}, "group_best is 2, .*-V2 .* model.overrides.group_best = 1"),
        (V3, {"group_best": 1}, "group_best is 1, .*-V3 .* model.overrides.group_best = 2"),
        (V3, {"latent_norm_eps": 1e-5}, "latent_norm_eps is 1e-05, and DeepSeek .* has 1e-06"),
        (V3, {"last_norm_eps": 1e-5}, r"train with model\.overrides\.last_norm_eps = 1e-06"),
        (GPT_OSS, {"bias_update": 0.001}, "no biases of experts"),
        (QWEN3_MOE, {"bias_update": 0.001}, "no biases of experts"),
        (LLAMA4, {"bias_update": 0.001}, "no biases of experts"),
        (LLAMA4, {"score": "softmax"}, "score is 'softmax'"),
    ],
)
def test_what_transformers_has_not_is_not_exported(base, changes, words):
    spec = spec_of(base)
    for function in (spec.hf_config, spec.hf_names)[: 2 if "bias_update" in changes else 1]:
        function(base)
        with pytest.raises(ValueError, match=words):
            function(replace(base, **changes))


def test_softmax_scores_with_biases_are_not_exported():
    spec, key = SPECS["deepseek_v3"], "checkpoint.last_save_in_hf"
    assert "has no biases of experts" in spec.why_not(spec.flavors["debugmodel"], key)
    assert not spec.why_not(V2, key) and not spec.why_not(V3, key)


def test_epsilons_of_latents_and_of_the_last_norm_decide_logits():
    assert deciding(replace(V3, last_norm_eps=1e-6)) == deciding(V3)
    changed = {"latent_norm_eps": 1e-4, "last_norm_eps": 1e-5}
    assert deciding(replace(V3, **changed)) == {**deciding(V3), **changed}
    model = SPECS["deepseek_v3"].build(replace(V3, norm_eps=1e-3, **changed))
    attention = model.layers["1"].attention
    assert (attention.q_norm.eps, attention.kv_norm.eps, model.norm.eps) == (1e-4, 1e-4, 1e-5)


#: As published: `transformers` 4 wrote one table, for layers without a window.
OLDER = {
    "olmo3": {
        "rope_theta": 500000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
        },
    },
    "gemma3": {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    },
}


@pytest.mark.parametrize("family", OLDER)
@torch.no_grad()
def test_a_config_json_of_transformers_4_describes_the_same_model(family):
    spec = SPECS[family]
    config = spec.hf_config(replace(OLMO3, full_every=4) if family == "olmo3" else GEMMA3)
    for name in ("rope_parameters", "layer_types"):
        config.pop(name)
    config |= OLDER[family]
    args = replace(spec.args_from_hf(config), max_seq_len=128)
    assert args.rope_scaling is not None
    ours = spec.build(args)
    theirs = theirs_of(config)
    theirs.load_state_dict(spec.to_hf(ours.state_dict(), args), strict=not args.tied)
    tokens = tokens_of(args)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_gates_and_what_they_multiply_are_clamped_as_in_transformers():
    ours, theirs, spec, args = pair("gpt_oss")
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("gate_up"):
                parameter *= 6
    names = spec.hf_names(args)
    theirs.load_state_dict(in_memory(spec.to_hf(ours.state_dict(), args)))
    found, expected = ours(tokens_of(args)), theirs(tokens_of(args)).logits
    assert relative(found, expected) < 1e-5
    for out in (found, expected):
        out.square().sum().backward()
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, theirs.get_parameter(names[name]).grad) < 2e-5, name


def test_blocks_for_further_tokens_are_left_out(tmp_path, caplog):
    from safetensors.torch import save_file

    ours, _, spec, _ = pair("deepseek_v3")
    values = spec.to_hf(ours.state_dict(), V3)
    copies = {name: tensor.clone() for name, tensor in values.items()}
    for name in ("eh_proj", "enorm", "self_attn.o_proj", "shared_head.head"):
        copies[f"model.layers.{V3.n_layers}.{name}.weight"] = torch.randn(8, 8)
    save_file(copies, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {**spec.hf_config(V3), "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level("INFO"):
        weights = open_weights(tmp_path)
    wanted = in_our_names(values, spec.hf_names(V3))
    assert weights.parts.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights.read(name), tensor), name
    (line,) = caplog.messages
    assert "4 tensors left out, model.layers.3.eh_proj.weight and others" in line
    assert "multi-token prediction" in line


def test_a_block_has_the_theta_of_its_window():
    gemma = SPECS["gemma3"].flavors["27B"]
    assert [gemma.of_block(n).rope_theta for n in range(6)] == [1e4] * 5 + [1e6]
