"""Files of other programs that are odd, or made to mislead: refused by file and tensor, or read as
their index says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.foreign import open_weights
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
WQ = "layers.0.attention.wq.weight"


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
    for name, tensor in SPEC.from_hf(tensors, ARGS).items():
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


def meta_folder(folder: Path, files: int, change: Callable[[dict[Any, Any]], Any]) -> Path:
    """Write a folder of Meta's, whose files all hold the same changed tensors."""
    folder.mkdir()
    sizes = {"dim": 64, "n_layers": 1, "n_heads": 2, "norm_eps": 1e-5, "vocab_size": 32}
    (folder / "params.json").write_text(json.dumps({**sizes, "rope_theta": 5e5}))
    state = dict(weights())
    change(state)
    for number in range(files):
        torch.save(state, folder / f"consolidated.{number:02}.pth")
    return folder


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        (WQ, 3, f"its entry '{WQ}' is no tensor with a name"),
        (5, torch.ones(3), "its entry 5 is no tensor with a name"),
        (WQ, torch.ones(0, 64), f"{WQ} has 0 rows, and a head has 32"),
        (WQ, torch.ones(63, 64), f"{WQ} has 63 rows, and a head has 32"),
        (WQ, torch.ones(64), rf"{WQ} has the shape \[64\], and the whole \[64, 64\]"),
        (
            "norm.weight",
            torch.ones(2, 2),
            r"norm.weight has the shape \[2, 2\], and the whole \[64",
        ),
    ],
    ids=["number", "key", "no rows", "half a head", "vector", "matrix"],
)
def test_odd_entries_of_metas_files_are_refused_by_file_and_name(
    tmp_path: Path, files: int, entry: Any, value: Any, message: str
) -> None:
    folder = meta_folder(tmp_path / "in", files, lambda state: state.update({entry: value}))
    with pytest.raises(CheckpointError, match=rf"consolidated\.00\.pth.*{message}"):
        open_weights(folder)


@pytest.mark.parametrize("name", ["wq", "a.wq.b"])
def test_tensors_that_the_model_lacks_stay_under_their_names(tmp_path: Path, name: str) -> None:
    value = torch.ones(())
    folder = meta_folder(tmp_path / "in", 1, lambda state: state.update({name: value}))
    assert torch.equal(open_weights(folder).read(name), value)
