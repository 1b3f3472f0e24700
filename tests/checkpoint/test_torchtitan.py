"""Checkpoints as torchtitan 0.2.2 writes them: the model's tensors without a prefix, beside values
of its own classes. q and k of Llama are in Meta's order of rows.
"""

from __future__ import annotations

import pickle
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.cli.poison import Pickled
from tests.support.checkpoints import RUN, assert_equal, load
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.checkpoint.torchtitan import open_torchtitan
from titanlite.cli.hub.compare_checkpoints import quiet
from titanlite.cli.main import main
from titanlite.dist.dist_env import DistEnv
from titanlite.models import LlamaArgs, get_spec

ARGS = LlamaArgs(
    dim=48,
    n_layers=2,
    n_heads=6,
    n_kv_heads=3,
    vocab_size=96,
    multiple_of=16,
    rope_theta=1e4,
    max_seq_len=64,
)
TOML = """
[model]
name = "llama3"
flavor = "debugmodel"
vocab_size = 96
[model.overrides]
dim = 48
n_layers = 2
n_heads = 6
n_kv_heads = 3
multiple_of = 16
rope_theta = 10000.0
[training]
seq_len = 64
"""


def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The weight of that name, by a formula."""
    phase = zlib.crc32(name.encode()) % 1000
    wave = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).add(phase).mul(0.7).sin()
    return (1 + 0.2 * wave if len(shape) == 1 else wave / shape[-1] ** 0.5).float().view(shape)


def llama_weights(args: LlamaArgs = ARGS) -> dict[str, torch.Tensor]:
    shapes = get_spec("llama3").build_on_meta(args).state_dict()
    return {name: weight(name, tuple(tensor.shape)) for name, tensor in shapes.items()}


def by_halves(args: LlamaArgs) -> dict[str, torch.Tensor]:
    """The same weights in our order of rows: of each head of q and k the even ones first."""
    found = llama_weights(args)
    for name, tensor in found.items():
        if name.split(".")[-2] in ("wq", "wk"):
            heads = tensor.view(-1, args.dim // args.n_heads, args.dim)
            found[name] = torch.cat([heads[:, 0::2], heads[:, 1::2]], 1).view(-1, args.dim)
    return found


def write(
    folder: Path, weights: dict[str, Any], world: DistEnv | None = None, old: bool = False
) -> Path:
    """Save as torchtitan does, from several ranks in shards; old: as until 0.1."""
    if world is not None:
        mesh = init_device_mesh("cpu", (world.size,))
        weights = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in weights.items()}
    moments = {f"state.{name}.exp_avg": tensor * 0 for name, tensor in weights.items()}
    state = {
        **({"model": weights} if old else weights),
        "optimizer": {**moments, "param_groups.norm.weight.betas": (0.9, 0.95)},
        "lr_scheduler": {"last_epoch": 4},
        "train_state": {"step": 4, "ntokens_seen": torch.tensor(100)},
        "dataloader": {"dp_rank_0": b"state"},
    }
    with quiet():
        dcp.save(state, checkpoint_id=str(folder), no_dist=world is None)
    return folder


def write_shards(world: DistEnv, folder: Path, args: LlamaArgs) -> None:
    write(folder, llama_weights(args), world)


@pytest.mark.parametrize("tensor", [1, 2], ids=["fsdp", "tp"])
def test_ranks_load_their_parts(pool, tmp_path, tensor):
    args = RUN.args
    pool(2).run(write_shards, tmp_path / "step-4", args)
    start = {"initial_load_path": str(tmp_path / "step-4")}
    found = pool(2).run(load, replace(RUN, tensor=tensor), tmp_path / "own", **start)[0]
    left_out = "torchtitan's optimizer, schedule and place in the text are left out"
    assert left_out in found["loaded"].notices and found["loaded"].step == 0
    assert_equal(found["weights"], by_halves(args))


def test_what_does_not_fit_is_listed(pool, tmp_path):
    weights = llama_weights(RUN.args)
    del weights["layers.1.attention.wk.weight"]
    weights["layers.0.ffn_norm.weight"] = torch.ones(3)
    weights["layers.9.attention.wo.weight"] = torch.ones(3, 3)
    source = write(tmp_path / "step-4", weights)

    def refusal(path, **fields):
        (found,) = pool(1).run(load, RUN, tmp_path / "own", initial_load_path=str(path), **fields)
        return str(found["error"])

    said = refusal(source)
    assert "does not fit this model: 1 missing, 1 unexpected, 1 another shape" in said
    for name in ("layers.1.attention.wk", "layers.0.ffn_norm", "layers.9.attention.wo"):
        assert f"model.{name}.weight" in said
    said = refusal(source, initial_load_model_only=False)
    assert "is of another program, of which weights alone are taken" in said
    said = refusal(tmp_path)
    assert "step-4 is of torchtitan: name it alone as checkpoint.initial_load_path" in said


def test_experts_are_where_they_are_here(tmp_path):
    spec = get_spec("qwen3_moe")
    args = replace(next(iter(spec.flavors.values())), n_experts=4, vocab_size=8)
    shapes = {"w1": (4, 8, 16), "w2": (4, 16, 8), "w3": (4, 8, 16)}
    moe = "layers.1.moe."
    there = {f"{moe}experts.{n}": weight(n, shape) for n, shape in shapes.items()}
    there |= {
        f"{moe}router.gate.weight": weight("gate", (4, 16)),
        f"{moe}expert_bias": torch.zeros(4),
    }
    weights = open_torchtitan(write(tmp_path / "step-1", there), spec, args)
    ours = {f"layers.1.feed_forward.experts.{n}": there[f"{moe}experts.{n}"] for n in shapes}
    ours["layers.1.feed_forward.gate.weight"] = there[f"{moe}router.gate.weight"]
    assert_equal({name: weights.read(name) for name in weights.parts}, ours)
    # A bias that says something is not dropped.
    there[f"{moe}expert_bias"] = torch.ones(4)
    weights = open_torchtitan(write(tmp_path / "step-2", there), spec, args)
    assert any(name.endswith("expert_bias") for name in weights.parts)
    with pytest.raises(CheckpointError, match="convert_to_hf.py"):
        open_torchtitan(tmp_path / "step-2", get_spec("gpt_oss"), args)


@pytest.mark.parametrize("old", [False, True], ids=["0.2", "0.1"])
def test_an_export_takes_the_model_from_a_config(tmp_path, capsys, old):
    tables = {"freqs_cis": torch.ones(4, dtype=torch.complex64)} if old else {}
    source = write(tmp_path / "step-4", llama_weights() | tables, old=old)
    (tmp_path / "run.toml").write_text(TOML)
    words = ["export", str(source), f"{tmp_path}/hf"]
    assert main(words) == 4
    assert "give the TOML file of its run as" in capsys.readouterr().err
    assert main([*words, "--config", f"{tmp_path}/run.toml"]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert_equal(exported, get_spec("llama3").to_hf(by_halves(ARGS), ARGS))


@pytest.mark.parametrize("place", ["index", "tensor", "hole"])
def test_files_of_somebody_else_run_no_code(tmp_path, place):
    source = write(tmp_path / "step-4", llama_weights())
    index = pickle.loads((source / ".metadata").read_bytes())
    if place == "index":
        index.planner_data = Pickled(tmp_path / "ran")
    elif place == "tensor":
        data = pickle.dumps(Pickled(tmp_path / "ran"))
        (source / "__9_0.distcp").write_bytes(data)
        info = next(one for key, one in index.storage_data.items() if key.fqn == "norm.weight")
        info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(data)
    else:
        del index.state_dict_metadata["norm.weight"].chunks[0]
    (source / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"metadata cannot be used|norm.weight"):
        open_torchtitan(source, get_spec("llama3"), ARGS).read("norm.weight")
    assert not (tmp_path / "ran").exists()
