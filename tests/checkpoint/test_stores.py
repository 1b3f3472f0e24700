"""Object stores: streams, errors in plain words, kills of real processes.

Most other tests here use stores too.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support import s3
from tests.support.checkpoints import MANIFEST, options, write
from tests.support.locks import compete
from tests.support.pool import free_port
from tests.support.processes import python
from titanlite.assembly.folders import lock_folders
from titanlite.checkpoint.manifest import CheckpointError, find, steps_in
from titanlite.checkpoint.retention import Deleter, clear_leftovers, prune
from titanlite.checkpoint.store_paths import StoreError, StorePath, entries, to_path
from titanlite.config.checks import missing_packages
from titanlite.config.load import load
from titanlite.config.sections import Checkpoint
from titanlite.runs.lock import LockedError, RunLock


def test_urls_that_cannot_work_are_refused_with_the_config(monkeypatch):
    def refused(*urls):
        keys = ("checkpoint.folder", "checkpoint.initial_load_path")
        flags = [f"--{key}={url}" for key, url in zip(keys, urls, strict=False)]
        config = load(["--checkpoint.enable_checkpoint", *flags])
        return "\n".join(map(str, missing_packages(config)))

    assert refused("s3://bucket/run", "s3://bucket/other") == ""
    assert refused("file:///tmp/x") == ""
    assert to_path("file:///tmp/a%20b") == Path("/tmp/a b")
    assert "memory of one process" in refused("memory://run")
    assert "names no bucket" in refused("s3://")
    for url in ("s33://bucket/run", "zip://run"):
        assert f'"{url}" is of no kind of store that is known here' in refused(url)
        # A command without a config.
        with pytest.raises(StoreError, match=":// is no kind of store"):
            to_path(url).is_dir()
    assert "initial_load_path" in refused("outputs", "s33://bucket/run")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'titanlite[s3]'" in refused("s3://b/run")
    assert "pip install gcsfs" in refused("gs://b/run")


@pytest.mark.slow
def test_large_objects_are_written_and_read_in_parts(bucket, monkeypatch):
    """Larger than what is sent and fetched at a time, read across the borders."""
    monkeypatch.setattr("titanlite.checkpoint.store_paths._PART", 5 << 20)
    content = os.urandom((11 << 20) + 17)
    path = bucket.path / "large"
    with path.open("wb") as stream:
        for at in range(0, len(content), 3 << 20):
            stream.write(content[at : at + (3 << 20)])
    assert entries(bucket.path) == {"large": False}
    assert bucket.objects() == {path.key.partition("/")[2]: len(content)}
    with path.open("rb") as stream:
        for at, count in ((0, 10), (len(content) - 2, 2), (5 << 20, 4 << 20)):
            stream.seek(at)
            assert stream.read(count) == content[at : at + count]
    with pytest.raises(ZeroDivisionError), (bucket.path / "half").open("wb") as stream:
        stream.write(content[: 6 << 20])
        _ = 1 / 0
    assert not (bucket.path / "half").exists()
    assert "Uploads" not in bucket.client.list_multipart_uploads(Bucket=bucket.name)


def _refused(url: str, folder: Path) -> str:
    section = Checkpoint(enable_checkpoint=True, folder=url)
    with pytest.raises(CheckpointError) as refused, lock_folders(folder, section):
        pytest.fail("it was not looked at")
    return str(refused.value)


@pytest.mark.slow
def test_no_bucket_no_server_and_no_credentials_are_named(bucket, tmp_path, monkeypatch):
    nowhere = "s3://no-such-bucket/run"
    there_is_none = f"checkpoint.folder: {nowhere}: there is no bucket s3://no-such-bucket"
    assert _refused(nowhere, tmp_path) == there_is_none
    closed = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{free_port()}", "AWS_MAX_ATTEMPTS": "1"}
    s3.use(monkeypatch, closed)
    unreached = f"checkpoint.folder: {bucket.root}: the store cannot be reached"
    assert unreached in _refused(bucket.root, tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    files = dict.fromkeys(("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"), "/nowhere")
    endpoint = bucket.environment["AWS_ENDPOINT_URL_S3"]
    s3.use(
        monkeypatch,
        {**files, "AWS_ENDPOINT_URL_S3": endpoint, "AWS_EC2_METADATA_DISABLED": "true"},
    )
    with pytest.raises(StoreError, match="no credentials .* set AWS_ACCESS_KEY_ID"):
        bucket.path.is_dir()


@pytest.mark.slow
def test_of_runs_that_start_together_one_holds_a_url_and_a_killed_one_is_taken_over(bucket):
    code = (
        "import sys, os, signal; from titanlite.runs.lock import RunLock; "
        "from titanlite.checkpoint.store_paths import StorePath; "
        "RunLock(StorePath(sys.argv[1])).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    python("-c", code, bucket.root, env=bucket.environment)
    assert list(bucket.objects()) == ["run/checkpoint/run.lock"]
    assert compete(bucket.path, 4) == (1, 3)
    assert bucket.objects() == {}


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorePath:
    def refused(files: MemoryFileSystem, path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(MemoryFileSystem, "rm_file", refused)
    # Clients report nothing where they delete several objects.
    monkeypatch.setattr(MemoryFileSystem, "rm", lambda *_, **__: None)
    return StorePath(f"memory://{tmp_path.name}/run")


def test_saves_work_and_old_checkpoints_stay(locked):
    deleter = Deleter()
    for step in (2, 4, 6):
        clear_leftovers(locked, step, deleter)
        write(locked, step, validation_loss=1.0)
        with pytest.raises(StoreError, match="access denied") if step > 2 else nullcontext():
            deleter.delete(prune(locked, step, options(locked, keep_latest_k=1)))
        assert deleter.wait(60)
        assert find(locked) == (replace(MANIFEST, step=step, validation_loss=1.0), [])
    assert steps_in(locked) == [2, 4, 6]


def test_a_lock_that_cannot_be_deleted_is_released_and_taken_over(locked):
    for _ in range(2):
        with (
            RunLock(locked),
            pytest.raises(LockedError, match="belongs to a run that is alive"),
        ):
            RunLock(locked).__enter__()
