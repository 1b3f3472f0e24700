"""Hugging Face's files in and out of runs: each rank reads and writes its part."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.support import s3
from tests.support.checkpoints import PRINTS, assert_equal, load, names, options
from tests.support.grid import FSDP, PP
from tests.support.harness import TINY, Run, batches, build_tiny
from tests.support.whole_runs import train_run
from titanlite.checkpoint.foreign_formats import open_weights
from titanlite.checkpoint.hf_save import begin_folder
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError, last_hf_step
from titanlite.checkpoint.store_paths import AnyPath, StorePath
from titanlite.cli.hub.export_weights import convert, open_source
from titanlite.cli.main import main
from titanlite.data.tokenizer import BUNDLED_TOKENIZER
from titanlite.dist.dist_env import DistEnv
from titanlite.models import LlamaArgs, get_spec
from titanlite.models.args import as_record

SPEC = get_spec("llama3")
RUN = Run(*batches(1, 4, 16, 192), [1e-3])
BLOCKS = "model.layers.0.self_attn.q_proj.weight"
SHARD = "model-00002-of-00003.safetensors"
#: It holds `BLOCKS`.
THIRD = "model-00003-of-00003.safetensors"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _folder(
    folder: Path, args: LlamaArgs = TINY, dtype: torch.dtype = torch.float32, shards: int = 3
) -> Path:
    """Published weights: random tensors in safetensors files, with index and config.json."""
    torch.manual_seed(1)
    shapes = SPEC.to_hf(SPEC.build_on_meta(args).state_dict(), args)
    tensors = {
        name: (torch.randn(t.shape) * 0.1 + (t.ndim == 1)).to(dtype) for name, t in shapes.items()
    }
    folder.mkdir(parents=True)
    listed = list(tensors)
    where = {}
    for i in range(shards):
        file = WHOLE if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in listed[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    _write_config(folder, args)
    return folder


def _write_config(folder: Path, args: LlamaArgs = TINY, **more: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**SPEC.hf_config(args), **more}))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


LAST = {"model_weights_only": True, "last_save_in_hf": True}


def _save(world: DistEnv, run: Run, source: Path, root: AnyPath) -> str:
    """Load weights as a run does; save as checkpoint after step 7, and in their format after 8."""
    model, optimizer, _ = build_tiny(world, run)
    about = {"model": as_record("llama3", run.args)}
    section = options(root, initial_load_path=str(source), **LAST)
    checkpointer = Checkpointer(section, world, PRINTS, about)
    checkpointer.load(model, optimizer)
    checkpointer.save(7, model, optimizer, {})
    last = checkpointer.save(8, model, optimizer, {}, weights_only="float32")
    checkpointer.close()
    return str(last)


LAYOUTS = {
    "tied-tp": replace(RUN, tensor=2, args=replace(TINY, tied=True)),
    "pp": replace(RUN, pipeline=2),
    "hsdp": replace(RUN, replicas=2),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("run", LAYOUTS.values(), ids=LAYOUTS)
def test_published_weights_come_back_bit_for_bit(pool, tmp_path, run):
    """HF → ranks → checkpoint → HF, and HF → ranks → last save: the same bytes per tensor."""
    source = _folder(tmp_path / "published", run.args)
    root = tmp_path / "checkpoint"
    last = root / "step-8-hf"
    assert pool(2).run(_save, run, source, root) == [str(last)] * 2
    assert names(root) == ["step-7", "step-8-hf"]
    for folder in (last, convert(root / "step-7", tmp_path / "hf", "hf")):
        assert_equal(_tensors(folder), _tensors(source))
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    for again in pool(2).run(load, run, root, initial_load_path=str(source), **LAST):
        assert "step-8-hf holds the weights of the last save" in again["error"]


@pytest.mark.parametrize(("grid", "block"), [((4, 2), [48, 32]), ((192, 1), None), ((1, 1), None)])
def test_float8_is_multiplied_by_its_scales(tmp_path, grid, block):
    """Scales per block (DeepSeek's), row or tensor."""
    folder = _folder(tmp_path / "in", shards=1)
    name = "model.layers.0.mlp.gate_proj.weight"
    weight = _tensors(folder)[name]
    rows, columns = weight.shape
    scale = torch.rand(grid) + 0.5
    height, width = block or (-(-rows // grid[0]), columns)
    wide = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
    exact = (weight / wide).to(torch.float8_e4m3fn)
    values = exact.float() * wide
    scale_name = f"{name}_scale_inv" if block else f"{name}_scale"
    _edit(folder / WHOLE, **{name: exact, scale_name: scale})
    about = {"quant_method": "fp8", **({"weight_block_size": block} if block else {})}
    _write_config(folder, quantization_config=about)
    weights = open_weights(folder)
    assert torch.equal(weights.read("layers.0.feed_forward.w1.weight"), values)
    part = weights.parts["layers.0.feed_forward.w1.weight"][0].read((slice(40, 70), slice(9, 60)))
    assert torch.equal(part, values[40:70, 9:60])


def _edit(file: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors of a file; None: take them out."""
    content = {**load_file(file), **tensors}
    kept = {name: one for name, one in content.items() if one is not None}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / SHARD).unlink(), f"{SHARD} is missing, which {INDEX} names: download it"),
        (lambda f: (f / INDEX).unlink(), "download the index of its 3 files"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing: copy it"),
        (lambda f: os.truncate(f / SHARD, 99), f"{SHARD} cannot be read"),
        (lambda f: _write_config(f, model_type="bert"), "model_type is 'bert'"),
        (
            lambda f: _edit(f / THIRD, **{BLOCKS: torch.zeros(3, 3).char()}),
            f"{BLOCKS} has type I8",
        ),
        (
            lambda f: _edit(f / THIRD, **{BLOCKS: torch.zeros(3, 3).to(torch.float8_e4m3fn)}),
            f"{BLOCKS} is float8_e4m3fn without a tensor",
        ),
    ],
)
def test_unusable_folders_are_refused_with_the_remedy(tmp_path, harm, message):
    harm(_folder(tmp_path / "in"))
    with pytest.raises(CheckpointError) as refused:
        open_weights(tmp_path / "in")
    assert message in str(refused.value)


@pytest.mark.slow
def test_weights_that_are_not_finite_are_refused_on_all_ranks(pool, tmp_path):
    nan = torch.full((64, 64), math.nan)
    _edit(_folder(tmp_path / "nan", shards=1) / WHOLE, **{BLOCKS: nan})

    def answers(source, **fields):
        place = {"initial_load_path": str(source), **fields}
        return pool(2).run(load, RUN, tmp_path / "checkpoint", **place)

    for answer in answers(tmp_path / "nan"):
        assert "holds values that are not finite" in answer["error"]
    for answer in answers(tmp_path / "nan", initial_load_model_only=False):
        assert "initial_load_model_only = true" in answer["error"]
    missing = _folder(tmp_path / "missing", shards=1)
    _edit(missing / WHOLE, **{BLOCKS: None})
    named = ["model.layers.0.attention.wq.weight"]
    assert answers(missing, allow_missing=named)[0]["error"] == ""


LARGE = LlamaArgs(dim=512, n_layers=6, n_heads=8, vocab_size=4096, multiple_of=256, max_seq_len=64)


def _memory() -> int:
    """This process's own memory, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def _growth(world: DistEnv, source: Path, root: Path) -> tuple[int, int]:
    """Return by how many bytes this rank's own memory grows at most while it loads, and the bytes
    of its shards.
    """
    model, optimizer, _ = build_tiny(world, replace(RUN, args=LARGE))
    shards = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    about = {"model": as_record("llama3", LARGE)}
    checkpointer = Checkpointer(options(root, initial_load_path=str(source)), world, PRINTS, about)
    seen = [_memory()]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(_memory())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    checkpointer._loader.load_weights(model)
    done.set()
    watcher.join()
    checkpointer.close()
    return max(seen) - seen[0], shards


@pytest.mark.slow
def test_a_rank_needs_memory_for_one_slice_beside_its_shard(pool, tmp_path):
    source = _folder(tmp_path / "large", LARGE, torch.bfloat16)
    for growth, shards in pool(2).run(_growth, source, tmp_path / "checkpoint"):
        assert shards > 45 << 20, "the bound below would not notice a copy of a rank's part"
        assert growth < 24 << 20, f"{growth / (1 << 20):.0f} MiB beside the shards"


def test_export_is_refused_when_the_logits_differ(pool, tmp_path, monkeypatch):
    pool(1).run(_save, RUN, _folder(tmp_path / "in"), tmp_path / "checkpoint")
    step = f"{tmp_path}/checkpoint/step-7"
    out = tmp_path / "out"
    assert main(["export", step, f"{out}/right"]) == 0
    assert main(["export", f"{out}/right", f"{out}/back", "--dtype=bfloat16"]) == 0
    assert names(out) == ["back", "right"]

    def swapped(args):
        found = SPEC.hf_names(args)
        one, other = (f"layers.1.feed_forward.w{i}.weight" for i in (1, 3))
        return {**found, one: found[other], other: found[one]}

    monkeypatch.setattr("titanlite.models.llama.LLAMA3", replace(SPEC, hf_names=swapped))
    assert main(["export", step, f"{out}/wrong"]) == 4
    assert names(out) == ["back", "right"]


def test_what_would_harm_or_hide_weights_is_told(pool, tmp_path, caplog):
    source = _folder(tmp_path / "in", shards=1)
    root = tmp_path / "run" / "checkpoint"
    (root / "step-99-hf").mkdir(parents=True)  # a save that was cut short
    pool(1).run(_save, RUN, source, root)
    for path in (root, root.parent):
        with pytest.raises(
            CheckpointError, match=r"newest weights are in .*step-8-hf: name that folder, or step-7"
        ):
            convert(path, tmp_path / "out", "hf")
    (answer,) = pool(1).run(load, RUN, tmp_path / "other", initial_load_path=str(root.parent))
    assert "newest weights are in" in answer["error"]

    weight = _tensors(source)[BLOCKS]
    weight[0, 0] = 1e6
    _edit(source / WHOLE, **{BLOCKS: weight})
    with pytest.raises(CheckpointError, match=r"wq.weight has values that float16 cannot hold"):
        convert(source, tmp_path / "half", "hf", "float16")

    shutil.copy(BUNDLED_TOKENIZER, source / "tokenizer.model")
    assert open_source(source / WHOLE).tokenizer == str(source)


def test_a_store_keeps_nothing_of_a_save_that_was_cut_short():
    final = StorePath(f"memory://{uuid.uuid4().hex}/step-8-hf")
    (final / "model-00001-of-00002.safetensors").write_bytes(b"half")
    assert last_hf_step(final.parent) == -1
    assert begin_folder(final) == final
    assert not names(final)


@pytest.mark.slow
def test_the_last_save_goes_to_a_store(pool, bucket, tmp_path):
    source = _folder(tmp_path / "in")
    pool(2).run(s3.there, bucket.environment, _save, replace(RUN, tensor=2), source, bucket.path)
    folder = bucket.path / "step-8-hf"
    assert {"config.json", WHOLE} <= set(names(folder))
    found = load_bytes((folder / WHOLE).read_bytes())
    assert_equal(found, _tensors(source))


SMALL = ["dim=64", "n_layers=2", "n_heads=4", "n_kv_heads=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", PP),
        ("mixtral", "parallelism.expert_parallel_degree"),
        ("llama4", FSDP),
    ],
)
def test_every_family_goes_out_of_runs_and_in(pool, tmp_path, family, layout):
    """One rank's last save → two ranks, which train at a rate of 0 → their last save: the same
    bytes per tensor.
    """
    flags = [
        "--checkpoint.enable_checkpoint",
        "--checkpoint.model_weights_only",
        "--checkpoint.last_save_in_hf",
        f"--model.name={family}",
        *(f"--model.overrides.{size}" for size in SMALL),
        "--training.steps=1",
        "--training.batch_size=2",
    ]

    def train(ranks, name, *more):
        done = pool(ranks).run(train_run, str(tmp_path / name), *flags, *more)[0]
        assert done["error"] == ""
        return tmp_path / name / "checkpoint" / "step-1-hf"

    source = train(1, "one")
    start = [f"--checkpoint.initial_load_path={source}", "--optimizer.lr=0"]
    target = train(2, "two", *start, f"--{layout}=2")
    lines: list[str] = []
    again = convert(source, tmp_path / "again", "hf", report=lines.append)
    assert "those of transformers" in lines[0]
    for folder in (target, again):
        assert_equal(_tensors(folder), _tensors(source))
