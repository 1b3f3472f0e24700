"""Which checkpoints go, when, and what a crash in between leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import PRINTS, RUN, flip, train
from tests.checkpoint.test_manifest import MANIFEST
from tests.pool import Pools
from titanlite.checkpoint.integrity import digest_of
from titanlite.checkpoint.manifest import CheckpointError, find, publish, steps_in
from titanlite.checkpoint.retention import Deleter, leftovers, retire, surplus
from titanlite.checkpoint.shelf import remove

ROOT = Path(__file__).resolve().parents[2]


def _write(root: Path, *steps: int, **fields: Any) -> None:
    for step in steps:
        partial = root / f".partial-{step}"
        partial.mkdir(parents=True)
        (partial / "shard").write_bytes(b"1234")
        publish(partial, root, replace(MANIFEST, step=step, **fields))


@pytest.mark.parametrize(
    ("latest", "every", "keep", "gone"),
    [
        (0, 0, (), []),
        (0, 7, (), []),
        (1, 0, (), [10, 20, 30, 40]),
        (2, 0, (), [10, 20, 30]),
        (2, 20, (), [10, 30]),
        (2, 0, (10,), [20, 30]),
        (5, 0, (), []),
        (9, 0, (), []),
    ],
)
def test_what_may_go(latest: int, every: int, keep: tuple[int, ...], gone: list[int]) -> None:
    assert surplus([30, 10, 50, 20, 40], latest, every, keep) == gone


def test_the_newest_never_goes() -> None:
    draw = random.Random(0)
    for _ in range(500):
        steps = draw.sample(range(1, 60), draw.randint(1, 12))
        latest, every = draw.randint(0, 5), draw.randint(0, 5)
        gone = surplus(steps, latest, every, draw.sample(steps, draw.randint(0, len(steps))))
        left = set(steps) - set(gone)
        assert max(steps) in left and len(left) >= min(latest or len(steps), len(steps))


def test_only_valid_ones_of_this_run_count_and_go(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2, 3, 4, 5, 9)
    _write(tmp_path, 6, fingerprints={"model": "another"})
    (tmp_path / "step-4" / "shard").write_bytes(b"123")  # cut: takes no place among the latest
    (tmp_path / "step-3" / "KEEP").touch()
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-0").mkdir()
    gone = retire(tmp_path, 9, latest=3, known_bad=(5,), fingerprints=MANIFEST.fingerprints)
    # Newest three that count: 9, 3 (pinned, but it counts) and 2.
    assert [path.name for path in gone] == [".deleted-step-1"]
    assert steps_in(tmp_path) == [0, 2, 3, 4, 5, 6, 9]
    _write(tmp_path, 10, validation_loss=3.0)
    gone = retire(tmp_path, 10, latest=1, keep=(2,), fingerprints=MANIFEST.fingerprints)
    names = [".deleted-step-4", ".deleted-step-5", ".deleted-step-9"]
    assert [path.name for path in gone] == names, "2 is resumed from, 3 is pinned"


def test_a_pin_that_comes_at_the_last_moment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the new name: the checkpoint gets its own name back, by retention and by `rm`."""
    _write(tmp_path, 1, 2, 3)
    rename = Path.rename

    def pinned_before(folder: Path, target: Path) -> Path:
        if folder.name == "step-1":
            (folder / "KEEP").touch()
        return rename(folder, target)

    monkeypatch.setattr(Path, "rename", pinned_before)
    assert retire(tmp_path, 3, latest=2) == []
    assert find(tmp_path, 1)[0] is not None and not leftovers(tmp_path)
    (tmp_path / "step-1" / "KEEP").unlink()
    with pytest.raises(CheckpointError, match="step-1 was pinned at this moment: it stays"):
        remove([tmp_path / "step-1"])
    assert steps_in(tmp_path) == [1, 2, 3] and not leftovers(tmp_path)


@pytest.mark.parametrize("by_hand", [False, True], ids=["retention", "rm"])
def test_a_step_that_is_a_link_goes_and_what_it_leads_to_stays(tmp_path: Path, by_hand: bool) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    _write(root, 1, 2, 3)
    (root / "step-1").rename(elsewhere)
    (root / "step-1").symlink_to(elsewhere)
    deleter = Deleter()
    if by_hand:
        remove([root / "step-1"])
    else:
        deleter.delete(retire(root, 3, latest=2))
    assert deleter.wait(10) and sorted(path.name for path in root.iterdir()) == ["step-2", "step-3"]
    assert sorted(path.name for path in elsewhere.iterdir()) == ["manifest.json", "shard"]


def test_the_last_that_is_known_to_be_good_stays(tmp_path: Path) -> None:
    """Weights may be finite and the next loss is not: only what was trained on, or validated, is known to be good."""
    _write(tmp_path, 1, 2, 3)
    assert [path.name for path in retire(tmp_path, 3, latest=1)] == [".deleted-step-1"]
    _write(tmp_path, 4, validation_loss=2.5)
    assert [path.name for path in retire(tmp_path, 4, latest=1)] == [".deleted-step-2", ".deleted-step-3"]
    _write(tmp_path, 5)
    assert retire(tmp_path, 5, latest=1) == [] and steps_in(tmp_path) == [4, 5]


@pytest.mark.parametrize(
    ("milestones", "stay"),
    [("powers_of_two", [1, 2, 4, 8, 16, 19, 20]), ((3, 7, 100), [3, 7, 19, 20]), ((), [19, 20])],
)
def test_milestones_stay(tmp_path: Path, milestones: Any, stay: list[int]) -> None:
    _write(tmp_path, *range(21))
    retire(tmp_path, 20, latest=2, milestones=milestones)
    assert steps_in(tmp_path) == stay


