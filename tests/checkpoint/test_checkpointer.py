"""Save and load on real ranks: exact resume, other rank counts, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import PRINTS, RUN, refusal, train
from tests.pool import Pools
from tests.training.harness import build_tiny
from titanlite.checkpoint import Checkpointer
from titanlite.checkpoint.contents import Contents, compare
from titanlite.parallel.dist_env import DistEnv


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_ten_and_ten_equal_twenty_bit_for_bit(pool: Pools, tmp_path: Path, implementation: str) -> None:
    run = replace(RUN, implementation=implementation)
    straight = pool(2).run(train, run, str(tmp_path / "a"), 1, 20, draw=True)
    first = pool(2).run(train, run, str(tmp_path / "b"), 1, 10, draw=True)
    second = pool(2).run(train, run, str(tmp_path / "b"), 11, 20, draw=True)
    for rank in range(2):
        assert first[rank]["losses"] + second[rank]["losses"] == straight[rank]["losses"]
        assert first[rank]["draws"] + second[rank]["draws"] == straight[rank]["draws"], "random state was not resumed"
    assert straight[0]["draws"] != straight[1]["draws"]
    _equal(second[0]["weights"], straight[0]["weights"])
    _equal(second[0]["state"], straight[0]["state"])
    assert len([k for k in second[0]["state"] if k.endswith("exp_avg_sq")]) == len(second[0]["weights"])


def test_save_after_load_holds_the_new_state(pool: Pools, tmp_path: Path) -> None:
    """A loader that leaves the optimizer with other tensors than the saver reads would save the old state here."""
    folder = str(tmp_path)
    pool(1).run(train, RUN, folder, 1, 4)
    pool(1).run(train, RUN, folder, 5, 8)
    third = pool(1).run(train, RUN, folder, 9, 12)[0]
    straight = pool(1).run(train, RUN, str(tmp_path / "straight"), 1, 12)[0]
    _equal(third["state"], straight["state"])
    _equal(third["weights"], straight["weights"])


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_other_rank_counts_continue_to_rounding(pool: Pools, tmp_path: Path, ranks: int) -> None:
    pool(2).run(train, RUN, str(tmp_path / "run"), 1, 10)
    straight = pool(2).run(train, RUN, str(tmp_path / "straight"), 1, 20)[0]
    resumed = pool(ranks).run(train, RUN, str(tmp_path / "run"), 11, 20)[0]
    torch.testing.assert_close(resumed["losses"], straight["losses"][10:], rtol=0, atol=5e-6)
    assert any("written on 2 ranks" in line for line in resumed["loaded"].notices)
    assert resumed["loaded"].train == {"next_sequence": 80}


#: Kinds of four ranks, each of which takes over from the one before it; the last one's checkpoint goes to the first.
KINDS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"replicas": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "ddp": {"replicas": 4},
    "tensor and pipeline": {"tensor": 2, "pipeline": 2},
    "replicas and tensor": {"replicas": 2, "tensor": 2},
    "whole": {"tensor": 4},
}


def _hand_on(world: DistEnv, source: str, target: str, kind: dict[str, Any], seed: int) -> int:
    """Load what another kind has saved into a model with other weights, and save it again as it is."""
    model, optimizer, _ = build_tiny(world, replace(RUN, **kind, seed=seed, args=replace(RUN.args, n_kv_heads=4)))
    for folder, first in ((source, True), (target, False)):
        checkpointer = Checkpointer(CheckpointPlan(enable=True, folder=folder), world, PRINTS)
        if first:
            loaded = checkpointer.load(model, optimizer)
            assert loaded is not None
        else:
            checkpointer.save(loaded.step, model, optimizer, loaded.train)
        checkpointer.close()
    return loaded.step


@pytest.mark.slow
def test_weights_and_moments_pass_through_every_kind_of_sharding(pool: Pools, tmp_path: Path) -> None:
    run = replace(RUN, args=replace(RUN.args, n_kv_heads=4))
    pool(4).run(train, run, str(tmp_path / "origin"), 1, 2)
    before = "origin"
    for seed, (name, kind) in enumerate([*KINDS.items(), ("fsdp again", {})], start=20):
        assert pool(4).run(_hand_on, str(tmp_path / before), str(tmp_path / name), kind, seed) == [2] * 4
        before = name
    sides = Contents(tmp_path / "origin" / "step-2"), Contents(tmp_path / before / "step-2")
    found = [one for one in compare(*sides) if one.name != "rng.torch"]
    assert sum(one.name.startswith("optimizer.") for one in found) > sum(one.name.startswith("model.") for one in found)
    assert [one.name for one in found if one.elements or not one.comparable] == []
    moments = [one.name for one in found if one.name.endswith("exp_avg_sq")]
    assert moments and all(sides[0].read(name).abs().sum() > 0 for name in moments), "there was something to carry"


def test_names_in_the_file_are_plain(pool: Pools, tmp_path: Path) -> None:
    from titanlite.checkpoint.manifest import find

    pool(2).run(train, RUN, str(tmp_path), 1, 1)
    manifest, _ = find(tmp_path)
    assert manifest is not None
    assert manifest.tensors["model.layers.0.attention.wk.weight"] == ["float32", [32, 64]]
    assert manifest.tensors["optimizer.state.layers.1.ffn_norm.weight.exp_avg"] == ["float32", [64]]
    assert not [name for name in manifest.tensors if "param_groups" in name or "_orig_mod" in name or "rope" in name]
    assert sum(manifest.files.values()) >= sum(_bytes(*entry) for entry in manifest.tensors.values())


def _bytes(dtype: str, shape: list[int]) -> int:
    return int(torch.Size(shape).numel()) * getattr(torch, dtype).itemsize


def test_damaged_newest_falls_back_and_says_why(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train, RUN, str(tmp_path), 1, 3)
    pool(2).run(train, RUN, str(tmp_path), 4, 6)
    shard = next((tmp_path / "step-6").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    result = pool(2).run(train, RUN, str(tmp_path), 4, 5)[0]
    assert len(result["loaded"].notices) == 2
    assert str(shard) in result["loaded"].notices[0]


def _refused(pool: Pools, ranks: int, *args: Any, **kwargs: Any) -> str:
    messages = pool(ranks).run(refusal, *args, **kwargs)
    assert len(set(messages)) == 1, "every rank must leave with the same error"
    return messages[0]


def test_refusals_name_the_way_out(pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    pool(1).run(train, RUN, folder, 1, 2)
    other = _refused(pool, 2, RUN, folder, 3, 4, prints={**PRINTS, "tokenizer": "x"})
    assert "tokenizer: t there, x here" in other and "--checkpoint.folder" in other
    assert "holds checkpoints already" in _refused(pool, 1, RUN, folder, 1, 2, start="fresh")
    assert "no valid checkpoint" in _refused(pool, 1, RUN, str(tmp_path / "new"), 1, 2, start="resume")
    pool(1).run(train, RUN, folder, 3, 4)
    back = _refused(pool, 1, RUN, folder, 3, 4, load_step=2)
    assert "holds newer checkpoints" in back and "move step-4" in back
    assert "no step-9" in _refused(pool, 1, RUN, folder, 10, 11, load_step=9)
    deeper = _refused(pool, 1, replace(RUN, args=replace(RUN.args, n_layers=3)), folder, 5, 6)
    assert _row(deeper, "model.layers.2.attention.wq.weight") == "– float32[64, 64] missing"
    shallower = _refused(pool, 1, replace(RUN, args=replace(RUN.args, n_layers=1)), folder, 5, 6)
    assert _row(shallower, "model.layers.1.attention.wq.weight") == "float32[64, 64] – unexpected"
    wider = _refused(pool, 1, replace(RUN, args=replace(RUN.args, ffn_dim=96)), folder, 5, 6)
    assert _row(wider, "model.layers.0.feed_forward.w1.weight") == "float32[192, 64] float32[96, 64] another shape"


def _row(table: str, name: str) -> str:
    (line,) = [line for line in table.splitlines() if line.split()[:1] == [name]]
    return " ".join(line.split()[1:])


def test_unfinished_save_is_cleared_and_never_loaded(pool: Pools, tmp_path: Path) -> None:
    stale = tmp_path / ".partial-step-9-123"
    stale.mkdir()
    (stale / "__0_0.distcp").write_bytes(b"half")
    pool(1).run(train, RUN, str(tmp_path), 1, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2"]
