"""What a run starts from: another run's checkpoint, parts of one, and changes that need a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.runs import PRINTS, RUN, flip, refusal, train
from tests.pool import Pools
from tests.steps import train_step
from tests.training.harness import all_stages, build_tiny, full, initial_weights, micro_batches
from titanlite.checkpoint import Checkpointer
from titanlite.checkpoint.contents import Contents
from titanlite.checkpoint.loading import LEFT_OUT
from titanlite.checkpoint.manifest import publish, read_manifest
from titanlite.checkpoint.storage import HashingWriter
from titanlite.checkpoint.together import quiet
from titanlite.config.sections import Optimizer
from titanlite.guard import FiniteGuard
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.dist_env import DistEnv

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two ranks, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("source")
    pool(2).run(train, RUN, str(folder), 1, 4, every=2)
    return folder


def _with_a_new_optimizer(world: DistEnv, folder: str, first: int, last: int) -> dict[str, Any]:
    """Steps first … last from the weights of a checkpoint, with an optimizer that was never near it."""
    model, before, rank = build_tiny(world, RUN)
    assert Checkpointer(CheckpointPlan(folder=folder), world, PRINTS).load(model, before) is not None
    optimizer = build_optimizer(model.parameters(), Optimizer(weight_decay=RUN.weight_decay), world.device)
    guard, losses = FiniteGuard(world.device), []
    for step in range(first, last + 1):
        data = to_device(micro_batches(RUN, step - 1, rank, world.size), world.device)
        result = train_step(model, optimizer, data, step=step, lr=RUN.rates[0], max_norm=1.0, guard=guard)
        losses.append(result.loss.item())
    return {"losses": losses, "weights": {n: full(p) for n, p in model.named_parameters()}}


def _equal(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_weights_of_another_run_begin_a_new_one(pool: Pools, source: Path, tmp_path: Path) -> None:
    before = _bytes(source)
    plan = CheckpointPlan(initial_load_path=str(source))
    found = pool(2).run(train, RUN, str(tmp_path), 1, 3, start="from", plan=plan)[0]
    expected = pool(2).run(_with_a_new_optimizer, str(source), 1, 3)[0]
    assert found["losses"] == expected["losses"], "a state of the optimizer, or a count of its steps, came along"
    _equal(found["weights"], expected["weights"])
    loaded = found["loaded"]
    assert (loaded.origin, loaded.step, loaded.train) == ("from", 0, {}) and loaded.folder == source / "step-4"
    assert _bytes(source) == before, "it is only read"
    again = pool(2).run(train, RUN, str(tmp_path), 4, 4, start="from", plan=plan)[0]["loaded"]
    assert (again.origin, again.folder) == ("resume", tmp_path / "step-3"), "a checkpoint of its own goes before"


def test_all_of_another_run_goes_on_bit_for_bit(pool: Pools, source: Path, tmp_path: Path) -> None:
    straight = pool(2).run(train, RUN, str(tmp_path / "straight"), 1, 6)[0]
    plan = CheckpointPlan(initial_load_path=str(source / "step-4"), initial_load_model_only=False)
    found = pool(2).run(train, RUN, str(tmp_path / "new"), 5, 6, plan=plan)[0]
    assert found["losses"] == straight["losses"][4:]
    _equal(found["state"], straight["state"])
    assert found["loaded"].train == {"next_sequence": 32} and "dataloader" not in found["loaded"].left_out
    other = pool(2).run(train, RUN, str(tmp_path / "other"), 5, 5, plan=plan, prints={**PRINTS, "data": "x"})[0]
    assert "dataloader" in other["loaded"].left_out
    assert any("the text here begins at its first sequence" in line for line in other["loaded"].notices)


@pytest.mark.slow
def test_a_source_that_cannot_be_used_is_named(pool: Pools, source: Path, tmp_path: Path) -> None:
    def refused(path: Path, **settings: Any) -> str:
        plan = CheckpointPlan(initial_load_path=str(path), **settings)
        messages = pool(2).run(refusal, RUN, str(tmp_path / "own"), 1, 1, plan=plan)
        assert len(set(messages)) == 1 and not (tmp_path / "own").exists()
        return messages[0]

    assert "checkpoint.initial_load_path: there is no folder" in refused(source / "step-9")
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoints" in refused(tmp_path / "empty")
    damaged = tmp_path / "damaged"
    for name, content in _bytes(source).items():
        (damaged / name).parent.mkdir(parents=True, exist_ok=True)
        (damaged / name).write_bytes(content)
    shard = next((damaged / "step-4").glob("*.distcp"))
    flip(shard)
    assert f"{shard} has changed since it was written" in refused(damaged / "step-4")
    plan = CheckpointPlan(initial_load_path=str(damaged))
    loaded = pool(2).run(train, RUN, str(tmp_path / "own"), 1, 1, plan=plan)[0]["loaded"]
    assert loaded.folder == damaged / "step-2" and any(str(shard) in line for line in loaded.notices)
    assert sorted(path.name for path in damaged.iterdir()) == ["step-2", "step-4"]


def test_new_tensors_keep_their_initial_values(pool: Pools, source: Path, tmp_path: Path) -> None:
    deeper = replace(RUN, args=replace(RUN.args, n_layers=3), rates=[0.0] * 20)
    plan = CheckpointPlan(initial_load_path=str(source), allow_missing=("model.layers.2.*",))
    found = pool(2).run(train, deeper, str(tmp_path / "a"), 1, 1, plan=plan)[0]
    fresh = pool(2).run(initial_weights, deeper)[0]
    old = Contents(source / "step-4")
    for name, weight in found["weights"].items():
        expected = fresh[name] if name.startswith("layers.2.") else old.read(f"model.{name}")
        assert torch.equal(weight, expected), name
    assert any("9 tensors of the model keep their initial values" in line for line in found["loaded"].notices)
    both = replace(plan, allow_missing=(), exclude_from_loading=("model.layers.2.*", "model.output.weight"))
    found = pool(2).run(train, deeper, str(tmp_path / "b"), 1, 1, plan=both)[0]
    assert torch.equal(found["weights"]["output.weight"], fresh["output.weight"])
    assert torch.equal(found["weights"]["norm.weight"], old.read("model.norm.weight"))


@pytest.mark.slow
def test_the_optimizer_is_left_out_once(pool: Pools, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for name, content in _bytes(source).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    plan = CheckpointPlan(exclude_from_loading=("optimizer",))
    state = {LEFT_OUT: ["optimizer"]}
    found = pool(2).run(train, RUN, str(folder), 5, 6, plan=plan, state=state)[0]
    expected = pool(2).run(_with_a_new_optimizer, str(source), 5, 6)[0]
    assert found["losses"] == expected["losses"]
    _equal(found["weights"], expected["weights"])
    straight = pool(2).run(train, RUN, str(tmp_path / "straight"), 1, 6)[0]
    assert not torch.equal(found["weights"]["norm.weight"], straight["weights"]["norm.weight"])
    # The same command again: what it has learned since is not thrown away.
    again = pool(2).run(train, RUN, str(folder), 7, 8, plan=plan, state=state)[0]
    whole = pool(2).run(_with_a_new_optimizer, str(source), 5, 8)[0]
    _equal(again["weights"], whole["weights"])
    assert any("was left out when the run" in line for line in again["loaded"].notices)


@pytest.mark.slow
def test_a_part_of_the_optimizer_begins_anew(pool: Pools, source: Path, tmp_path: Path) -> None:
    plan = CheckpointPlan(
        initial_load_path=str(source),
        initial_load_model_only=False,
        exclude_from_loading=("optimizer.*.norm.weight.*",),
    )
    found = pool(1).run(_state_after_load, str(tmp_path), plan)[0]
    old = Contents(source / "step-4")
    for name, value in found.items():
        if name.startswith("norm.weight."):
            assert not value.any(), name
        else:
            assert torch.equal(value, old.read(f"optimizer.state.{name}")), name


def _state_after_load(world: DistEnv, folder: str, plan: CheckpointPlan) -> Tensors:
    model, optimizer, _ = build_tiny(world, RUN)
    assert Checkpointer(replace(plan, folder=folder), world, PRINTS).load(model, optimizer) is not None
    return {f"{n}.{k}": full(v) for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}


@pytest.mark.slow
def test_weights_in_another_precision_are_converted(pool: Pools, source: Path, tmp_path: Path) -> None:
    old = Contents(source / "step-4")
    names = [name for name in old.manifest.tensors if name.startswith("model.")]
    partial = tmp_path / "half" / ".partial"
    partial.mkdir(parents=True)
    writer = HashingWriter(partial)
    with quiet():
        dcp.save({name: old.read(name).bfloat16() for name in names}, storage_writer=writer, no_dist=True)
    manifest = replace(
        read_manifest(source / "step-4"),
        tensors={name: ["bfloat16", old.manifest.tensors[name][1]] for name in names},
        files={name: written.size for name, written in writer.written.items()},
        hashes={name: written.digest for name, written in writer.written.items()},
    )
    publish(partial, tmp_path / "half", manifest)
    still = replace(RUN, rates=[0.0] * 20)
    plan = CheckpointPlan(initial_load_path=str(tmp_path / "half"))
    found = pool(2).run(train, still, str(tmp_path / "own"), 1, 1, plan=plan)[0]
    for name, weight in found["weights"].items():
        assert torch.equal(weight, old.read(f"model.{name}").bfloat16().float()) and weight.dtype == torch.float32
    assert any("are converted" in line for line in found["loaded"].notices)
    whole = replace(plan, initial_load_model_only=False)
    refused = pool(2).run(refusal, still, str(tmp_path / "whole"), 1, 1, plan=whole)[0]
    assert 'checkpoint.exclude_from_loading = ["optimizer"]' in refused


def test_dangerous_changes_need_their_word(pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    pool(1).run(train, RUN, folder, 1, 2, state={"global_batch": 8})
    prints = {**PRINTS, "data": "x", "data order": "seed 5"}
    batch = {"global_batch": 4}
    refused = pool(1).run(refusal, RUN, folder, 3, 3, prints=prints, expected=batch)[0]
    assert "data: d there, x here" in refused and "global batch: 8 there, 4 here" in refused
    assert "--checkpoint.allow_changes=data,global_batch" in refused
    half = CheckpointPlan(allow_changes=("data",))
    assert "--checkpoint.allow_changes=global_batch" in pool(1).run(
        refusal, RUN, folder, 3, 3, prints=prints, expected=batch, plan=half
    )[0].replace("data,", "")
    both = CheckpointPlan(allow_changes=("global_batch", "data"))
    loaded = pool(1).run(train, RUN, folder, 3, 3, prints=prints, expected=batch, plan=both)[0]["loaded"]
    assert len(loaded.changes) == 3 and sum("by checkpoint.allow_changes" in line for line in loaded.notices) == 2
    assert pool(1).run(train, RUN, folder, 4, 4, prints=prints, plan=both)[0]["loaded"].changes == ()


def _stages_after_load(world: DistEnv, folder: str, plan: CheckpointPlan) -> Tensors:
    model, optimizer, _ = build_tiny(world, replace(RUN, pipeline=2))
    assert Checkpointer(replace(plan, folder=folder), world, PRINTS).load(model, optimizer) is not None
    return all_stages(model, {n: full(p) for n, p in model.named_parameters()})


@pytest.mark.slow
def test_a_stage_of_a_pipeline_may_take_nothing(pool: Pools, source: Path, tmp_path: Path) -> None:
    left_out = ("model.layers.1.*", "model.norm.*", "model.output.*")
    plan = CheckpointPlan(initial_load_path=str(source), exclude_from_loading=left_out)
    old, fresh = Contents(source / "step-4"), pool(2).run(initial_weights, RUN)[0]
    for found in pool(2).run(_stages_after_load, str(tmp_path), plan):
        assert found.keys() == fresh.keys()
        for name, weight in found.items():
            taken = name.startswith(("tok_embeddings.", "layers.0."))
            assert torch.equal(weight, old.read(f"model.{name}") if taken else fresh[name]), name
