"""Weights in other formats: what `transformers` and torch read of them, and the way back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.checkpoints import PRINTS, assert_equal, flip, names, options
from tests.support.llamas import built
from tests.support.pool import Pools
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.cli.hub.export_weights import convert, open_source
from titanlite.dist.dist_env import DistEnv
from titanlite.models import LlamaArgs, RopeScaling
from titanlite.models.args import as_record

ARGS = LlamaArgs(
    dim=48, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=96, multiple_of=16, rope_theta=5e5
)
SCALED = RopeScaling(factor=8.0, original_context=16)
SHAPES = {
    "plain": ARGS,
    "tied": replace(ARGS, tied=True),
    "scaled": replace(ARGS, rope_scaling=SCALED),
}


def _save(world: DistEnv, folder: Path, args: LlamaArgs) -> None:
    model = built(args)
    optimizer = torch.optim.AdamW(model.parameters())
    about = {"model": as_record("llama3", args)}
    checkpointer = Checkpointer(options(folder), world, PRINTS, about)
    checkpointer.save(7, model, optimizer, {"tokens_seen": 1})
    checkpointer.close()


@pytest.fixture(scope="module")
def saved(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each shape, by its name."""
    root = tmp_path_factory.mktemp("saved")
    for name, args in SHAPES.items():
        pool(1).run(_save, root / name, args)
    return {name: root / name / "step-7" for name in SHAPES}


TOKENS = torch.arange(40).remainder(96)[None] * 7 % 96


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_the_same_logits_and_the_way_back_is_exact(saved, tmp_path, shape):
    from transformers import AutoModelForCausalLM

    target = tmp_path / "hf"
    in_shards = shape == "tied"
    shard_bytes = 60_000 if in_shards else 1 << 30
    assert convert(saved[shape], target, "hf", shard_bytes=shard_bytes) == target
    assert (target / "model.safetensors").exists() != in_shards
    assert (target / "model.safetensors.index.json").exists() == in_shards
    modes = {path.stat().st_mode for path in target.iterdir()}
    assert len(modes) == 1, "who may read the one may read the others"
    config = json.loads((target / "config.json").read_bytes())
    assert (config["torch_dtype"], config["rope_theta"]) == ("float32", 5e5), "for transformers 4"
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        ours = built(SHAPES[shape])(TOKENS)
        other = theirs(TOKENS).logits
    assert torch.linalg.norm(ours - other) / torch.linalg.norm(other) < 2e-6
    assert names(tmp_path) == ["hf"], "nothing is left aside"
    back = open_source(target)
    assert_equal({name: back.read(name) for name in back.empty}, _weights(saved[shape]))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    contents = Contents(folder)
    return {
        n.removeprefix("model."): contents.read(n)
        for n in contents.manifest.tensors
        if n.startswith("model.")
    }


def test_precision_changes_once_and_exactly(saved, tmp_path):
    half = convert(saved["plain"], tmp_path / "half", "hf", "bfloat16")
    after = open_source(convert(half, tmp_path / "full", "hf", "float32")).read
    for name, before in _weights(saved["plain"]).items():
        assert torch.equal(after(name), before.bfloat16().float())


def test_existing_targets_are_never_overwritten(saved, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("folder", "file"):
        with pytest.raises(CheckpointError, match="is there already"):
            convert(saved["plain"], tmp_path / name, "hf")
    assert (tmp_path / "file").read_text() == "mine"
    assert names(tmp_path / "folder") == []


def test_bad_sources_are_refused_and_leave_nothing(saved, tmp_path):
    damaged = shutil.copytree(saved["plain"], tmp_path / "damaged" / "step-7")
    flip(damaged / "__0_0.distcp")
    cases: list[tuple[Path, str]] = [
        (damaged, "has changed since it was written"),
        (Path(__file__).parent / "golden" / "format-2", "does not say which model it is of"),
    ]
    hf = convert(saved["plain"], tmp_path / "hf", "hf")
    config = json.loads((hf / "config.json").read_text())
    for key, value, message in (
        ("num_hidden_layers", 3, "missing"),
        ("attention_bias", True, "attention_bias is True"),
        ("tie_word_embeddings", True, "differs from the embedding"),
    ):
        other = tmp_path / key
        other.mkdir()
        (other / "model.safetensors").symlink_to(hf / "model.safetensors")
        (other / "config.json").write_text(json.dumps({**config, key: value}))
        cases.append((other, message))
    (tmp_path / "out").mkdir()
    for source, message in cases:
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "out" / "x", "hf")
    assert names(tmp_path / "out") == []


def test_a_full_disk_is_named_before_it_is_written(saved, tmp_path, monkeypatch):
    usage = SimpleNamespace(total=1 << 20, free=64 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"its weights take .*has 64\.0 KiB left"):
        convert(saved["plain"], tmp_path / "out", "hf")
    assert names(tmp_path) == []
