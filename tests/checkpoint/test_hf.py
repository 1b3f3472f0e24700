"""Hugging Face's files in and out of runs: each rank reads and writes its part."""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.checkpoints import PRINTS, names, options
from tests.support.grid import FSDP, PP, TP
from tests.support.harness import TINY, Run, batches, build_tiny, full
from tests.support.hf import config_flags, train_losses, written
from tests.support.pool import Pools
from tests.support.reference import in_our_names
from tests.support.s3 import Storage
from tests.support.whole_runs import train_run
from titanlite.checkpoint.foreign_formats import WeightsReader, as_manifest, open_weights
from titanlite.checkpoint.hf_save import begin_folder, save_hf
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError, last_hf_step
from titanlite.checkpoint.storage import Save, describe, on_rank_0
from titanlite.checkpoint.store_paths import AnyPath, StorePath
from titanlite.cli.hub.convert import convert, open_source
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, load_tokenizer
from titanlite.dist.dist_env import DistEnv
from titanlite.models import LlamaArgs, get_spec
from titanlite.models.args import as_record

SPEC = get_spec("llama3")
RUN = Run(*batches(1, 4, 16, 192), [1e-3])
BLOCKS = "model.layers.0.self_attn.q_proj.weight"


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
        file = (
            "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        )
        save_file(
            {name: tensors[name] for name in listed[i::shards]},
            folder / file,
            metadata={"format": "pt"},
        )
        where.update(dict.fromkeys(listed[i::shards], file))
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(SPEC.hf_config(args)))
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _load(
    world: DistEnv, run: Run, source: object, root: AnyPath, step: int = 0, **fields: Any
) -> Any:
    """Load weights as a run does; save a checkpoint after `step` if given, and the last save in
    their format.
    """
    model, optimizer, _ = build_tiny(world, run)
    last = {"model_weights_only": True, "last_save_in_hf": True, **fields}
    about = {"model": as_record("llama3", run.args)}
    checkpointer = Checkpointer(
        options(root, initial_load_path=str(source), **last), world, PRINTS, about
    )
    try:
        loaded = checkpointer.load(model, optimizer)
        if step:
            checkpointer.save(step, model, optimizer, {})
            return str(checkpointer.save(step + 1, model, optimizer, {}, weights_only="float32"))
        assert loaded is not None
        assert loaded.origin == "from"
        assert loaded.step == 0
        return {name: full(parameter) for name, parameter in model.named_parameters()}
    except CheckpointError as error:
        return str(error)
    finally:
        checkpointer.close()


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"tensor": 2}),
    "tied-tp": (2, {"tensor": 2, "args": replace(TINY, tied=True)}),
    "pp": (2, {"pipeline": 2}),
    "hsdp": (2, {"replicas": 2}),
    "fsdp-tp": (4, {"tensor": 2}),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (LAYOUTS[n][0] > 2)) for n in LAYOUTS]
)
def test_published_weights_come_back_bit_for_bit(pool: Pools, tmp_path: Path, layout: str) -> None:
    """HF → ranks → checkpoint → HF, and HF → ranks → last save: the same bytes per tensor."""
    ranks, fields = LAYOUTS[layout]
    run = replace(RUN, **fields)
    source = _folder(tmp_path / "published", run.args)
    root = tmp_path / "checkpoint"
    saved = pool(ranks).run(_load, run, source, root, 7)
    last = root / "step-8-hf"
    assert saved == [str(last)] * ranks
    assert names(root) == ["step-7", "step-8-hf"]
    exported = convert(root / "step-7", tmp_path / "hf", "hf")
    expected = _tensors(source)
    for folder in (last, exported):
        found = _tensors(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    again = pool(ranks).run(_load, run, source, root)
    assert all("step-8-hf holds the weights of the last save" in answer for answer in again)


def _fp8(folder: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Linears of the blocks in float8, with scales per block (DeepSeek's), row or tensor; and their
    values.
    """
    _folder(folder, shards=1)
    values = {}
    stored = {}
    for name, tensor in _tensors(folder).items():
        values[name] = stored[name] = tensor
        if ".layers." in name and tensor.ndim == 2:
            rows, columns = tensor.shape
            grid = {
                "block": (-(-rows // 48), -(-columns // 32)),
                "row": (rows, 1),
                "tensor": (1, 1),
            }[kind]
            scale = torch.rand(grid) + 0.5
            wide = scale.repeat_interleave(-(-rows // grid[0]) if kind != "block" else 48, 0)[:rows]
            wide = wide.repeat_interleave(32 if kind == "block" else columns, 1)[:, :columns]
            stored[name] = (tensor / wide).to(torch.float8_e4m3fn)
            values[name] = stored[name].float() * wide
            stored[f"{name}_scale_inv" if kind == "block" else f"{name}_scale"] = (
                scale.reshape(()) if kind == "tensor" else scale
            )
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "quantization_config": {
            "quant_method": "fp8",
            **({"weight_block_size": [48, 32]} if kind == "block" else {}),
        }
    }
    (folder / "config.json").write_text(json.dumps({**SPEC.hf_config(TINY), **config}))
    return folder, values


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "block", "row", "tensor"])
def test_sources_of_every_precision_load_into_shards(
    pool: Pools, tmp_path: Path, kind: str
) -> None:
    if kind in ("bfloat16", "float16"):
        source = _folder(tmp_path / "in", dtype=getattr(torch, kind))
        values = _tensors(source)
    else:
        source, values = _fp8(tmp_path / "in", kind)
    wanted = in_our_names(values, SPEC.hf_names(TINY))
    for found in pool(2).run(_load, RUN, source, tmp_path / "checkpoint"):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor.float()) for name, tensor in wanted.items())


STACK = replace(
    SPEC,
    hf_names=lambda args: {"experts": tuple(f"e.{i}" for i in range(4)), "w": "w"},
    tied=lambda args: {},
)


def _stacked(world: DistEnv, folder: Path, out: Path, dim: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world.size,))
    weights = open_weights(folder / "model.safetensors", STACK, None)
    shapes = {"experts": (4, 6, 8), "w": (5,)}
    empty = {
        n: distribute_tensor(torch.zeros(s), mesh, [Shard(min(dim, len(s) - 1))])
        for n, s in shapes.items()
    }
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in empty.items()}
    dcp.load(state, storage_reader=WeightsReader(weights.path, as_manifest(weights), STACK, None))
    spec = replace(STACK, hf_config=lambda args: {})
    group = torch.distributed.group.WORLD
    assert group is not None
    agree: Callable[..., Any] = lambda action: on_rank_0(world, action)  # noqa: E731
    draft = replace(as_manifest(weights), tensors=describe(state))
    save_hf(Save(out, state, draft), (spec, None), dict, group, agree, shard_bytes=100)
    return {
        name: tensor.full_tensor() for name, tensor in empty.items() if isinstance(tensor, DTensor)
    }


@pytest.mark.parametrize("dim", [0, 1])
def test_a_stack_of_experts_is_read_and_written_by_its_parts(
    pool: Pools, tmp_path: Path, dim: int
) -> None:
    torch.manual_seed(3)
    tensors = {**{f"e.{i}": torch.randn(6, 8) for i in range(4)}, "w": torch.randn(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = pool(2).run(_stacked, tmp_path, tmp_path / "out", dim)[1]
    assert torch.equal(found["experts"], torch.stack([tensors[f"e.{i}"] for i in range(4)]))
    assert torch.equal(found["w"], tensors["w"])
    written = _tensors(tmp_path / "out")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[n], t) for n, t in tensors.items())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    assert STACK.to_hf(found, None).keys() == tensors.keys()


@pytest.mark.slow
def test_unusable_folders_are_refused_with_file_tensor_and_remedy(
    pool: Pools, tmp_path: Path
) -> None:
    def change(name: str, **changes: Any) -> Path:
        source = _folder(tmp_path / name)
        config = {**json.loads((source / "config.json").read_text()), **changes}
        (source / "config.json").write_text(json.dumps(config))
        return source

    def rewrite(name: str, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        source = _folder(tmp_path / name, shards=1)
        tensors = load_file(source / "model.safetensors")
        edit(tensors)
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        return source

    shard = "model-00002-of-00003.safetensors"
    index = "model.safetensors.index.json"
    (change("no-shard") / shard).unlink()
    (change("no-index") / index).unlink()
    (change("no-config") / "config.json").unlink()
    (change("no-json") / index).write_text("{")
    cut = change("cut") / shard
    cut.write_bytes(cut.read_bytes()[:-9])
    listed = json.loads((change("moved") / index).read_text())
    listed["weight_map"][BLOCKS] = (
        shard if listed["weight_map"][BLOCKS] != shard else "model-00001-of-00003.safetensors"
    )
    (tmp_path / "moved" / index).write_text(json.dumps(listed))
    change("deeper", num_hidden_layers=3, rms_norm_eps=1e-6)
    change("bert", model_type="bert")
    rewrite("missing", lambda t: t.pop(BLOCKS))
    rewrite("unknown", lambda t: t.update(extra=torch.zeros(2)))
    rewrite("shape", lambda t: t.update({BLOCKS: torch.zeros(3, 64)}))
    rewrite("int8", lambda t: t.update({BLOCKS: torch.zeros(3, dtype=torch.int8)}))
    rewrite("unscaled", lambda t: t.update({BLOCKS: t[BLOCKS].to(torch.float8_e4m3fn)}))
    rewrite("nan", lambda t: t[BLOCKS].fill_(float("nan")))
    ours = "model.layers.0.attention.wq.weight"
    cases = {
        "no-shard": f"{shard} is missing, which {index} names: download it again",
        "no-index": f"has neither model.safetensors nor {index}: download the index of its 3 files",
        "no-config": "config.json is missing: copy it",
        "no-json": f"{index} cannot be read",
        "cut": f"{shard} cannot be read",
        "moved": f"lacks {BLOCKS}, which {index} says it holds",
        "deeper": (
            "model.overrides.n_layers is 2 here, 3 there model.overrides.norm_eps is 1e-05 here, "
            "1e-06 there"
        ),
        "bert": "model_type is 'bert'",
        "missing": f"{ours} – float32[64, 64] missing",
        "unknown": "model.extra",
        "shape": f"{ours} float32[3, 64] (model.safetensors: {BLOCKS}) float32[64, 64] another shape",  # noqa: E501
        "int8": f"{BLOCKS} has type I8",
        "unscaled": f"{BLOCKS} is float8_e4m3fn without a tensor",
        "nan": "holds values that are not finite",
        "nowhere": "no such folder",
    }
    for name, message in cases.items():
        answers = pool(2).run(_load, RUN, tmp_path / name, tmp_path / "checkpoint")
        assert all(
            isinstance(answer, str) and message in " ".join(answer.split()) for answer in answers
        ), (
            name,
            answers,
        )
    whole = pool(2).run(
        _load, RUN, tmp_path / "deeper", tmp_path / "checkpoint", initial_load_model_only=False
    )
    assert all("initial_load_model_only = true" in answer for answer in whole)
    allowed = {"allow_changes": ["model"], "allow_missing": [ours]}
    change("scaled", rms_norm_eps=1e-6)
    for name in ("missing", "scaled"):
        assert isinstance(
            pool(2).run(_load, RUN, tmp_path / name, tmp_path / "checkpoint", **allowed)[0], dict
        )


LARGE = LlamaArgs(dim=512, n_layers=6, n_heads=8, vocab_size=4096, multiple_of=256, max_seq_len=64)


def _memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(name))


def _growth(world: DistEnv, source: Path, root: Path) -> tuple[int, int]:
    """Return by how many bytes this rank's own memory grows at most while it loads, and the bytes
    of its shards.
    """
    model, optimizer, _ = build_tiny(world, replace(RUN, args=LARGE))
    shards = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    about = {"model": as_record("llama3", LARGE)}
    checkpointer = Checkpointer(options(root, initial_load_path=str(source)), world, PRINTS, about)
    before = _memory("RssAnon")
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _memory("RssAnon"))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    checkpointer._loader.load_weights(model)
    done.set()
    watcher.join()
    checkpointer.close()
    return peak - before, shards


@pytest.mark.slow
def test_a_rank_needs_memory_for_one_slice_beside_its_shard(pool: Pools, tmp_path: Path) -> None:
    source = _folder(tmp_path / "large", LARGE, torch.bfloat16)
    for growth, shards in pool(2).run(_growth, source, tmp_path / "checkpoint"):
        assert shards > 45 << 20, "the bound below would not notice a copy of a rank's part"
        assert growth < 24 << 20, f"{growth / (1 << 20):.0f} MiB beside the shards"


def test_export_is_refused_when_the_logits_differ(
    pool: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titanlite.cli.main import main

    pool(1).run(_load, RUN, _folder(tmp_path / "in"), tmp_path / "checkpoint", 7)
    step = str(tmp_path / "checkpoint" / "step-7")
    out = tmp_path / "out"
    assert main(["export", step, str(out / "right")]) == 0
    assert main(["export", str(out / "right"), str(out / "back"), "--dtype=bfloat16"]) == 0
    assert names(out) == ["back", "right"]

    def swapped(args: Any) -> dict[str, Any]:
        found = dict(SPEC.hf_names(args))
        one, other = (f"layers.1.feed_forward.w{i}.weight" for i in (1, 3))
        return {**found, one: found[other], other: found[one]}

    monkeypatch.setattr("titanlite.models.llama.LLAMA3", replace(SPEC, hf_names=swapped))
    assert main(["export", step, str(out / "wrong")]) == 4
    assert names(out) == ["back", "right"]


def test_what_would_harm_or_hide_weights_is_told(
    pool: Pools, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = _folder(tmp_path / "in", shards=1)
    root = tmp_path / "run" / "checkpoint"
    (root / "step-99-hf").mkdir(parents=True)  # a save that was cut short
    pool(1).run(_load, RUN, source, root, 7)
    for path in (root, root.parent):
        with pytest.raises(
            CheckpointError, match=r"newest weights are in .*step-8-hf: name that folder, or step-7"
        ):
            convert(path, tmp_path / "out", "hf")
    (answer,) = pool(1).run(_load, RUN, root.parent, tmp_path / "other")
    assert "newest weights are in" in answer

    tensors = _tensors(source)
    tensors[BLOCKS][0, 0] = 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"wq.weight has values that float16 cannot hold"):
        convert(source, tmp_path / "half", "hf", "float16")

    shutil.copy(BUNDLED_TOKENIZER, source / "tokenizer.model")
    assert open_source(source / "model.safetensors").tokenizer == str(source)


def test_a_store_keeps_nothing_of_a_save_that_was_cut_short() -> None:
    final = StorePath(f"memory://{uuid.uuid4().hex}/step-8-hf")
    (final / "model-00001-of-00002.safetensors").write_bytes(b"half")
    assert last_hf_step(final.parent) == -1
    assert begin_folder(final) == final
    assert not names(final)


def test_the_last_save_goes_to_a_store(pool: Pools, storage: Storage, tmp_path: Path) -> None:
    source = _folder(tmp_path / "in")
    storage.run(pool(2), _load, replace(RUN, tensor=2), source, storage.root, 7)
    folder = storage.root / "step-8-hf"
    assert {"config.json", "model.safetensors"} <= set(names(folder))
    (tmp_path / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    found = load_file(tmp_path / "copy.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in _tensors(source).items())


def _measured(found: list[dict[str, Any]]) -> list[float]:
    return [row["validation_loss"] for row in found[0]["rows"] if "validation_loss" in row]


@pytest.mark.slow
def test_fine_tuning_goes_on_where_training_ended(pool: Pools, tmp_path: Path) -> None:
    """Start a run from the last save of another: the held-out loss is the same to the last bit."""
    length = [
        "--training.steps=3",
        "--validation.enable",
        "--validation.freq=3",
        "--training.tensor_parallel_degree=2",
    ]
    last = ["--checkpoint.model_weights_only", "--checkpoint.last_save_in_hf"]
    first = tmp_path / "first"
    folder = tmp_path / "first" / "checkpoint" / "step-3-hf"
    trained = _measured(pool(2).run(train_run, str(first), *length, *last))
    more = [
        f"--checkpoint.initial_load_path={folder}",
        "--validation.first",
        "--training.steps=1",
    ]
    tuned = _measured(pool(2).run(train_run, str(tmp_path / "tuned"), *length, *more))
    assert tuned[0] == trained[-1]
    assert tuned[-1] != tuned[0]
    ours = load_tokenizer()
    for name in ("config.json", "generation_config.json"):
        ends = json.loads((folder / name).read_text())["eos_token_id"]
        assert ends == [ours.eos_id, ours.special_tokens["<|eot_id|>"]]


SMALL = ["dim=64", "n_layers=2", "n_heads=4", "n_kv_heads=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mistral", TP),
        ("qwen3", PP),
        ("olmo2", TP),
        ("olmo3", PP),
        ("gemma3", TP),
        ("mixtral", "parallelism.expert_parallel_degree"),
        ("mixtral", FSDP),
        ("gpt_oss", FSDP),
        ("llama4", FSDP),
        ("llama4", "parallelism.expert_parallel_degree"),
        ("hf", FSDP),
    ],
)
def test_every_family_goes_out_of_runs_and_in(
    pool: Pools, tmp_path: Path, family: str, layout: str
) -> None:
    """One rank's last save → two ranks, which train at a rate of 0 → their last save: the same
    bytes per tensor.
    """
    flags = [
        "--checkpoint.enable_checkpoint",
        "--checkpoint.model_weights_only",
        "--checkpoint.last_save_in_hf",
    ]
    flags += [f"--model.name={family}", "--training.steps=1", "--training.batch_size=2"]

    def train(ranks: int, name: str, *more: str) -> Path:
        if family == "hf":
            hf = [written(tmp_path, "qwen2"), f"--job.dump_folder={tmp_path / name}"]
            pool(ranks).run(train_losses, config_flags(tmp_path, *hf, *flags, *more))
        else:
            small = (f"--model.overrides.{one}" for one in SMALL)
            assert (
                pool(ranks).run(train_run, str(tmp_path / name), *flags, *small, *more)[0]["error"]
                == ""
            )
        return tmp_path / name / "checkpoint" / "step-1-hf"

    source = train(1, "one")
    target = train(
        2, "two", f"--checkpoint.initial_load_path={source}", "--optimizer.lr=0", f"--{layout}=2"
    )
    first = _tensors(source)
    second = _tensors(target)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    lines: list[str] = []
    again = _tensors(convert(source, tmp_path / "again", "hf", report=lines.append))
    assert "those of transformers" in lines[0]
    assert again.keys() == first.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
