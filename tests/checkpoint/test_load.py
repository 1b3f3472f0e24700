"""Runs that start from another checkpoint, from parts of one, or with changes."""

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
    options,
    refusal,
    train,
)
from tests.support.harness import build_tiny, full, initial_weights, micro_batches
from tests.support.pool import Pools
from tests.support.steps import train_step
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import LEFT_OUT
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.selection import select
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.config.model_sections import Optimizer
from titanlite.data.loader import to_device
from titanlite.dist.dist_env import DistEnv
from titanlite.optim.guard import FiniteGuard
from titanlite.optim.optimizer import build_optimizer


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
    parameters = dict(model.named_parameters())
    settings = Optimizer(weight_decay=RUN.weight_decay)
    optimizer = build_optimizer(parameters, settings, world.device)
    guard = FiniteGuard(world.device)
    losses = []
    for step in range(first, last + 1):
        data = to_device(micro_batches(RUN, step - 1, rank, world.size), world.device)
        result = train_step(
            model, optimizer, data, step=step, lr=RUN.rates[0], max_norm=1.0, guard=guard
        )
        losses.append(result.loss.item())
    return {"losses": losses, "weights": {name: full(p) for name, p in parameters.items()}}


def _bytes(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_weights_of_another_run_begin_a_new_one(pool, source, tmp_path):
    before = _bytes(source)
    start = {"start": "from", "initial_load_path": str(source)}
    found = pool(2).run(train, RUN, tmp_path, 1, 3, **start)[0]
    expected = pool(2).run(_with_a_new_optimizer, source, 1, 3)[0]
    assert found["losses"] == expected["losses"], (
        "a state of the optimizer, or a count of its steps, came along"
    )
    assert_equal(found["weights"], expected["weights"])
    loaded = found["loaded"]
    assert (loaded.origin, loaded.step, loaded.train) == ("from", 0, {})
    assert loaded.folder == source / "step-4"
    assert _bytes(source) == before, "it is only read"
    again = pool(2).run(train, RUN, tmp_path, 4, 4, **start)[0]["loaded"]
    assert (again.origin, again.folder) == ("resume", tmp_path / "step-3"), (
        "a checkpoint of its own goes before"
    )


def test_all_of_another_run_goes_on_bit_for_bit(pool, source, tmp_path):
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
def test_new_tensors_keep_their_initial_values(pool, source, tmp_path):
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
    found = pool(2).run(train, deeper, tmp_path / "b", 1, 1, exclude_from_loading=exclude, **start)
    weights = found[0]["weights"]
    assert torch.equal(weights["output.weight"], fresh["output.weight"])
    assert torch.equal(weights["norm.weight"], old.read("model.norm.weight"))
    for key, pattern in (("exclude_from_loading", "optimiser"), ("allow_missing", "model.norms")):
        said = pool(2).run(refusal, deeper, tmp_path / "c", 1, 1, **{key: [pattern]}, **start)[0]
        assert f"{key}: '{pattern}'" in said


@pytest.mark.slow
def test_the_optimizer_is_left_out_once(pool, source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "run")
    without = {"exclude_from_loading": ["optimizer"], "state": {LEFT_OUT: ["optimizer"]}}
    found = pool(2).run(train, RUN, folder, 5, 6, **without)[0]
    expected = pool(2).run(_with_a_new_optimizer, source, 5, 8)[0]
    assert found["losses"] == expected["losses"][:2]
    # The same command again: the optimizer's state since then is not thrown away.
    again = pool(2).run(train, RUN, folder, 7, 8, **without)[0]
    assert_equal(again["weights"], expected["weights"])
    assert any("was left out when the run" in line for line in again["loaded"].notices)


def test_dangerous_changes_need_their_word(pool, tmp_path):
    pool(1).run(train, RUN, tmp_path, 1, 2, state={"global_batch": 8})
    other = {
        "prints": {**PRINTS, "data": "x", "data order": "seed 5"},
        "expected": {"global_batch": 4},
    }
    refused = pool(1).run(refusal, RUN, tmp_path, 3, 3, **other)[0]
    assert "data: d there, x here" in refused
    assert "global batch: 8 there, 4 here" in refused
    assert "--checkpoint.allow_changes=data,global_batch" in refused
    refused = pool(1).run(refusal, RUN, tmp_path, 3, 3, allow_changes=["data"], **other)[0]
    assert "allow_changes=global_batch" in refused
    both = ["global_batch", "data"]
    (found,) = pool(1).run(train, RUN, tmp_path, 3, 3, allow_changes=both, **other)
    assert len(found["loaded"].changes) == 3
    assert sum("by checkpoint.allow_changes" in line for line in found["loaded"].notices) == 2
    del other["expected"]
    (found,) = pool(1).run(train, RUN, tmp_path, 4, 4, allow_changes=both, **other)
    assert found["loaded"].changes == ()


def test_types_are_converted_on_request_alone_and_whole_numbers_never():
    wanted: dict[str, list[Any]] = {"model.w": ["float32", [64, 64]], "rng": ["uint8", [8]]}
    half = {**wanted, "model.w": ["bfloat16", [64, 64]]}
    assert select(half, wanted, convert=True).converted == {"model.w"}
    whole = {**wanted, "model.w": ["int64", [64, 64]]}
    for saved, convert in ((half, False), (whole, True)):
        with pytest.raises(CheckpointError, match=r"1 another dtype\n") as error:
            select(saved, wanted, convert=convert)
        row = f"model.w {saved['model.w'][0]}[64, 64] float32[64, 64] another dtype"
        assert row in " ".join(str(error.value).split())


def test_what_belongs_to_a_weight_that_is_left_out_is_left_out_too():
    described: list[Any] = ["float32", [64, 64]]
    names = ["model.a", "model.b", "optimizer.state.a.exp_avg", "optimizer.state.b.exp_avg"]
    both = dict.fromkeys(names, described)
    assert select(both, both, ["model.a"]).keep == {"model.a", "optimizer.state.a.exp_avg"}
    assert select(both, both, ["optimizer"]).keep == set(names[2:])
    with pytest.raises(CheckpointError, match="leaves nothing"):
        select(both, both, ["model.*"])
