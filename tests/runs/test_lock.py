"""One live run per folder: the second is refused, what a dead one left is taken over."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.words import listening
from titanlite.checkpoint import CheckpointError
from titanlite.config.errors import ConfigError
from titanlite.config.plans import Plans
from titanlite.main import _lock as _lock_run
from titanlite.prepare import checked_plans
from titanlite.runs.lock import FILE, LockedError, RunLock

HOLDER = (
    "import sys, time; from pathlib import Path; from titanlite.runs.lock import RunLock\n"
    "with RunLock(Path(sys.argv[1])):\n"
    "    print('held', flush=True); time.sleep(60)\n"
)


@pytest.fixture
def said() -> Iterator[list[str]]:
    with listening() as messages:
        yield messages


def _holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def _lock(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / FILE).read_text())
    return found


def _elsewhere(folder: Path) -> None:
    """Make the lock one of another machine."""
    record = _lock(folder)
    record.update(host="node7")
    record["process"].update(space="another boot", id=4711)
    (folder / FILE).write_text(json.dumps(record))


def test_a_second_run_is_refused_by_name_and_the_lock_of_a_killed_one_is_taken_over(
    tmp_path: Path, said: list[str]
) -> None:
    with _holder(tmp_path) as process:
        with pytest.raises(LockedError) as refused, RunLock(tmp_path):
            pytest.fail("two hold it")
        since = _lock(tmp_path)["since"]
        for word in (str(tmp_path), f"process {process.pid} on {os.uname().nodename}", since, "--job.dump_folder"):
            assert word in str(refused.value)
        process.kill()
        process.wait()
    assert _lock(tmp_path)["process"]["id"] == process.pid, "a killed process leaves its lock"
    with RunLock(tmp_path):
        assert _lock(tmp_path)["process"]["id"] == os.getpid()
        assert said == [
            f"the lock of a run that has died is taken over: process {process.pid} on {os.uname().nodename}, "
            f"since {since}"
        ]
    assert list(tmp_path.iterdir()) == []


def test_another_process_with_the_same_id_is_not_taken_for_the_holder(tmp_path: Path, said: list[str]) -> None:
    with RunLock(tmp_path):
        kept = _lock(tmp_path)
    kept["process"]["started"] -= 1
    (tmp_path / FILE).write_text(json.dumps(kept))
    with RunLock(tmp_path):
        assert len(said) == 1 and "taken over" in said[0]


def test_it_is_released_after_errors_and_can_be_taken_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    for _ in range(2):
        with pytest.raises(ValueError, match="shard"), RunLock(folder):
            raise ValueError("shard")
        assert not folder.exists(), "a folder in which nothing was written is not left behind"
    with RunLock(folder), pytest.raises(LockedError), RunLock(folder):
        pytest.fail("two hold it")
    with RunLock(folder):
        (folder / "metrics.jsonl").touch()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_lock_of_another_machine_is_alive_as_long_as_it_is_renewed(tmp_path: Path, said: list[str]) -> None:
    with RunLock(tmp_path):
        kept = _lock(tmp_path)
    (tmp_path / FILE).write_text(json.dumps(kept))
    _elsewhere(tmp_path)
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.3):
            os.utime(tmp_path / FILE)

    thread = threading.Thread(target=renew)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(LockedError, match="process 4711 on node7"), RunLock(tmp_path, dead_seconds=60):
            pytest.fail("two hold it")
    finally:
        stop.set()
        thread.join()
    assert time.monotonic() - began < 10, "a sign of life is enough"
    assert "Watching for up to" in said[0]
    with RunLock(tmp_path, dead_seconds=1.0):
        assert "taken over: process 4711 on node7" in said[-1]
        assert time.monotonic() - began > 1
    assert list(tmp_path.iterdir()) == []


def test_an_old_one_of_another_machine_is_taken_over_at_once(tmp_path: Path) -> None:
    """By the clock of the file system, on which the file of now is made too."""
    with RunLock(tmp_path):
        kept = _lock(tmp_path)
    (tmp_path / FILE).write_text(json.dumps(kept))
    _elsewhere(tmp_path)
    os.utime(tmp_path / FILE, (0, time.time() - 200))
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began < 5


def test_the_holder_renews_it_and_says_when_it_was_lost(tmp_path: Path, said: list[str]) -> None:
    with RunLock(tmp_path, renew_seconds=0.05):
        os.utime(tmp_path / FILE, (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / FILE).stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert time.time() - (tmp_path / FILE).stat().st_mtime < 10
        record = {**_lock(tmp_path), "token": "other"}
        aside = tmp_path / "aside"
        aside.write_text(json.dumps(record))
        aside.rename(tmp_path / FILE)
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "Two runs may be writing" in said[0]
    assert _lock(tmp_path)["token"] == "other", "another's lock is not deleted"


def test_of_many_that_find_it_dead_one_takes_it(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        process.kill()
    gate, over = threading.Barrier(8), threading.Event()
    held: list[int] = []
    refused: list[str] = []

    def attempt(number: int) -> None:
        gate.wait()
        try:
            with RunLock(tmp_path):
                held.append(number)
                over.wait(20)
        except LockedError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=attempt, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(held) + len(refused) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    over.set()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(refused) == 7
    assert list(tmp_path.iterdir()) == []


def test_who_died_while_taking_over_is_in_nobodys_way(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        process.kill()
    dead = _lock(tmp_path)
    claim = tmp_path / f".{FILE}.dead.{dead['token']}"
    claim.write_text(json.dumps({**dead, "token": "claimant"}))
    with RunLock(tmp_path):
        assert _lock(tmp_path)["process"]["id"] == os.getpid() and not claim.exists()


def test_who_is_taking_over_is_named(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        process.kill()
    dead = _lock(tmp_path)
    with RunLock(tmp_path / "other"):
        alive = _lock(tmp_path / "other")
    claim = tmp_path / f".{FILE}.dead.{dead['token']}"
    claim.write_text(json.dumps(alive))
    with pytest.raises(LockedError, match=f"being taken at this moment by another run: process {os.getpid()} on"):
        RunLock(tmp_path).__enter__()
    assert _lock(tmp_path) == dead


def test_a_torn_lock_is_taken_over_when_it_is_old(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    os.utime(tmp_path / FILE, (0, time.time() - 200))
    with RunLock(tmp_path):
        assert _lock(tmp_path)["process"]["id"] == os.getpid()


def test_checkpoints_that_lie_elsewhere_are_locked_too(tmp_path: Path) -> None:
    """Two runs with folders of their own, and checkpoints in one: each would take the other's saves for leftovers."""

    plans = functools.partial(_plans, tmp_path)
    shared = f"--checkpoint.folder={tmp_path / 'shared'}"
    with _lock_of_run(plans("a", shared)):
        with pytest.raises(LockedError, match=r"another --checkpoint\.folder"), _lock_of_run(plans("b", shared)):
            pass
        assert not (tmp_path / "b").exists(), "the lock of its own folder is given back"
        with _lock_of_run(plans("b")), _lock_of_run(plans("c", shared, "--no-checkpoint.enable_checkpoint")):
            assert (tmp_path / "b" / FILE).exists() and (tmp_path / "b" / "checkpoint" / FILE).exists()
    assert list(tmp_path.iterdir()) == []


