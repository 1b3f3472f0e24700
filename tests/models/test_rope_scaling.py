"""Scalings of RoPE against those of `transformers`: tables, logits, config.json, generated text."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from titanlite.models import LlamaArgs, RopeScaling, get_spec
from titanlite.models.args import as_record
from titanlite.models.recorded_args import from_record
from titanlite.models.rope import Rope
from titanlite.models.rope_scaling import Scaling

#: The original length of all scalings here.
ORIGINAL = 64
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
TABLES: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN,
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    "yarn, its own": {**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0},
}
#: Heads of 16 numbers: 8 pairs.
ARGS = LlamaArgs(64, 2, 4, n_kv_heads=2, vocab_size=96, rope_theta=5e3, max_seq_len=512)


def args_of(name: str, base: LlamaArgs = ARGS) -> LlamaArgs:
    return replace(base, rope_scaling=Scaling.parse(TABLES[name]))


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_transformers_bit_for_bit(name):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    args = args_of(name)
    reference = LlamaRotaryEmbedding(LlamaConfig(**get_spec("llama3").hf_config(args)))
    cos, sin = reference(torch.zeros(1), torch.arange(300).unsqueeze(0))
    rope = Rope(16, args.max_seq_len, args.rope_theta, args.rope_scaling)
    found = rope(300)
    # Llama 3.1's is blended by another formula, in which the last bits differ.
    tolerance = 1e-5 if name == "llama3" else 0.0
    torch.testing.assert_close(found.cos[:, 0], cos[0, :, :8], atol=tolerance, rtol=0)
    torch.testing.assert_close(found.sin[:, 0], sin[0, :, :8], atol=tolerance, rtol=0)
    assert (found.cos.dtype, rope.cos.dtype) == (torch.float32, torch.float32)


# config.json


@pytest.mark.parametrize("name", TABLES)
def test_a_config_json_of_either_version_gives_the_scaling_back(name):
    from transformers import LlamaConfig

    spec = get_spec("llama3")
    args = args_of(name)
    written = spec.hf_config(args)
    newer = {key: value for key, value in written.items() if key != "rope_scaling"}
    older = {key: value for key, value in written.items() if key != "rope_parameters"}
    kind = older["rope_scaling"]["rope_type"]
    oldest = {**older, "rope_scaling": {**older["rope_scaling"], "type": kind}}
    oldest["rope_scaling"].pop("rope_type")
    saved = json.loads(LlamaConfig(**deepcopy(written)).to_json_string())
    for config in (written, newer, older, oldest, saved):
        found = spec.args_from_hf(config)
        assert (found.rope_scaling, found.rope_theta) == (args.rope_scaling, 5e3)
        assert spec.hf_config(found) == written
    assert from_record(as_record("llama3", args)) == ("llama3", args)
    assert from_record(json.loads(json.dumps(as_record("llama3", args)))) == ("llama3", args)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Without an original length it is `max_position_embeddings`.
        (
            {"rope_scaling": {"type": "yarn", "factor": 8.0}, "max_position_embeddings": 64},
            YARN,
        ),
        # What `transformers` does not read for this kind.
        ({"rope_parameters": {**YARN, "finetuned": True, "beta_fast": None}}, YARN),
    ],
)
def test_other_forms_of_config_json(changes, expected):
    spec = get_spec("llama3")
    args = spec.args_from_hf({**spec.hf_config(ARGS), **changes})
    assert args.rope_scaling == Scaling.parse(expected)


def test_a_scaling_of_llama_3_is_recorded_as_before():
    """Fingerprints of checkpoints are made of it."""
    assert asdict(RopeScaling(8.0)) == {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context": 8192,
    }
    same = {**TABLES["llama3"], "rope_type": "llama3"}
    assert Scaling.parse(same) == Scaling.parse(TABLES["llama3"]) == RopeScaling(8.0, 1.0, 4.0, 64)
    linear = asdict(args_of("linear"))
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


# Configs
