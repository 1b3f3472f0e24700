"""Files of the Llama 4 models that read images: their text part is read, and written alone.

`Llama4ForConditionalGeneration` of `transformers` writes the files here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.test_from_folder import FLAGS
from tests.support.harness import full
from tests.support.reference import in_our_names
from titanlite import build
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.foreign_formats import open_weights
from titanlite.cli.hub.export_weights import convert
from titanlite.dist.dist_env import DistEnv
from titanlite.models import get_spec
from titanlite.resolve.load import check_config

SPEC = get_spec("llama4")
#: Experts in every second layer, the last one without RoPE; a chunk is shorter than 32 tokens.
TEXT: dict[str, Any] = {
    "vocab_size": 2304,
    "hidden_size": 64,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 12,
    "floor_scale": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
}
IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 48,
    "image_size": 28,
    "projector_input_dim": 48,
    "projector_output_dim": 48,
}
TOKENS = (torch.arange(32) * 37 % 2304).unsqueeze(0)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model of `transformers`, whose weights all matter."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Llama4Config(text_config=TEXT, vision_config=IMAGES)
    made = transformers.Llama4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            scale = 1.0 if "norm" in name else 0.0
            parameter.copy_(scale + 0.2 * torch.randn_like(parameter))
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, in several files."""
    path = tmp_path_factory.mktemp("llama4") / "images"
    model.save_pretrained(path, max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


def stored(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def text_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the text part, under the names of the text model."""
    start = "language_model."
    return {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith(start)
    }


def test_the_text_part_is_read_and_a_line_tells_what_is_left_out(folder, caplog):
    files = stored(folder)
    others = [name for name in files if not name.startswith("language_model.")]
    with caplog.at_level("INFO"):
        weights = open_weights(folder)
    (line,) = caplog.messages
    assert f"{len(others)} tensors left out, {min(others)} and others: they read images" in line
    assert {name.split(".")[0] for name in others} == {"vision_model", "multi_modal_projector"}
    args = weights.args
    assert (weights.family, args.chunk, args.max_seq_len) == ("llama4", 12, 256)
    names = SPEC.hf_names(args)
    assert set(names.values()) == text_of(files).keys()
    for ours, theirs in names.items():
        assert torch.equal(weights.read(ours), files[f"language_model.{theirs}"]), ours


def test_an_export_is_the_text_model_alone_bit_for_bit(model, folder, tmp_path):
    import transformers

    convert(folder, tmp_path / "text", "hf")
    content = read(tmp_path / "text")
    assert not {"text_config", "vision_config", "image_token_index"} & content.keys()
    assert content["max_position_embeddings"] == 256
    written = stored(tmp_path / "text")
    wanted = text_of(stored(folder))
    assert written.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", output_loading_info=True
    )
    assert type(back) is transformers.Llama4ForCausalLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(2304, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(back.eval()(tokens).logits, model(tokens).logits)


def _loaded(world: DistEnv, *flags: str) -> dict[str, Tensor]:
    """The weights of a run from a folder, and its logits of `TOKENS`."""
    run = check_config(list(flags), world.size)[1]
    parts = build(run, world)
    assert parts.checkpointer is not None
    assert parts.checkpointer.load(parts.model, parts.optimizer) is not None
    with torch.no_grad():
        logits = parts.model(TOKENS)
    state = {name: full(parameter) for name, parameter in parts.model.named_parameters()}
    parts.close()
    return {"logits": logits, **state}


def test_a_run_takes_shape_and_weights_from_the_folder(pool, tmp_path, model, folder):
    flags = [*FLAGS, "--model.name=llama4", f"--checkpoint.initial_load_path={folder}"]
    flags += [f"--job.dump_folder={tmp_path}", "--training.global_batch_size=4"]
    with torch.no_grad():
        expected = model(TOKENS).logits
    names = SPEC.hf_names(SPEC.args_from_hf(read(folder)))
    wanted = in_our_names(text_of(stored(folder)), names)
    for found in pool(2).run(_loaded, *flags):
        torch.testing.assert_close(found.pop("logits"), expected, atol=2e-5, rtol=1e-4)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return content


def test_another_text_part_is_refused(folder):
    content = read(folder)
    other = {**content["text_config"], "model_type": "llama"}
    for text, words in ((None, "text_config is None, expected a table"), (other, "'llama4_text'")):
        with pytest.raises(ValueError, match=words):
            SPEC.args_from_hf({**content, "text_config": text})


def test_a_tensor_that_is_there_twice_is_an_error(folder, tmp_path):
    files = stored(folder)
    files["model.norm.weight"] = files["language_model.model.norm.weight"].clone()
    save_file(files, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(read(folder)))
    with pytest.raises(CheckpointError, match=r"both .*model.norm.weight and .*take one of them"):
        open_weights(tmp_path)