def _lock_of_run(plans: Plans) -> AbstractContextManager[None]:
    return _lock_run(Path(plans.config.job.dump_folder), plans.config.checkpoint)


def _plans(root: Path, run: str, *flags: str) -> Plans:
    argv = [f"--job.dump_folder={root / run}", "--checkpoint.enable_checkpoint", *flags]
    return checked_plans(argv, 1, training=False)[1]


def test_checkpoints_in_the_folder_of_a_live_run_are_locked(tmp_path: Path) -> None:
    """Another run that saves there would resume the live one's checkpoint, and each would delete the other's."""
    (tmp_path / "link").symlink_to(tmp_path / "a" / "checkpoint")
    (tmp_path / "real").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "checkpoint").symlink_to(tmp_path / "real")
    with _lock_of_run(_plans(tmp_path, "a")), _lock_of_run(_plans(tmp_path, "c")):
        for folder in ("a/checkpoint", "link", "a", "real"):
            other = _plans(tmp_path, "b", f"--checkpoint.folder={tmp_path / folder}")
            with pytest.raises(LockedError, match=r"another --checkpoint\.folder"), _lock_of_run(other):
                pytest.fail(f"two runs hold {folder}")
    with _lock_of_run(_plans(tmp_path, "a", "--checkpoint.folder=.")):
        assert [path.name for path in (tmp_path / "a").iterdir()] == [FILE], "its own lock is not in its way"


def test_a_folder_of_checkpoints_that_cannot_be_is_found_at_the_start(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / "checkpoint").write_text("a file")
    for folder, why in ((run / "checkpoint", "it is a file"), (run / "checkpoint" / "x", "Not a directory")):
        said = f"checkpoint.folder: cannot write to '{folder}': {why}"
        plans = _plans(tmp_path, "a", f"--checkpoint.folder={folder}")
        with pytest.raises(CheckpointError, match=re.escape(said)), _lock_of_run(plans):
            pytest.fail("it was not looked at")
    (tmp_path / "link").symlink_to(run / "logs")
    for flag in ("logs/checkpoint", "logs", tmp_path / "link" / "checkpoint"):
        plans = _plans(tmp_path, "a", f"--checkpoint.folder={flag}")
        with pytest.raises(ConfigError, match=r"checkpoint\.folder: .*, where the logs of"), _lock_of_run(plans):
            pytest.fail("it was not looked at")
    assert [path.name for path in run.iterdir()] == ["checkpoint"]
