"""Where a run starts from: another checkpoint, parts of one, changes that need a word; and the
table of misfits.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import (
    PRINTS,
    RUN,
    assert_equal,
    flip,
    names,
    options,
    refusal,
    train,
)
from tests.support.harness import build_tiny, full, initial_weights, micro_batches
from tests.support.pool import Pools
from tests.support.steps import train_step
from titanlite.checkpoint.loaded import LEFT_OUT
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.checkpoint.selection import select
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.config.model_sections import Optimizer
from titanlite.data.loader import to_device
from titanlite.dist.dist_env import DistEnv
from titanlite.optim.guard import FiniteGuard
from titanlite.optim.optimizer import build_optimizer

Described = dict[str, list[object]]


@pytest.fixture(scope="module")
def source(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two ranks, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("source")
    pool(2).run(train, RUN, folder, 1, 4, every=2)
    return folder


def _with_a_new_optimizer(world: DistEnv, folder: Path, first: int, last: int) -> dict[str, Any]:
    """Steps first … last from the weights of a checkpoint, with an optimizer that was never near
    it.
    """
    model, before, rank = build_tiny(world, RUN)
    assert Checkpointer(options(folder), world, PRINTS).load(model, before) is not None
    optimizer = build_optimizer(
        dict(model.named_parameters()), Optimizer(weight_decay=RUN.weight_decay), world.device
    )
    guard = FiniteGuard(world.device)
    losses = []
    for step in range(first, last + 1):
        data = to_device(micro_batches(RUN, step - 1, rank, world.size), world.device)
        result = train_step(
            model, optimizer, data, step=step, lr=RUN.rates[0], max_norm=1.0, guard=guard
        )
        losses.append(result.loss.item())
    return {"losses": losses, "weights": {n: full(p) for n, p in model.named_parameters()}}


def _bytes(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_weights_of_another_run_begin_a_new_one(pool: Pools, source: Path, tmp_path: Path) -> None:
    before = _bytes(source)
    start = {"start": "from", "initial_load_path": str(source)}
    found = pool(2).run(train, RUN, tmp_path, 1, 3, **start)[0]
    expected = pool(2).run(_with_a_new_optimizer, source, 1, 3)[0]
    assert found["losses"] == expected["losses"], (
        "a state of the optimizer, or a count of its steps, came along"
    )
    assert_equal(found["weights"], expected["weights"])
    loaded = found["loaded"]
    assert (loaded.origin, loaded.step, loaded.train) == (
        "from",
        0,
        {},
    )
    assert loaded.folder == source / "step-4"
    assert _bytes(source) == before, "it is only read"
    again = pool(2).run(train, RUN, tmp_path, 4, 4, **start)[0]["loaded"]
    assert (again.origin, again.folder) == ("resume", tmp_path / "step-3"), (
        "a checkpoint of its own goes before"
    )


def test_all_of_another_run_goes_on_bit_for_bit(pool: Pools, source: Path, tmp_path: Path) -> None:
    straight = pool(2).run(train, RUN, tmp_path / "straight", 1, 6)[0]
    whole = {"initial_load_path": str(source / "step-4"), "initial_load_model_only": False}
    found = pool(2).run(train, RUN, tmp_path / "new", 5, 6, **whole)[0]
    assert found["losses"] == straight["losses"][4:]
    assert_equal(found["state"], straight["state"])
    assert found["loaded"].train == {"next_sequence": 32}
    assert "dataloader" not in found["loaded"].left_out
    other = pool(2).run(
        train, RUN, tmp_path / "other", 5, 5, prints={**PRINTS, "data": "x"}, **whole
    )[0]["loaded"]
    assert "dataloader" in other.left_out
    assert any("its data differ" in line for line in other.notices)


@pytest.mark.slow
def test_a_source_that_cannot_be_used_is_named(pool: Pools, source: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(source, tmp_path / "damaged")
    shard = next((damaged / "step-4").glob("*.distcp"))
    flip(shard)
    (tmp_path / "empty").mkdir()
    for path, told in (
        (source / "step-9", "has no step-9"),
        (tmp_path / "empty", "holds no checkpoints"),
        (damaged / "step-4", f"{shard} has changed since it was written"),
    ):
        messages = pool(2).run(refusal, RUN, tmp_path / "own", 1, 1, initial_load_path=str(path))
        assert len(set(messages)) == 1
        assert not (tmp_path / "own").exists()
        assert messages[0].startswith("checkpoint.initial_load_path: ")
        assert told in messages[0]
    loaded = pool(2).run(train, RUN, tmp_path / "own", 1, 1, initial_load_path=str(damaged))[0][
        "loaded"
    ]
    assert loaded.folder == damaged / "step-2"
    assert any(str(shard) in line for line in loaded.notices)
    assert names(damaged) == ["step-2", "step-4"]


@pytest.mark.slow
def test_new_tensors_keep_their_initial_values(pool: Pools, source: Path, tmp_path: Path) -> None:
    deeper = replace(RUN, args=replace(RUN.args, n_layers=3), rates=[0.0] * 20)
    fresh = pool(2).run(initial_weights, deeper)[0]
    old = Contents(source / "step-4")
    start = {"initial_load_path": str(source)}
    found = pool(2).run(
        train, deeper, tmp_path / "a", 1, 1, allow_missing=["model.layers.2.*"], **start
    )[0]
    for name, weight in found["weights"].items():
        expected = fresh[name] if name.startswith("layers.2.") else old.read(f"model.{name}")
        assert torch.equal(weight, expected), name
    assert any(
        "9 tensors of the model keep their initial values" in line
        for line in found["loaded"].notices
    )
    exclude = ["model.layers.2.*", "model.output.weight"]
    found = pool(2).run(train, deeper, tmp_path / "b", 1, 1, exclude_from_loading=exclude, **start)[
        0
    ]
    assert torch.equal(found["weights"]["output.weight"], fresh["output.weight"])
    assert torch.equal(found["weights"]["norm.weight"], old.read("model.norm.weight"))


@pytest.mark.slow
def test_the_optimizer_is_left_out_once(pool: Pools, source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "run")
    without = {"exclude_from_loading": ["optimizer"], "state": {LEFT_OUT: ["optimizer"]}}
    found = pool(2).run(train, RUN, folder, 5, 6, **without)[0]
    expected = pool(2).run(_with_a_new_optimizer, source, 5, 8)[0]
    assert found["losses"] == expected["losses"][:2]
    # The same command again: the optimizer's state since then is not thrown away.
    again = pool(2).run(train, RUN, folder, 7, 8, **without)[0]
    assert_equal(again["weights"], expected["weights"])
    assert any("was left out when the run" in line for line in again["loaded"].notices)


def _save_weights(world: DistEnv, source: Path, target: Path, dtype: str) -> None:
    model, optimizer, _ = build_tiny(world, RUN)
    reader, writer = (Checkpointer(options(folder), world, PRINTS) for folder in (source, target))
    reader.load(model, optimizer)
    writer.save(4, model, optimizer, {}, weights_only=dtype)
    reader.close()
    writer.close()


@pytest.mark.slow
def test_weights_in_another_precision_are_converted(
    pool: Pools, source: Path, tmp_path: Path
) -> None:
    pool(2).run(_save_weights, source, tmp_path / "half", "bfloat16")
    still = replace(RUN, rates=[0.0] * 20)
    start = {"initial_load_path": str(tmp_path / "half")}
    found = pool(2).run(train, still, tmp_path / "own", 1, 1, **start)[0]
    old = Contents(source / "step-4")
    for name, weight in found["weights"].items():
        assert torch.equal(weight, old.read(f"model.{name}").bfloat16().float())
        assert weight.dtype == torch.float32
    assert any("are converted" in line for line in found["loaded"].notices)
    refused = pool(2).run(
        refusal, still, tmp_path / "whole", 1, 1, initial_load_model_only=False, **start
    )[0]
    assert "checkpoint.initial_load_model_only = true" in refused
    assert "holds weights only" in pool(2).run(refusal, RUN, tmp_path / "half", 5, 5)[0], (
        "no run resumes from it"
    )


def test_dangerous_changes_need_their_word(pool: Pools, tmp_path: Path) -> None:
    pool(1).run(train, RUN, tmp_path, 1, 2, state={"global_batch": 8})
    other = {
        "prints": {**PRINTS, "data": "x", "data order": "seed 5"},
        "expected": {"global_batch": 4},
    }
    refused = pool(1).run(refusal, RUN, tmp_path, 3, 3, **other)[0]
    assert "data: d there, x here" in refused
    assert "global batch: 8 there, 4 here" in refused
    assert "--checkpoint.allow_changes=data,global_batch" in refused
    assert (
        "allow_changes=global_batch"
        in pool(1).run(refusal, RUN, tmp_path, 3, 3, allow_changes=["data"], **other)[0]
    )
    both = {"allow_changes": ["global_batch", "data"], "prints": other["prints"]}
    loaded = pool(1).run(train, RUN, tmp_path, 3, 3, expected={"global_batch": 4}, **both)[0][
        "loaded"
    ]
    assert len(loaded.changes) == 3
    assert sum("by checkpoint.allow_changes" in line for line in loaded.notices) == 2
    assert pool(1).run(train, RUN, tmp_path, 4, 4, **both)[0]["loaded"].changes == ()


def _model(
    layers: int, vocab: int = 192, dtype: str = "float32", optimizer: bool = False
) -> Described:
    weights: Described = {
        "model.tok_embeddings.weight": [dtype, [vocab, 64]],
        "model.output.weight": [dtype, [vocab, 64]],
    }
    for n in range(layers):
        weights[f"model.layers.{n}.wq.weight"] = [dtype, [64, 64]]
        weights[f"model.layers.{n}.w1.weight"] = [dtype, [64, 64]]
    if optimizer:
        for name in list(weights):
            parameter = name.removeprefix("model.")
            weights[f"optimizer.state.{parameter}.exp_avg"] = weights[name]
            weights[f"optimizer.state.{parameter}.step"] = ["float32", []]
    return weights


def _refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        select(*args, **kwargs)
    return str(error.value)


def test_the_table_names_each_kind_of_difference() -> None:
    there = {**_model(1, vocab=200), "model.rope": ["float32", [8]]}
    here = {**_model(2), "model.layers.0.wq.weight": ["int64", [64, 64]]}
    lines = _refusal(there, here, source="a/step-3").splitlines()
    assert lines[0] == (
        "a/step-3 does not fit this model: 2 missing, 1 unexpected, 2 another shape, 1 "
        "another dtype"
    )
    assert [" ".join(line.split()) for line in lines[2:4]] == [
        "model.layers.0.wq.weight float32[64, 64] int64[64, 64] another dtype",
        "model.layers.1.w1.weight – float32[64, 64] missing",
    ]


def test_the_table_is_one_screen() -> None:
    lines = _refusal(_model(0), _model(30), source="x").splitlines()
    assert len(lines) <= 24
    assert "60 missing" in lines[0]
    assert "… and 40 more" in lines[-2]
    assert all(key in lines[-1] for key in ("allow_missing", "exclude_from_loading"))


def test_groups_patterns_and_types() -> None:
    both = _model(2, optimizer=True)
    weights = _model(2)
    assert select(both, both).load == both.keys()
    assert not select(both, both).keep
    assert select(both, weights, ["optimizer"]).load == weights.keys()
    assert select(both, both, ["model.layers.1.*"]).keep == {
        n for n in both if ".layers.1." in n
    }, "and their moments"
    assert select(both, both, ["optimizer.*.exp_avg"]).keep == {
        n for n in both if n.endswith("exp_avg")
    }
    assert select(weights, weights, [], ["model.layers.1.*"]).load == weights.keys(), (
        "allowed, but it is there"
    )
    assert select(_model(1), weights, [], ["model.layers.1.*"]).load == _model(1).keys()
    assert "exclude_from_loading: 'optimiser'" in _refusal(weights, weights, ["optimiser"])
    assert "model, optimizer, lr_scheduler" in _refusal(weights, weights, ["optimiser"])
    assert "allow_missing: 'model.norms'" in _refusal(weights, weights, [], ["model.norms"])
    assert "leaves nothing" in _refusal(weights, weights, ["model.*"])
    half = _model(2, dtype="bfloat16")
    assert "another dtype" in _refusal(half, weights), "converted only on request"
    assert select(half, weights, convert=True).converted == weights.keys()
    assert "another dtype" in _refusal(_model(2, dtype="int64"), weights, convert=True)
