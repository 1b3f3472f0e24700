"""Object stores: streams, errors in plain words, kills of real processes. Most other tests here use stores too."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from titanlite.app import _lock

from tests.checkpoint import s3
from tests.checkpoint.runs import RUN, names, train, unequal
from tests.failures.runs import flags, rows
from tests.pool import Pools, free_port
from titanlite import exit_codes
from titanlite.checkpoint import CheckpointError
from titanlite.checkpoint.manifest import steps_in
from titanlite.checkpoint.paths import StoreError, StorePath, entries, to_path
from titanlite.checkpoint.retention import begin, delete, leftovers
from titanlite.config.fit import check_config
from titanlite.config.load import load
from titanlite.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_paths() -> None:
    assert to_path("outputs/a") == Path("outputs/a") and to_path("file:///tmp/a%20b") == Path("/tmp/a b")
    url = to_path("s3://bucket//run/checkpoint/")
    assert isinstance(url, StorePath) and str(url) == "s3://bucket/run/checkpoint"
    assert url.name == "checkpoint" and str(url.parent / "x") == "s3://bucket/run/x"
    assert url == to_path("S3://bucket/run/checkpoint") and len({url, StorePath(str(url))}) == 1


def test_urls_that_cannot_work_are_refused_with_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from titanlite.config.checks import missing_packages

    def refused(*urls: str) -> str:
        keys = ("checkpoint.folder", "checkpoint.initial_load_path")
        flags = [f"--{key}={url}" for key, url in zip(keys, urls, strict=False)]
        return "\n".join(map(str, missing_packages(load(["--checkpoint.enable_checkpoint", *flags]))))

    assert refused("s3://bucket/run", "s3://bucket/other") == "" and refused("file:///tmp/x") == ""
    assert "memory of one process" in refused("memory://run") and "names no bucket" in refused("s3://")
    assert "s33" in refused("s33://bucket/run") and "initial_load_path" in refused("outputs", "s33://bucket/run")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'titanlite[s3]'" in refused("s3://b/run") and "pip install gcsfs" in refused("gs://b/run")


@pytest.mark.slow
def test_large_objects_are_written_and_read_in_parts(bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than what is sent and fetched at a time, read across the borders."""
    monkeypatch.setattr("titanlite.checkpoint.paths._WRITE", 5 << 20)
    monkeypatch.setattr("titanlite.checkpoint.paths._READ", 1 << 20)
    content = os.urandom((11 << 20) + 17)
    path = bucket.path / "large"
    with path.open("wb") as stream:
        for at in range(0, len(content), 3 << 20):
            stream.write(content[at : at + (3 << 20)])
    assert entries(bucket.path) == {"large": False} and bucket.objects() == {path.key.partition("/")[2]: len(content)}
    with path.open("rb") as stream:
        for at, count in ((0, 10), (1 << 20, 5), ((1 << 20) - 3, 9), (len(content) - 2, 2), (5 << 20, 4 << 20)):
            stream.seek(at)
            assert stream.read(count) == content[at : at + count]
        stream.seek(-7, os.SEEK_END)
        assert stream.read() == content[-7:]
    with pytest.raises(ZeroDivisionError), (bucket.path / "half").open("wb") as stream:
        stream.write(content[: 6 << 20])
        _ = 1 / 0
    assert not (bucket.path / "half").exists()
    assert "Uploads" not in bucket.client.list_multipart_uploads(Bucket=bucket.name)


@pytest.mark.slow
def test_an_upload_that_was_never_ended_goes_with_its_leftover(bucket: s3.Bucket) -> None:
    (begin(bucket.path, 6) / "shard").write_bytes(b"1234")
    keys = [f"run/checkpoint/{name}/x" for name in ("step-6", "step-66")]
    for key in keys:
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)
    for mark in leftovers(bucket.path):
        delete(mark)
    left = bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    assert [upload["Key"] for upload in left] == [keys[1]] and bucket.objects() == {}


def _refused(url: str, folder: Path) -> str:
    argv = [f"--job.dump_folder={folder}", "--checkpoint.enable_checkpoint", f"--checkpoint.folder={url}"]
    with pytest.raises(CheckpointError) as refused, _lock(check_config(argv, 1, training=False)[1]):
        pytest.fail("it was not looked at")
    return str(refused.value)


