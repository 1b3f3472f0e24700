"""Files of other programs that are odd, or made to mislead: refused by file and tensor, or read as
their index says.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.reference import in_our_names
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.foreign_formats import open_weights
from titanlite.checkpoint.hf import open_hf
from titanlite.models import get_spec
from titanlite.models.gpt_oss import GptOssArgs

SPEC = get_spec("llama3")
ARGS = replace(
    SPEC.flavors["debugmodel"],
    dim=64,
    n_layers=1,
    n_heads=2,
    n_kv_heads=2,
    ffn_dim=96,
    vocab_size=32,
)
DOWN = "model.layers.0.mlp.down_proj.weight"


def hf_folder(folder: Path, **config: Any) -> dict[str, Tensor]:
    """Write a config.json; return the tensors under Hugging Face's names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SPEC.hf_config(ARGS), **config}))
    torch.manual_seed(0)
    shapes = SPEC.to_hf(SPEC.build_on_meta(ARGS).state_dict(), ARGS)
    return {name: torch.randn(tensor.shape) for name, tensor in shapes.items()}


def test_of_two_copies_of_a_tensor_the_index_names_the_one_that_counts(tmp_path):
    folder = tmp_path / "twice"
    tensors = hf_folder(folder)
    names = list(tensors)
    first = {name: tensors[name] for name in names[:6]}
    # In the order of the files the wrong one comes last.
    second = {names[0]: torch.zeros_like(tensors[names[0]])}
    second |= {name: tensors[name] for name in names[6:]}
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    places = dict.fromkeys(second, "b.safetensors") | dict.fromkeys(first, "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    opened = open_weights(folder)
    for name, tensor in in_our_names(tensors, SPEC.hf_names(ARGS)).items():
        assert torch.equal(opened.read(name), tensor), name


def test_exponents_are_no_scales_of_float8(tmp_path):
    folder = tmp_path / "mx"
    tensors = hf_folder(folder, quantization_config={"weight_block_size": [1, 32]})
    tensors[DOWN] = exact = tensors[DOWN].to(torch.float8_e4m3fn)
    exponents = torch.full((64, 3), 128, dtype=torch.uint8)
    tensors[f"{DOWN}_scale"] = exponents
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{DOWN} has scales of type uint8"):
        open_weights(folder)
    # The type of exponents has their values.
    tensors[f"{DOWN}_scale"] = exponents.view(torch.float8_e8m0fnu)
    save_file(tensors, folder / "model.safetensors")
    read = open_weights(folder).read("layers.0.feed_forward.w2.weight")
    assert torch.equal(read, exact.float() * 2)


#: Its published weights are in MXFP4.
GPT_OSS = get_spec("gpt_oss")
GPT_OSS_ARGS = GptOssArgs(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=96,
    vocab_size=96,
    n_experts=4,
    top_k=2,
    head_dim=16,
)


def published(folder: Path) -> dict[str, Tensor]:
    """Write a folder whose experts are packed; return its tensors."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    shapes = GPT_OSS.to_hf(GPT_OSS.build_on_meta(GPT_OSS_ARGS).state_dict(), GPT_OSS_ARGS)
    for name, tensor in shapes.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = torch.randn(tensor.shape).bfloat16()
            continue
        experts, rows, columns = tensor.shape
        shape = (experts, columns, rows // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(256, shape, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(251, shape[:3], dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**GPT_OSS.hf_config(GPT_OSS_ARGS), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_packed_experts_are_read_as_transformers_reads_them(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = published(tmp_path)
    weights = open_hf(tmp_path, None, None)
    assert weights.family == "gpt_oss"
    for ours, theirs in GPT_OSS.hf_names(weights.args).items():
        if theirs in tensors:
            assert torch.equal(weights.read(ours), tensors[theirs])
            continue
        packed = (tensors[f"{theirs}_{kind}"] for kind in ("blocks", "scales"))
        expected = convert_moe_packed_tensors(*packed)
        found = weights.read(ours)
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected), ours
        assert weights.entries()[ours][:2] == ["bfloat16", list(expected.shape)]
        # The bytes that a rank reads of it.
        part = weights.parts[ours][0].read((slice(1, 3), slice(17, 51), slice(5, 40)))
        assert torch.equal(part, expected[1:3, 17:51, 5:40])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no scales", "down_proj_blocks has type U8: integers of a quantised model"),
        ("shape", "expected \\[experts, out, in / 32, 16\\]"),
    ],
)
def test_others_are_refused(tmp_path, change, words):
    tensors = published(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    if change == "no scales":
        del tensors[f"{name}_scales"]
    else:
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][..., :8].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        open_hf(tmp_path, None, None)
