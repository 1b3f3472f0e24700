"""`model.name = "hf"`: models of `transformers` against `transformers` itself, sharded, drawn,
saved and resumed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf import SMALL, TOML, config_flags, content, train_losses
from tests.support.hf_compare import alone, differences, flags_of, on_ranks
from tests.support.llamas import VARIANTS, built, tokens_of
from tests.support.pool import Pools
from tests.support.processes import python
from tests.support.refusals import refusal
from titanlite.config.errors import ConfigError
from titanlite.models import Init, ShapeError, get_spec
from titanlite.models.hf import args_from_hf
from titanlite.resolve.load import check_config

SPEC = get_spec("hf")
TIED = {"gemma", "opt", "gpt2"}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma", {"training__fsdp_units": "GemmaAttention,GemmaMLP"}),
        ("opt", {}),
        ("phi", {"activation_checkpoint__mode": "full"}),
        ("gpt2", {"training__compile": "true"}),
    ],
    ids=str,
)
def test_gradients_on_two_ranks_are_those_of_transformers(pool, tmp_path, family, keys):
    found = pool(2).run(on_ranks, flags_of(tmp_path, family, **keys), False)[0]
    expected = alone(family, found.weights, False)
    # OPT's biases of keys have no gradient but rounding.
    assert max(differences(found, expected).values()) < 2e-5
    args = args_from_hf(content(family))
    assert set(found.weights) == set(SPEC.hf_names(args))
    assert bool(SPEC.tied(args)) == (family in TIED)


@pytest.mark.slow
def test_its_linears_may_be_in_float8(pool, tmp_path):
    on = {"float8__enable_float8_linear": "true", "float8__emulate": "true"}
    found = pool(2).run(on_ranks, flags_of(tmp_path, "llama", **on), False)[0]
    expected = alone("llama", found.weights, False)
    assert 1e-6 < abs(found.loss / expected.loss - 1) < 2e-2


def test_recomputed_dropout_draws_the_same_numbers(pool, tmp_path):
    """OPT's dropout is a number that it hands to a function, not a module."""
    (tmp_path / "config.json").write_text(json.dumps({**content("opt"), "dropout": 0.3}))
    flags = [f"--model.hf_config={tmp_path}", "--training.steps=2"]
    none, full = (
        pool(1).run(
            train_losses,
            config_flags(tmp_path / mode, *flags, f"--activation_checkpoint.mode={mode}"),
        )
        for mode in ("none", "full")
    )
    assert full == none


def test_a_llama_is_the_same_model_by_both_names():
    args = VARIANTS["all"]
    ours = built(args)
    llama = get_spec("llama3")
    theirs = args_from_hf(llama.hf_config(args))
    model = SPEC.build(theirs)
    model.load_state_dict(llama.to_hf(ours.state_dict(), args), strict=not args.tied)
    tokens = tokens_of(args)
    torch.testing.assert_close(model(tokens), ours(tokens))
    assert SPEC.count_parameters(theirs) == llama.count_parameters(args)
    assert SPEC.flops_per_token(theirs, 64) == llama.flops_per_token(args, 64)
    assert sorted(SPEC.hf_names(theirs)) == sorted(llama.hf_names(args).values())


def test_rules_are_those_of_the_model_itself():
    rule = SPEC.init_rule
    gpt2 = args_from_hf(content("gpt2"))
    assert rule("transformer.h.1.mlp.c_proj.weight", gpt2) == Init(
        "normal", std=0.02 / 2
    )  # / sqrt(2 * 2 layers)
    assert rule("transformer.h.1.attn.c_attn.bias", gpt2) == Init("zeros")
    assert rule("model.norm.weight", args_from_hf(content("gemma"))) == Init(
        "zeros"
    )  # it multiplies by 1 + weight
    assert rule("model.layers.0.mlp.up_proj.weight", args_from_hf(content("qwen2"))) == Init(
        "normal", std=0.05
    )


def test_a_config_that_is_nowhere_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    problem = refusal([f"--job.config_file={TOML}", "--model.hf_config=nobody/nothing"])
    assert problem.key == "model.hf_config"
    assert 'cannot read "nobody/nothing"' in problem.message


WIDTHS = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}


