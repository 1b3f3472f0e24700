"""Llama 4 beside `test_families.py`: chunks, published configs, what has no form in files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.test_families import LLAMA4, pair
from tests.support.llamas import tokens_of
from titanlite.models import ShapeError, get_spec
from titanlite.models.counts import count_active_parameters
from titanlite.models.document_attention import chunk_ids

SPEC = get_spec("llama4")


def test_chunks_are_counted_from_the_beginning_of_a_document() -> None:
    documents = torch.tensor([[7, 7, 7, 7, 7, 2, 2, 2, 2, 9], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
    assert chunk_ids(documents, 4).tolist() == [
        [1, 1, 1, 1, 2, 3, 3, 3, 3, 4],
        [1, 1, 1, 1, 2, 2, 2, 2, 3, 3],
    ]


@torch.no_grad()
def test_documents_of_a_row_compute_what_each_computes_alone() -> None:
    """Documents longer than a chunk and a floor of the temperature, and one that is shorter."""
    ours, theirs, _, args = pair("llama4")
    tokens = tokens_of(args)
    assert isinstance(ours, nn.Module) and args.chunk == 24  # type: ignore[attr-defined]
    lengths = [50, 3, tokens.size(1) - 53]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand_as(tokens)
    found = ours(tokens, doc_ids=documents).split(lengths, 1)
    for part, own in zip(found, tokens.split(lengths, 1), strict=True):
        torch.testing.assert_close(part, theirs(own).logits, atol=1e-5, rtol=1e-5)


#: Entries of `text_config` in the published files of both, as other projects quote them. The files
#: themselves need an accepted licence, and were not read.
_PUBLISHED: dict[str, Any] = {
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
_SCOUT: dict[str, Any] = {
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
_MAVERICK: dict[str, Any] = {
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}


@pytest.mark.parametrize(
    ("flavor", "entries"), [("17Bx16E", _SCOUT), ("17Bx128E", _MAVERICK)], ids=str
)
def test_a_published_config_is_the_flavor(flavor: str, entries: dict[str, Any]) -> None:
    whole = {"model_type": "llama4", "text_config": {**_PUBLISHED, **entries}, "vision_config": {}}
    args = SPEC.args_from_hf(whole)
    assert args == SPEC.args_from_hf(whole["text_config"])
    assert args.max_seq_len == entries["max_position_embeddings"]
    assert args == replace(SPEC.flavors[flavor], max_seq_len=args.max_seq_len)
    kinds = [args.of_block(index).rotary is None for index in range(8)]
    assert kinds == [False, False, False, True] * 2


@pytest.mark.parametrize(
    ("flavor", "active"), [("17Bx16E", 17_172_894_720), ("17Bx128E", 17_184_691_200)]
)
def test_active_parameters_are_those_that_torchtitan_counts(flavor: str, active: int) -> None:
    assert count_active_parameters(SPEC.flavors[flavor]) == active


def test_attention_outside_the_chunk_costs_nothing() -> None:
    args = SPEC.flavors["17Bx16E"]
    more = SPEC.flops_per_token(args, 32768) - SPEC.flops_per_token(args, 8192)
    assert more == 12 * 12 * 5120 * (32768 - 8192)


def test_what_transformers_has_not_is_not_exported() -> None:
    for changes, words in (
        ({"bias_update": 0.001}, "no biases of experts"),
        ({"score": "softmax"}, "score is 'softmax'"),
    ):
        for function in (SPEC.hf_names, SPEC.hf_config):
            with pytest.raises(ValueError, match=words):
                function(replace(LLAMA4, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sparse_step": 9}, "no block has experts"),
        ({"score": "softmax_of_chosen", "top_k": 2}, 'score must be "sigmoid" or "softmax"'),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        replace(LLAMA4, **changes)
