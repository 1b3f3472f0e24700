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
from titanlite.models import get_spec

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


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        name: torch.randn_like(tensor) for name, tensor in SPEC.build(ARGS).state_dict().items()
    }


def hf_folder(folder: Path, **config: Any) -> dict[str, Tensor]:
    """Write a config.json; return the tensors under Hugging Face's names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SPEC.hf_config(ARGS), **config}))
    return {name: tensor.contiguous() for name, tensor in SPEC.to_hf(weights(), ARGS).items()}


def test_of_two_copies_of_a_tensor_the_index_names_the_one_that_counts(tmp_path: Path) -> None:
    folder = tmp_path / "twice"
    tensors = hf_folder(folder)
    names = list(tensors)
    first = {name: tensors[name] for name in names[:6]}
    # In the order of the files the wrong one comes last.
    second = {names[0]: torch.zeros_like(tensors[names[0]])}
    second |= {name: tensors[name] for name in names[6:]}
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    places = {name: "a.safetensors" if name in first else "b.safetensors" for name in names}
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = open_weights(folder)
    for name, tensor in in_our_names(tensors, SPEC.hf_names(ARGS)).items():
        assert torch.equal(opened.read(name), tensor), name


def test_exponents_are_no_scales_of_float8(tmp_path: Path) -> None:
    folder = tmp_path / "mx"
    tensors = hf_folder(folder, quantization_config={"weight_block_size": [1, 32]})
    exact = tensors[DOWN].to(torch.float8_e4m3fn)
    tensors[DOWN] = exact
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
