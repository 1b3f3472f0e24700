"""Weights in MXFP4, as GPT-OSS is published, against the code of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf import open_hf
from titanlite.models import get_spec
from titanlite.models.gpt_oss import GptOssArgs

SPEC = get_spec("gpt_oss")
ARGS = GptOssArgs(
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
MATRICES = ("gate_up_proj", "down_proj")


def published(folder: Path) -> dict[str, Tensor]:
    """Write a folder whose experts are packed; return its tensors."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, tensor in SPEC.to_hf(SPEC.build_on_meta(ARGS).state_dict(), ARGS).items():
        if not name.endswith(MATRICES):
            tensors[name] = torch.randn(tensor.shape).bfloat16()
            continue
        experts, rows, columns = tensor.shape
        shape = (experts, columns, rows // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(256, shape, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(251, shape[:3], dtype=torch.uint8)
    write(folder, tensors)
    config = {**SPEC.hf_config(ARGS), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_packed_experts_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = published(tmp_path)
    weights = open_hf(tmp_path, None, None)
    assert weights.family == "gpt_oss"
    for ours, theirs in SPEC.hf_names(weights.args).items():
        if theirs in tensors:
            assert torch.equal(weights.read(ours), tensors[theirs])
            continue
        packed = tensors[f"{theirs}_blocks"], tensors[f"{theirs}_scales"]
        expected = convert_moe_packed_tensors(*packed)
        found = weights.read(ours)
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected), ours
        assert weights.entries()[ours][:2] == ["bfloat16", list(expected.shape)]
        # What a rank reads of it.
        part = weights.parts[ours][0].read((slice(1, 3), slice(17, 51), slice(5, 40)))
        assert torch.equal(part, expected[1:3, 17:51, 5:40])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no scales", "down_proj_blocks has type U8: integers of a quantised model"),
        ("shape", "expected \\[experts, out, in / 32, 16\\]"),
    ],
)
def test_others_are_refused(tmp_path: Path, change: str, words: str) -> None:
    tensors = published(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    if change == "no scales":
        del tensors[f"{name}_scales"]
    else:
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][..., :8].contiguous()
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=words):
        open_hf(tmp_path, None, None)