def test_the_best_by_validation_stay_by_what_the_manifests_say(tmp_path: Path) -> None:
    for step, loss in enumerate([5.0, 3.0, 4.0, 2.0, None, 3.0, 9.0], start=1):
        _write(tmp_path, step, validation_loss=loss)
    _write(tmp_path, 8, validation_loss=0.1, fingerprints={"model": "another"})
    _write(tmp_path, 9)
    (tmp_path / "step-4" / "shard").unlink()  # the lowest, but nobody can load it
    retire(tmp_path, 9, latest=2, best=2, fingerprints=MANIFEST.fingerprints)
    assert steps_in(tmp_path) == [2, 6, 7, 8, 9], "of equal ones both have a place here: 3.0 and 3.0"
    retire(tmp_path, 9, latest=2, best=1, fingerprints=MANIFEST.fingerprints)
    assert steps_in(tmp_path) == [2, 7, 8, 9], "of equal ones the earlier"


def test_weights_alone_take_no_place_and_stay(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2, 3)
    _write(tmp_path, 4, weights_only=True)
    assert retire(tmp_path, 4, latest=1) == [], "no run can go on from the newest: what it can go on from stays"
    _write(tmp_path, 5, 6)
    retire(tmp_path, 6, latest=2)
    assert steps_in(tmp_path) == [4, 5, 6]


def test_nothing_goes_while_the_new_one_is_not_whole(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2, 3)
    (tmp_path / "step-3" / "shard").unlink()
    with pytest.raises(CheckpointError, match="shard is missing"):
        retire(tmp_path, 3, latest=1)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_newer_folders_take_no_place(tmp_path: Path) -> None:
    """A folder left behind at a higher step must not push out what this run writes."""
    _write(tmp_path, 1, 2, 3, 900)
    assert [path.name for path in retire(tmp_path, 3, latest=2)] == [".deleted-step-1"]
    assert steps_in(tmp_path) == [2, 3, 900]


def test_a_run_keeps_what_it_is_told_to(pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    plan = CheckpointPlan(keep_latest_k=2, keep_every=4)
    pool(2).run(train, RUN, folder, 1, 9, every=1, plan=plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-8", "step-9"]
    pool(2).run(train, RUN, folder, 10, 12, every=1, plan=replace(plan, keep_every=0))
    # 9 was resumed from, and stays until another start no longer needs it.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-11", "step-12", "step-9"]
    (tmp_path / "step-11" / "KEEP").touch()
    pool(1).run(train, RUN, folder, 13, 15, every=1, plan=replace(plan, keep_every=0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-11", "step-12", "step-14", "step-15"]


def test_a_run_deletes_nothing_by_default(pool: Pools, tmp_path: Path) -> None:
    pool(1).run(train, RUN, str(tmp_path), 1, 4, every=1)
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_a_damaged_one_takes_no_place(pool: Pools, tmp_path: Path) -> None:
    """Its sizes are right, so only the load knows. With it as the second of two, the good one would go."""
    pool(1).run(train, RUN, str(tmp_path), 1, 4, every=2)
    flip(tmp_path / "step-4" / "__0_0.distcp")
    plan = CheckpointPlan(keep_latest_k=2)
    result = pool(1).run(train, RUN, str(tmp_path), 3, 5, every=5, plan=plan)[0]
    assert result["loaded"].step == 2
    assert steps_in(tmp_path) == [2, 4, 5], "the damaged one is left for a person to look at"


_SLOW = """
import os, sys, time
from pathlib import Path
from titanlite.checkpoint.retention import Deleter, retire
unlink = os.unlink
def slow(*args, **kwargs):
    unlink(*args, **kwargs)
    print("deleted one", flush=True)
    time.sleep(60)
os.unlink = slow
gone = retire(Path(sys.argv[1]), 4, latest=2)
deleter = Deleter()
deleter.delete(gone)
deleter.wait(99)
"""


def test_killed_while_deleting_leaves_only_good_checkpoints(pool: Pools, tmp_path: Path) -> None:
    pool(1).run(train, RUN, str(tmp_path), 1, 4, every=1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None and process.stdout.readline() == "deleted one\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".deleted-step-1", ".deleted-step-2", "step-3", "step-4"]
    assert [len(list(path.iterdir())) for path in leftovers(tmp_path)] == [2, 3], "one file was gone"
    manifest, passed = find(tmp_path)
    assert manifest is not None and manifest.step == 4 and passed == []
    pool(1).run(train, RUN, str(tmp_path), 5, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4", "step-5"]


def test_a_name_taken_by_an_earlier_crash_is_no_obstacle(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2, validation_loss=1.0)
    (tmp_path / ".deleted-step-1").mkdir()
    (gone,) = retire(tmp_path, 2, latest=1)
    assert gone.name == ".deleted-step-1.1"
    deleter = Deleter()
    deleter.delete(leftovers(tmp_path))
    deleter.wait(10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_waiting_for_the_deletion_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.checkpoint.retention.shutil.rmtree", lambda *_, **__: time.sleep(5))
    deleter = Deleter()
    deleter.delete([tmp_path])
    started = time.monotonic()
    deleter.wait(0.1)
    assert time.monotonic() - started < 2


def test_manifest_of_the_tests_is_whole() -> None:
    assert json.loads(MANIFEST.to_json())["hashes"] == {"shard": digest_of(b"1234")} and PRINTS
