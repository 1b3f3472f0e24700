"""At most one live run writes below a URL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import s3
from titanlite.checkpoint import CheckpointError
from titanlite.checkpoint.paths import StorePath
from titanlite.checkpoint.store_lock import Fence, StoreLock
from titanlite.runs.lock import LockedError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(bucket: s3.Bucket) -> StorePath:
    return bucket.path


def _holder(**process: Any) -> bytes:
    return json.dumps({"host": "elsewhere", "since": "then", "process": {"id": 1, "started": 1, **process}}).encode()


def test_a_second_run_is_refused_and_a_dead_one_is_taken_over(bucket: s3.Bucket, root: StorePath) -> None:
    with (
        StoreLock(root),
        pytest.raises(LockedError, match=f"{root} belongs to a run that is alive: process {os.getpid()}"),
    ):
        StoreLock(root).__enter__()
    assert bucket.objects() == {}
    code = (
        "import sys, os, signal; from titanlite.checkpoint.store_lock import StoreLock; "
        "from titanlite.checkpoint.paths import StorePath; "
        "StoreLock(StorePath(sys.argv[1])).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, **bucket.environment, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, str(root)], env=environment, timeout=300)
    assert len(bucket.objects("run/checkpoint/run.lock-")) == 1
    with StoreLock(root) as lock:
        assert list(bucket.objects()) == [lock.path.key.partition("/")[2]]
    assert bucket.objects() == {}


@pytest.mark.slow
def test_a_lock_of_another_machine_is_watched(bucket: s3.Bucket, root: StorePath) -> None:
    key = "run/checkpoint/run.lock-0123"
    bucket.write(key, _holder(space="another"))
    renewed = threading.Event()

    def renew() -> None:
        while not renewed.wait(1.0):
            bucket.write(key, _holder(space="another"))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(LockedError, match="process 1 on elsewhere"):
            StoreLock(root, dead_seconds=60.0).__enter__()
    finally:
        renewed.set()
        thread.join()
    time.sleep(1.1)  # the store tells whole seconds
    with StoreLock(root, dead_seconds=0.5):
        assert key not in bucket.objects()


def test_two_that_start_together_never_both_go_on(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.checkpoint.store_lock._BACK_SECONDS", 0.3)
    held, most = 0, 0
    guard = threading.Lock()

    def run() -> None:
        nonlocal held, most
        try:
            with StoreLock(root):
                with guard:
                    held += 1
                    most = max(most, held)
                time.sleep(0.2)
                with guard:
                    held -= 1
        except LockedError:
            pass

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 1


def test_a_run_that_was_taken_for_dead_publishes_nothing_more(bucket: s3.Bucket, root: StorePath) -> None:
    with StoreLock(root, renew_seconds=0.2) as lock:
        fence = Fence(root)
        fence.look()
        bucket.delete(lock.path.key.partition("/")[2])
        bucket.write("run/checkpoint/run.lock-other", _holder(space="another"))
        with pytest.raises(CheckpointError, match="was taken over by another run: process 1 on elsewhere"):
            fence.look()
    assert list(bucket.objects()) == ["run/checkpoint/run.lock-other"], "and it does not come back"
