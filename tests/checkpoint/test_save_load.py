"""Save and load on real ranks: exact resume, other ranks and meshes, damage that is found,
refusals.
"""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support import s3
from tests.support.checkpoints import (
    PRINTS,
    RUN,
    assert_equal,
    flip,
    hand_on,
    load,
    names,
    options,
    refusal,
    train,
    unequal,
)
from tests.support.harness import build_tiny
from tests.support.pool import Pools
from titanlite.checkpoint.dcp_files import HashingWriter
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError, steps_in
from titanlite.checkpoint.store_paths import AnyPath, StoreError, StorePath
from titanlite.cli.checkpoint_folders import verify
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.dist.dist_env import DistEnv


@pytest.mark.parametrize(
    ("mode", "implementation", "storage"),
    [
        ("async_with_pinned_mem", "foreach", "folder"),
        pytest.param("disabled", "fused", "folder", marks=pytest.mark.slow),
        pytest.param("async", "foreach", "s3", marks=pytest.mark.slow),
    ],
    indirect=["storage"],
)
def test_four_and_four_equal_eight_bit_for_bit(pool, storage, tmp_path, mode, implementation):
    run = replace(RUN, implementation=implementation)
    straight = pool(2).run(train, run, tmp_path / "straight", 1, 8, draw=True, every=2)
    options = {"async_mode": mode, "keep_latest_k": 2, "draw": True}
    first = storage.run(pool(2), train, run, storage.root, 1, 4, every=1, **options)
    assert steps_in(storage.root) == [3, 4]
    second = storage.run(pool(2), train, run, storage.root, 5, 8, every=2, **options)
    for before, after, whole in zip(first, second, straight, strict=True):
        assert before["losses"] + after["losses"] == whole["losses"]
        assert before["draws"] + after["draws"] == whole["draws"], "random generators"
    assert straight[0]["draws"] != straight[1]["draws"]
    assert_equal(second[0]["weights"], straight[0]["weights"])
    assert_equal(second[0]["state"], straight[0]["state"])
    for step in (4, 6, 8):
        assert unequal(storage.root / f"step-{step}", tmp_path / "straight" / f"step-{step}") == []
    loaded = second[0]["loaded"]
    assert loaded.verified
    assert loaded.folder == storage.root / "step-4"
    assert loaded.train == {"next_sequence": 32}
    assert names(storage.root) == ["step-4", "step-6", "step-8"], (
        "that which was resumed from stays"
    )


#: Meshes of four ranks, each of which takes over from the one before it; the last one's checkpoint
#: goes to the first.
MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"replicas": 2},
    "context": {"context": 2},
    "tensor and pipeline": {"tensor": 2, "pipeline": 2},
    "replicas and tensor": {"replicas": 2, "tensor": 2},
    "fsdp again": {},
}


@pytest.mark.slow
def test_weights_and_moments_pass_through_every_mesh(pool, tmp_path):
    run = replace(RUN, args=replace(RUN.args, n_kv_heads=4))
    pool(4).run(train, run, tmp_path / "origin", 1, 2)
    before = "origin"
    for seed, (name, mesh) in enumerate(MESHES.items(), start=20):
        other = replace(run, **mesh, seed=seed)
        assert pool(4).run(hand_on, other, tmp_path / before, tmp_path / name) == [2] * 4
        before = name
    first, last = (tmp_path / name / "step-2" for name in ("origin", before))
    assert {*unequal(first, last)} <= {"rng.torch"}
    contents = Contents(first)
    moments = [name for name in contents.manifest.tensors if name.endswith("exp_avg_sq")]
    assert moments and all(contents.read(name).abs().sum() > 0 for name in moments), (
        "there was something to carry"
    )


