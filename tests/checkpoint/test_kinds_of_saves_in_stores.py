"""The same run, once with its checkpoints in a folder and once in an object store: they hold the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import s3
from tests.checkpoint.test_kinds_of_saves import ON, _seed
from tests.pool import Pools
from tests.training import test_guard_runs as policies
from tests.training.test_run import _run
from titanlite.checkpoint.contents import Contents, compare
from titanlite.checkpoint.manifest import steps_in
from titanlite.checkpoint.place import Place, StorePath

pytestmark = pytest.mark.slow


def _held(root: Place, folder: Path) -> list[int]:
    """The steps of both, whose weights, moments, random generators and kinds must be equal."""
    steps = steps_in(root)
    assert steps == steps_in(folder) and steps
    for step in steps:
        left, right = Contents(root / f"step-{step}"), Contents(folder / f"step-{step}")
        assert not [one.name for one in compare(left, right) if one.elements or one.left != one.right], step
        assert left.manifest.weights_only == right.manifest.weights_only
        assert left.manifest.validation_loss == right.manifest.validation_loss
    return steps


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async_with_pinned_mem", marks=pytest.mark.soak)])
def test_milestones_the_best_and_weights_alone(pool: Pools, bucket: s3.Bucket, tmp_path: Path, mode: str) -> None:
    flags = [ON, f"--checkpoint.async_mode={mode}", "--training.steps=8", "--checkpoint.interval=100"]
    flags += ["--checkpoint.milestones=[3]", "--checkpoint.keep_best=1", "--checkpoint.keep_latest_k=1"]
    flags += ["--validation.enable", "--validation.freq=2", "--optimizer.lr=0.3"]
    flags += ["--checkpoint.model_weights_only", "--checkpoint.export_dtype=bfloat16"]
    here, there = tmp_path / "here", tmp_path / "there"
    pool(2).run(_run, str(here), *flags)
    url = f"--checkpoint.folder={bucket.root}"
    pool(2).run(s3.there, bucket.environment, _run, str(there), *flags, url)
    steps = _held(StorePath(bucket.root), here / "checkpoint")
    assert 3 in steps and 8 in steps
    last = Contents(StorePath(bucket.root) / "step-8").manifest
    assert last.weights_only and last.dtype == "bfloat16"


def test_a_run_from_a_seed(pool: Pools, bucket: s3.Bucket, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    url = f"--checkpoint.folder={bucket.root}"
    short = [ON, "--training.steps=2", "--checkpoint.interval=50"]
    seed = "--checkpoint.create_seed_checkpoint"
    pool(1).run(_seed, str(here), *short, seed)
    for twice in (False, True):
        (refused,) = pool(1).run(s3.there, bucket.environment, _seed, str(there), *short, seed, url)
        assert ("holds step-0 already" in refused) == twice
    assert _held(StorePath(bucket.root), here / "checkpoint") == [0]
    pool(2).run(_run, str(here), *short)
    pool(2).run(s3.there, bucket.environment, _run, str(there), *short, url)
    assert _held(StorePath(bucket.root), here / "checkpoint") == [0, 2]


def test_a_rollback(pool: Pools, bucket: s3.Bucket, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    flags = [*policies.SHORT, "--guard.policy=rollback"]
    straight = pool(2).run(policies._run, str(here), {6: policies.NAN}, *flags)[0]
    url = f"--checkpoint.folder={bucket.root}"
    found = pool(2).run(s3.there, bucket.environment, policies._run, str(there), {6: policies.NAN}, *flags, url)[0]
    assert found["step"] == 12 and [event["action"] for event in found["events"]] == ["rollback"]
    assert [(row["step"], row["loss"]) for row in found["rows"] if "loss" in row] == [
        (row["step"], row["loss"]) for row in straight["rows"] if "loss" in row
    ]
    _held(StorePath(bucket.root), here / "checkpoint")
