"""At most one live run writes below the URL of a real S3 server; tests/runs/test_lock.py has the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.checkpoint import s3
from titanlite.runs.lock import LockedError, RunLock

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_url_is_locked_by_one_run_and_a_dead_one_is_taken_over(bucket: s3.Bucket) -> None:
    alive = f"{bucket.root} belongs .* process {os.getpid()} on"
    with RunLock(bucket.path), pytest.raises(LockedError, match=alive), RunLock(bucket.path):
        pytest.fail("two hold it")
    assert bucket.objects() == {}
    code = (
        "import sys, os, signal; from titanlite.runs.lock import RunLock; "
        "from titanlite.checkpoint.paths import StorePath; "
        "RunLock(StorePath(sys.argv[1])).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, **bucket.environment, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, bucket.root], env=environment, timeout=300)
    assert list(bucket.objects()) == ["run/checkpoint/run.lock"]
    with RunLock(bucket.path):
        assert list(bucket.objects()) == ["run/checkpoint/run.lock"]
    assert bucket.objects() == {}


@pytest.mark.slow
def test_of_runs_that_start_together_one_goes_on(bucket: s3.Bucket) -> None:
    gate, over = threading.Barrier(4), threading.Event()
    outcomes: list[str] = []

    def run() -> None:
        gate.wait()
        try:
            with RunLock(bucket.path):
                outcomes.append("held")
                over.wait(60)
        except LockedError:
            outcomes.append("refused")

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while len(outcomes) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    over.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", "refused", "refused", "refused"] and bucket.objects() == {}