@pytest.fixture(scope="module")
def written(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 3 and 6, written by 2 ranks."""
    folder = tmp_path_factory.mktemp("written")
    pool(2).run(train, RUN, folder, 1, 6, every=3)
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(written, tmp_path / "run")


def _loads(pool: Pools, folder: Path, ranks: int = 2, **fields: Any) -> tuple[int, str]:
    """The step that is loaded, or 0, and what is said of it: the same on all ranks."""
    found = []
    for one in pool(ranks).run(load, RUN, folder, **fields):
        if one["error"]:
            assert one["untouched"]
            found.append((0, one["error"]))
        else:
            found.append((one["loaded"].step, "\n".join(one["loaded"].notices)))
    assert len(set(found)) == 1, found
    return found[0]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "where"),
    [("__0_0.distcp", 0.5), ("manifest.json", 0.02), ("__1_0.distcp", 0.97), (".metadata", 0.97)],
)
def test_one_flipped_bit_anywhere_leads_to_the_older_one(pool, copied, name, where):
    flip(copied / "step-6" / name, where)
    step, said = _loads(pool, copied)
    assert step == 3
    assert "step-6" in said and name in said


@pytest.mark.slow
def test_other_damage_and_fewer_ranks(pool, copied):
    flip(copied / "step-6" / "__1_0.distcp", 0.501)
    step, said = _loads(pool, copied, ranks=1)
    assert step == 3, "one rank reads the files of two"
    assert "written on 2 ranks, loaded on 1" in said
    assert _loads(pool, copied, verify="size")[0] == 6, "this is what verify = hash is for"
    flip(copied / "step-6" / ".metadata")
    assert _loads(pool, copied, verify="size")[0] == 3, "the index is always compared"


def test_without_a_good_one_the_run_is_refused_and_nothing_changes(pool, copied):
    """To begin a run anew where one was lost would look like success."""
    flip(copied / "step-3" / "__1_0.distcp")
    alone = shutil.copytree(copied / "step-3", copied / "a" / "step-3").parent
    step, said = _loads(pool, alone, load_step=3)
    assert step == 0 and "checkpoint.load_step = 3" in said, "never replaced by another"
    flip(copied / "step-6" / "__1_0.distcp")
    for start in ("resume-or-fresh", "resume"):
        step, said = _loads(pool, copied, start=start)
        assert step == 0 and "has no valid checkpoint" in said
        assert all(f"step-{step}/__1_0.distcp" in said for step in (3, 6))
        assert "--job.dump_folder" in said
        assert (f'"{start}"' in said) == (start == "resume")


def _save_thrice(world: DistEnv, folder: AnyPath, mode: str, cut: bool) -> list[str]:
    """Saves of steps 1, 2 and 3 where only one stays; when all ranks have written the second, the
    file of rank 1 is cut, or one of its bits flips.

    Returns results.
    """
    model, optimizer, _ = build_tiny(world, RUN)
    config = options(folder, async_mode=mode, keep_latest_k=1)
    results = []
    real = HashingWriter.all_files

    def on_a_bad_disk(writer: HashingWriter) -> Any:
        folder = writer._folder
        file = folder / next(name for name in names(folder) if name.startswith("__1_"))
        struck = folder.name == "step-2"
        if struck and cut:
            file.write_bytes(b"cut")
        found = real(writer)
        if struck and not cut:
            flip(file)
        return found

    with (
        closing(Checkpointer(config, world, PRINTS)) as saver,
        patch.object(HashingWriter, "all_files", on_a_bad_disk),
    ):
        for step in (1, 2, 3):
            try:
                # A validated one needs none before it to stay.
                saver.save(step, model, optimizer, {}, validation_loss=1.0)
                saver.wait()
                results.append("saved")
            except CheckpointError as error:
                results.append(str(error))
            results.append(f"{world.broadcast(None) or steps_in(saver.root)}")
    return results


@pytest.mark.parametrize(
    ("mode", "cut", "storage"),
    [
        ("async", False, "folder"),
        ("disabled", True, "folder"),
        pytest.param("disabled", False, "s3", marks=pytest.mark.slow),
    ],
    indirect=["storage"],
)
def test_what_changes_on_its_way_is_not_published(pool, storage, mode, cut):
    results = storage.run(pool(2), _save_thrice, storage.root, mode, cut)
    assert results[0] == results[1], "every rank learns of it"
    first, one, problem, left, third, last = results[0]
    assert (first, one, left, third, last) == ("saved", "[1]", "[1]", "saved", "[3]"), (
        "the second replaced nothing"
    )
    told = r"could not be read back: .*__1_\w*0\.distcp has changed since it was written: xxh3:"
    if cut:
        told = r"does not hold what was written to it \(__1_"
    assert re.search(told, problem)
    assert names(storage.root) == ["step-3"]
    assert verify(storage.root / "step-3")[1] == []


def _denied(world: DistEnv, folder: AnyPath) -> str:
    """A load where the store denies access to a shard of rank 1."""
    real = StorePath.open

    def denied(path: StorePath, mode: str, buffering: int = -1) -> Any:
        if mode == "rb" and "__1_" in path.name:
            raise StoreError(f"{path}: access denied (Not you)")
        return real(path, mode, buffering)

    with patch.object(StorePath, "open", denied):
        return str(load(world, RUN, folder)["error"])


@pytest.mark.slow
def test_a_store_that_denies_access_ends_a_load(pool, bucket):
    """It does not take an older checkpoint: nothing is known of the newest."""
    pool(2).run(s3.there, bucket.environment, train, RUN, bucket.root, 1, 4, every=2)
    errors = pool(2).run(s3.there, bucket.environment, _denied, bucket.path)
    assert errors[0] == errors[1]
    assert " cannot read s3://" in errors[0]
    assert "access denied" in errors[0]


def test_refusals_name_the_way_out(pool, tmp_path):
    folder = tmp_path / "run"
    pool(1).run(train, RUN, folder, 1, 4, every=2)
    other = pool(2).run(refusal, RUN, folder, 5, 6, prints={**PRINTS, "tokenizer": "x"})
    assert other[0] == other[1], "every rank must leave with the same error"
    assert "tokenizer: t there, x here" in other[0]
    assert "--checkpoint.folder" in other[0]
    for first, fields, told in (
        (1, {"start": "fresh"}, "checkpoint.start"),
        (3, {"load_step": 2}, "move step-4"),
        (10, {"load_step": 9}, "checkpoint.load_step = 9: .* has no step-9"),
    ):
        assert re.search(told, pool(1).run(refusal, RUN, folder, first, first, **fields)[0])
    assert (
        "no valid checkpoint"
        in pool(1).run(refusal, RUN, tmp_path / "new", 1, 2, start="resume")[0]
    )


def test_a_save_clears_what_killed_ones_have_left(pool, tmp_path):
    for step in (1, 9):
        (tmp_path / f".partial-step-{step}-0123abcd").write_bytes(b"")
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "__7_0.distcp").write_bytes(b"half")
    pool(1).run(train, RUN, tmp_path, 1, 1)
    assert names(tmp_path) == ["step-1"], "nothing of it is quarantined"
