"""One live run per folder or URL: a second run is refused, an abandoned lock is taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.golden import PRINTS, make
from tests.support.checkpoints import names, options
from tests.support.locks import compete
from tests.support.processes import environment, until
from tests.support.words import listening
from titanlite import exit_codes
from titanlite.assembly.folders import lock_folders
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.checkpoint.store_paths import AnyPath, StorePath
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import check_config
from titanlite.runs import lock as lock_module
from titanlite.runs.lock import (
    FILE,
    LEASE_SECONDS,
    LOST_HOSTS,
    LockedError,
    LockLostError,
    OwnershipCheck,
    RunLock,
)
from titanlite.runs.read import last_sign_of_life

HOLDER = (
    "import sys, time; from pathlib import Path; from titanlite.runs.lock import RunLock\n"
    "with RunLock(Path(sys.argv[1])):\n"
    "    print('held', flush=True); time.sleep(600)\n"
)


@pytest.fixture
def said() -> Iterator[list[str]]:
    with listening() as messages:
        yield messages


@pytest.fixture(params=["folder", "store"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AnyPath:
    """A folder, or an object store in the memory of this process, without anything in it."""
    if request.param == "folder":
        return tmp_path / "run"
    one_at_a_time = threading.Lock()
    write_new = StorePath.write_new

    def write_new_as_a_store_does(path: StorePath, content: bytes) -> None:
        with one_at_a_time:
            write_new(path, content)

    monkeypatch.setattr(StorePath, "write_new", write_new_as_a_store_does)
    return StorePath(f"memory://{tmp_path.name}/run")


def _held(place: AnyPath) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / FILE).read_bytes())
    return found


def _abandon(place: AnyPath, host: str = "node7", **process: Any) -> None:
    """Leave a lock as a process of another machine or boot does, or one of this with another start
    time.
    """
    with RunLock(place):
        holder = _held(place)
    holder.update(token="dead", host=host)
    holder["process"].update(process or {"id": 4711, "space": "another boot"})
    _write(place, holder)


def _write(place: AnyPath, holder: dict[str, Any]) -> None:
    if isinstance(place, Path):
        place.mkdir(exist_ok=True)
    (place / FILE).write_bytes(json.dumps(holder).encode())


@contextmanager
def _renewed(place: AnyPath) -> Iterator[None]:
    """Renew a lock as its holder elsewhere does."""
    stop = threading.Event()
    path = place / FILE
    content = path.read_bytes()

    def renew() -> None:
        while not stop.wait(0.3):
            os.utime(path) if isinstance(path, Path) else path.write_bytes(content)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_second_run_is_refused_by_name_and_the_lock_of_a_killed_one_is_taken_over(tmp_path, said):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(LockedError) as refused:
                RunLock(tmp_path).__enter__()
            since = _held(tmp_path)["since"]
            holder = f"process {process.pid} on {os.uname().nodename}, since {since}"
            for word in (str(tmp_path / FILE), holder, "--job.dump_folder"):
                assert word in str(refused.value)
            assert refused.value.exit_code == exit_codes.CHECKPOINT
            assert last_sign_of_life(tmp_path) is not None
        finally:
            process.kill()
    assert _held(tmp_path)["process"]["id"] == process.pid, "a killed process leaves its lock"
    assert last_sign_of_life(tmp_path) is None, "and the process shows at once that it is dead"
    with RunLock(tmp_path):
        assert _held(tmp_path)["process"]["id"] == os.getpid()
        (told,) = said
        assert told.endswith(holder)
    assert names(tmp_path) == []


def test_a_live_process_of_this_machine_is_refused_at_once_and_one_that_reused_its_id_is_not(
    place, said
):
    with RunLock(place), pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        RunLock(place).__enter__()
    _abandon(place, id=os.getpid(), started=1)
    with RunLock(place):
        (told,) = said
        assert "taken over" in told
    assert names(place) == []


def test_a_lock_of_another_machine_is_alive_as_long_as_it_is_renewed(place, said, monkeypatch):
    # Containers and cloned machines share host names; a process id means nothing in another PID
    # namespace.
    space = lock_module.process_of(os.getpid())["space"].replace("pid:[", "pid:[9")
    _abandon(place, id=4711, space=space, host=os.uname().nodename)
    began = time.monotonic()
    with _renewed(place), pytest.raises(LockedError, match="process 4711 on"):
        RunLock(place).__enter__()
    assert time.monotonic() - began < 120, "a sign of life is enough"
    assert "Watching for up to" in said[0]
    time.sleep(0.2)
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 0.5)
    with RunLock(place):
        assert "taken over: process 4711 on" in said[-1]
        assert time.monotonic() - began > 0.7
    assert names(place) == []


def test_a_lock_of_a_host_that_the_job_has_lost_is_taken_over_at_once(place, said, monkeypatch):
    monkeypatch.setenv(LOST_HOSTS, "node6,node7")
    for host in ("node", ""):
        _abandon(place, id=4711, space="elsewhere", host=host)
        with _renewed(place), pytest.raises(LockedError):
            RunLock(place).__enter__()
        (place / FILE).unlink()
    _abandon(place, id=4711, space="elsewhere", host="node7.lab")
    said.clear()
    with RunLock(place):
        assert "taken over: process 4711 on node7.lab" in said[0]
    assert names(place) == []


@pytest.mark.parametrize("content", [b"", b"{", None])
def test_an_old_lock_from_elsewhere_or_a_torn_one_is_taken_over_at_once(tmp_path, content):
    """Its age is that on the clock of the file system."""
    _abandon(tmp_path)
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    for age, alive in ((LEASE_SECONDS - 30, True), (LEASE_SECONDS + 30, False)):
        os.utime(tmp_path / FILE, (0, time.time() - age))
        assert (last_sign_of_life(tmp_path) is not None) == alive
    began = time.monotonic()
    with RunLock(tmp_path):
        assert _held(tmp_path)["process"]["id"] == os.getpid()
    assert time.monotonic() - began < 120, "no rest of a lease is waited for"


def test_the_holder_renews_it_and_tells_when_it_is_lost(place, said, monkeypatch):
    monkeypatch.setattr(lock_module, "RENEW_SECONDS", 0.05)
    with RunLock(place):
        first = (place / FILE).stat().st_mtime
        check = OwnershipCheck(place)
        check.look()
        until(lambda: (place / FILE).stat().st_mtime > first)
        check.look()
        _write(place, {**_held(place), "token": "other", "host": "node7"})
        until(lambda: said)
        assert f"{place / FILE} was taken over" in said[0]
        assert "on node7" in said[0]
        told = f"{place / FILE} was taken over by another run: .* on node7"
        with pytest.raises(LockLostError, match=told):
            check.look()
    assert _held(place)["token"] == "other", "another's lock is not deleted"


def test_of_many_that_find_it_dead_one_takes_it(place):
    _abandon(place, id=os.getpid(), started=1)
    assert compete(place, 8) == (1, 7)
    assert names(place) == []


def _save(world: DistEnv, folder: Path) -> str:
    model, optimizer = make()
    saver = Checkpointer(options(folder), world, PRINTS)
    saver.save(1, model, optimizer, {})
    _write(folder, {"token": "other", "process": {"id": 1}, "host": "node7"})
    with pytest.raises(CheckpointError) as lost:
        saver.save(2, model, optimizer, {})
    saver.close()
    return str(lost.value)


def test_a_run_that_lost_its_lock_publishes_no_checkpoint(pool, tmp_path):
    with RunLock(tmp_path):
        (said,) = pool(1).run(_save, tmp_path)
    assert "process 1 on node7" in said
    assert not (tmp_path / "step-2").exists()
    assert (tmp_path / "step-1").exists()


# What a run locks


def _locked(folder: Path, *flags: str) -> AbstractContextManager[None]:
    """What a run locks in this folder."""
    argv = [f"--job.dump_folder={folder}", "--checkpoint.enable_checkpoint", *flags]
    return lock_folders(folder, check_config(argv, 1, training=False)[1].checkpoint)


def test_checkpoints_are_locked_wherever_they_lie(tmp_path):
    """Two runs with folders of their own and checkpoints in one would resume and delete each
    other's saves.
    """
    shared = f"--checkpoint.folder={tmp_path / 'shared'}"
    (tmp_path / "link").symlink_to(tmp_path / "a" / "checkpoint")
    (tmp_path / "real").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "real")
    with (
        _locked(tmp_path / "a"),
        _locked(tmp_path / "c", f"--checkpoint.folder={tmp_path / 'other'}"),
        _locked(tmp_path / "d", shared),
        _locked(tmp_path / "e", shared, "--no-checkpoint.enable_checkpoint"),
    ):
        for folder in ("a/checkpoint", "link", "a", "real", "shared"):
            with (
                pytest.raises(LockedError, match=r"another --checkpoint\.folder"),
                _locked(tmp_path / "b", f"--checkpoint.folder={tmp_path / folder}"),
            ):
                pytest.fail(f"two runs hold {folder}")
        assert names(tmp_path / "b") == [], "the lock of its own folder is released"
    assert not list(tmp_path.rglob(FILE))
    with _locked(tmp_path / "a", "--checkpoint.folder=."):
        assert (tmp_path / "a" / FILE).exists(), "its own lock is not in its way"


def test_a_folder_of_checkpoints_that_cannot_be_is_found_at_the_start(tmp_path):
    run = tmp_path / "a"
    run.mkdir()
    (run / "checkpoint").write_text("a file")
    for folder, why in (
        (run / "checkpoint", "it is a file"),
        (run / "checkpoint" / "x", "Not a directory"),
    ):
        with (
            pytest.raises(CheckpointError, match=rf"checkpoint\.folder: .*{folder}.*{why}"),
            _locked(run, f"--checkpoint.folder={folder}"),
        ):
            pytest.fail("it was not looked at")
    assert names(run) == ["checkpoint"]


def test_the_next_start_waits_for_a_run_that_is_ending(place, monkeypatch, caplog):
    """Its launcher was killed, and it is in its last save."""
    monkeypatch.setattr(lock_module, "_NOTICE_SECONDS", 0.02)
    asked = threading.Event()
    first = RunLock(place, ending=asked.is_set)
    first.__enter__()
    with pytest.raises(LockedError, match="is alive"):
        RunLock(place).__enter__()
    asked.set()
    until(lambda: (lock_module.read_lock(place / FILE) or {}).get("ending"))
    OwnershipCheck(place, first._token).look()  # it still owns the folder
    began = time.monotonic()
    threading.Timer(1.0, first.__exit__).start()
    with RunLock(place):
        assert time.monotonic() - began > 0.9
    assert "was asked to stop and is ending" in caplog.text