@pytest.mark.slow
def test_no_bucket_no_server_and_no_credentials_are_named(
    bucket: s3.Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = "s3://no-such-bucket/run"
    assert f"checkpoint.folder: {nowhere}: there is no bucket s3://no-such-bucket" == _refused(nowhere, tmp_path)
    for url, reason in ((nowhere, "there is no bucket"), (f"{bucket.root}/none", "no such folder")):
        assert main(["checkpoint", "ls", url]) == exit_codes.CHECKPOINT
        printed = capsys.readouterr().err
        assert printed.startswith(f"error: {url}: {reason}") and printed.count("\n") == 1
    with pytest.raises(StoreError, match="there is no bucket"):
        StorePath(nowhere).write_bytes(b"")
    s3.use(monkeypatch, {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{free_port()}", "AWS_MAX_ATTEMPTS": "1"})
    assert f"checkpoint.folder: {bucket.root}: the store cannot be reached" in _refused(bucket.root, tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    files = dict.fromkeys(("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"), "/nowhere")
    endpoint = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{bucket.port}", "AWS_EC2_METADATA_DISABLED": "true"}
    s3.use(monkeypatch, {**files, **endpoint})
    with pytest.raises(StoreError, match="no credentials .* set AWS_ACCESS_KEY_ID"):
        bucket.path.is_dir()


@pytest.mark.slow
def test_a_busy_store_is_asked_again(pool: Pools, bucket: s3.Bucket) -> None:
    """The first requests of each kind get SlowDown, in saving and in loading."""
    refused: dict[str, int] = {}
    lock = threading.Lock()

    def decide(method: str, path: str) -> s3.Answer | None:
        kind = f"{method} {'manifest' if 'manifest' in path else 'shard' if '__0_' in path else 'other'}"
        with lock:
            refused[kind] = refused.get(kind, 0) + 1
            return s3.SLOW_DOWN if refused[kind] <= 1 else None

    with s3.proxy(bucket.port, decide) as port:
        pool(1).run(s3.there, s3.environment(port), train, RUN, bucket.root, 1, 2)
        found = pool(1).run(s3.there, s3.environment(port), train, RUN, bucket.root, 3, 4)
    assert found[0]["loaded"].step == 2 and steps_in(bucket.path) == [2, 4]
    assert refused["PUT shard"] > 1 and refused["PUT manifest"] > 1 and refused["GET shard"] > 1


def _torchrun(bucket: s3.Bucket, port: int, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", "train.py", *flags(folder, f"--checkpoint.folder={bucket.root}")]
    environment = {**os.environ, **s3.environment(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def _kill(run: subprocess.Popen[str]) -> None:
    """All at once, as a machine that fails: workers are no children of the test."""
    workers = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    for process in (run.pid, *map(int, workers)):
        os.kill(process, 9)
    run.communicate()


@pytest.mark.slow
def test_killed_between_the_shards_and_the_manifest(bucket: s3.Bucket, tmp_path: Path) -> None:
    """Real processes: the next start deletes the leftover, and ends as an undisturbed run does."""
    arrived, go_on = threading.Event(), threading.Event()

    def decide(method: str, path: str) -> s3.Answer | None:
        if method == "PUT" and "/step-6/manifest.json" in path:
            arrived.set()
            go_on.wait(300)
            return 500, b""  # nobody is there to hear it
        return None

    with s3.proxy(bucket.port, decide) as port:
        run = _torchrun(bucket, port, tmp_path / "run")
        try:
            assert arrived.wait(300), "the save of step 6 never came"
        finally:
            _kill(run)
            go_on.set()
    left = names(bucket.path / "step-6")
    assert len(left) == 3 and "manifest.json" not in left, "all shards and the index"
    assert steps_in(bucket.path) == [2, 4]

    again = _torchrun(bucket, bucket.port, tmp_path / "run")
    said, _ = again.communicate(timeout=600)
    assert again.returncode == 0, said
    assert f"resumed from step 4 in {bucket.root}" in said and "resume verified at step 4" in said
    assert names(bucket.path) == ["step-2", "step-4", "step-6", "step-8"]
    straight = s3.new_bucket(bucket.port)
    other = _torchrun(straight, bucket.port, tmp_path / "straight")
    said, _ = other.communicate(timeout=600)
    assert other.returncode == 0, said
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
    assert unequal(bucket.path / "step-8", straight.path / "step-8") == []


@pytest.mark.slow
def test_a_run_that_cannot_reach_its_store_ends_before_any_work(bucket: s3.Bucket, tmp_path: Path) -> None:
    run = _torchrun(s3.Bucket("no-such-bucket", bucket.port), bucket.port, tmp_path / "run")
    said, _ = run.communicate(timeout=600)
    assert run.returncode and "error: checkpoint.folder: s3://no-such-bucket/run/checkpoint" in said
    assert "there is no bucket s3://no-such-bucket" in said and "botocore" not in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