def test_an_encoder_is_refused_and_a_decoder_of_its_kind_sees_no_later_token():
    bert = {"model_type": "bert", "num_attention_heads": 4, **WIDTHS}
    with pytest.raises(
        ShapeError, match="sees those after it.*set model.overrides.is_decoder = true"
    ):
        args_from_hf(bert)
    model = SPEC.build(args_from_hf(bert, {"is_decoder": True})).eval()
    tokens = torch.arange(8)[None]
    changed = torch.cat([tokens[:, :-1], tokens[:, -1:] + 9], 1)
    assert model(tokens)[:, :-1].equal(model(changed)[:, :-1])
    args_from_hf({**bert, "model_type": "gpt_neox"})  # its config has is_decoder = false too


def test_blocks_that_ranks_skip_at_random_are_refused():
    bart = {"model_type": "bart", "decoder_layerdrop": 0.1, "decoder_layers": 1, "d_model": 32}
    content = {**bart, "vocab_size": 64}
    with pytest.raises(ShapeError, match="set model.overrides.decoder_layerdrop = 0.0"):
        args_from_hf(content)
    args_from_hf(content, {"decoder_layerdrop": 0.0})


def test_other_models_and_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ShapeError, match=r"needs the package transformers.*pip install 'titanlite\[hf\]'"
    ):
        args_from_hf({**content("llama"), "hidden_size": 32})
    with pytest.raises(ShapeError, match="initial values of .*A_log"):
        monkeypatch.undo()
        args_from_hf({"model_type": "mamba", **WIDTHS})
    program = (
        "import sys; from titanlite.resolve.load import check_config; "
        "check_config(['--job.config_file=debug_model.toml'], 2); assert not {'torch', "
        "'transformers'} & set(sys.modules)"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


MASKS = {"data__mask_documents": "true"}
#: Largest distance, as a share, of a loss and of each gradient.
WITHIN = 2e-6


def check(pool: Pools, folder: Path, kind: str, **keys: Any) -> None:
    """Hold a run against transformers."""
    documents = "data__mask_documents" in keys
    results = pool(2).run(on_ranks, flags_of(folder, kind, **keys), documents)
    expected = alone(kind, results[0].weights, documents)
    for result in results:
        shares = differences(result, expected)
        assert max(shares.values()) < WITHIN, shares
    if kind == "llama":
        together = alone(kind, results[0].weights, False)
        assert max(differences(together, expected).values()) > 0.1, "documents matter"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_chunks_and_document_masks_on_two_ranks_are_exact(pool, tmp_path, kind):
    check(pool, tmp_path, kind, training__loss_chunks=3, **MASKS)


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ({"model_type": "phi"}, "training.loss_chunks", "no plain linear without bias"),
        ({"model_type": "gemma2"}, "training.loss_chunks", "changes its logits after the head"),
        (
            {"model_type": "gemma2", "head_dim": 16},
            "data.mask_documents",
            "the attention of Gemma2ForCausalLM is its own",
        ),
        (
            {"model_type": "bloom", "n_layer": 2, "n_head": 4},
            "data.mask_documents",
            "the forward of BloomForCausalLM takes no position_ids",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "data.mask_documents",
            'RoPE tables of "dynamic" depend on the length',
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "data.mask_documents",
            "sees tokens of other documents",
        ),
        (
            {"model_type": "llama"},
            "training.tensor_parallel_degree",
            "is not supported by the model hf: its ModelSpec has no tensor_plan",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4},
            "activation_checkpoint.selective_ac_option",
            "change results in place that it would save; take a number",
        ),
    ],
    ids=str,
)
def test_a_model_that_cannot_do_it_says_why(tmp_path, content, key, words):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **content}))
    values = {"training.loss_chunks": "3", "data.mask_documents": "true"}
    value = "op" if "option" in key else values.get(key, "4")
    flags = [f"--model.hf_config={tmp_path}", "--training.seq_len=32", f"--{key}={value}"]
    flags.append("--activation_checkpoint.mode=selective")
    with pytest.raises(ConfigError) as caught:
        check_config([f"--job.config_file={TOML}", *flags], 4, training=False)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert words in problem.message


@pytest.mark.slow
def test_compiled_blocks_are_exact(pool, tmp_path):
    by_op = {
        "activation_checkpoint__mode": "selective",
        "activation_checkpoint__selective_ac_option": "op",
    }
    check(pool, tmp_path, "gpt_neox", training__compile="true", **MASKS, **by_op)
