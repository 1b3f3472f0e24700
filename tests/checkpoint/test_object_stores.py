"""Checkpoints in an object store: the same as in a folder, with a real S3 server, real ranks and real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import s3
from tests.checkpoint.runs import PRINTS, RUN, refusal, train
from tests.checkpoint.test_manifest import MANIFEST
from tests.failures.runs import flags, rows
from tests.pool import Pools
from tests.training.harness import build_tiny
from titanlite import exit_codes
from titanlite.checkpoint import Checkpointer, CheckpointError, store
from titanlite.checkpoint.contents import Contents, compare
from titanlite.checkpoint.integrity import digest_of
from titanlite.checkpoint.manifest import find, publish, read_manifest, step_folder, steps_in
from titanlite.checkpoint.place import StoreError, StorePath, place, sizes
from titanlite.checkpoint.retention import Deleter, begin, leftovers, retire
from titanlite.config.load import load
from titanlite.parallel.dist_env import DistEnv
from titanlite.runs.lock import LockedError, RunLock
from titanlite.runs.lock import LockedError
from titanlite.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
SHARD = b"1234"


@pytest.fixture
def root(bucket: s3.Bucket) -> StorePath:
    return StorePath(bucket.root)


@pytest.fixture(scope="module")
def written(server: int, pool: Pools) -> s3.Bucket:
    """Steps 2 and 4 of two ranks."""
    bucket = s3.new_bucket(server)
    pool(2).run(s3.there, bucket.environment, train, RUN, bucket.root, 1, 4, every=2)
    return bucket


@pytest.fixture
def copied(written: s3.Bucket, bucket: s3.Bucket) -> s3.Bucket:
    for key in written.objects():
        bucket.write(key, written.read(key))
    return bucket


def _write(root: StorePath, *steps: int, **fields: Any) -> None:
    """Checkpoints of one small object each, as a save writes them."""
    manifest = replace(MANIFEST, files={"shard": 4}, hashes={"shard": digest_of(SHARD)}, **fields)
    for step in steps:
        folder = begin(root, step, {}, Deleter())
        (folder / "shard").write_bytes(SHARD)  # type: ignore[operator]
        publish(folder, root, replace(manifest, step=step))


# What is there


def test_places() -> None:
    assert place("outputs/a") == Path("outputs/a") and place("file:///tmp/a%20b") == Path("/tmp/a b")
    url = place("s3://bucket//run/checkpoint/")
    assert isinstance(url, StorePath) and str(url) == "s3://bucket/run/checkpoint"
    assert url.name == "checkpoint" and str(url.parent / "x") == "s3://bucket/run/x"
    assert url == place("S3://bucket/run/checkpoint") and len({url, StorePath(str(url))}) == 1
    config = load(
        [
            "--checkpoint.enable_checkpoint",
            "--checkpoint.folder=s3://bucket/run",
            "--checkpoint.initial_load_path=gs://b/c",
            "--job.dump_folder=o",
        ]
    )
    plan = resolve(config, world_size=1).checkpoint
    assert (plan.folder, plan.initial_load_path) == ("s3://bucket/run", "gs://b/c")


def test_what_is_written_is_read_in_pieces(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than what is sent and fetched at a time, read across the borders."""
    monkeypatch.setattr("titanlite.checkpoint.place._WRITE", 5 << 20)
    monkeypatch.setattr("titanlite.checkpoint.place._READ", 1 << 20)
    content = os.urandom((11 << 20) + 17)
    path = root / "large"
    with path.open("wb") as stream:
        for at in range(0, len(content), 3 << 20):
            stream.write(content[at : at + (3 << 20)])
    assert sizes(root) == {"large": len(content)} and path.stat().st_size == len(content)
    with path.open("rb") as stream:
        for at, count in ((0, 10), (1 << 20, 5), ((1 << 20) - 3, 9), (len(content) - 2, 2), (5 << 20, 4 << 20)):
            stream.seek(at)
            assert stream.read(count) == content[at : at + count]
        stream.seek(-7, os.SEEK_END)
        assert stream.read() == content[-7:]
    with pytest.raises(ZeroDivisionError), (root / "half").open("wb") as stream:
        stream.write(content[: 6 << 20])
        _ = 1 / 0
    assert not (root / "half").exists()
    assert (root / "half").fs.list_multipart_uploads(root.key.partition("/")[0]) == []


def test_listings_are_never_remembered(bucket: s3.Bucket, root: StorePath) -> None:
    assert steps_in(root) == [] and not root.is_dir()
    _write(root, 2)
    assert steps_in(root) == [2]
    bucket.delete("run/checkpoint/step-2/manifest.json")
    assert find(root)[0] is None
    bucket.delete("run/checkpoint/step-2/shard")
    assert steps_in(root) == []


# The manifest is what makes a checkpoint


def test_a_folder_without_its_manifest_is_none_and_goes(bucket: s3.Bucket, root: StorePath) -> None:
    _write(root, 2, 4)
    half = begin(root, 6, {}, Deleter())
    (half / "shard").write_bytes(SHARD)
    assert steps_in(root) == [2, 4] and find(root)[0].step == 4, "not even mentioned"  # type: ignore[union-attr]
    (mark,) = leftovers(root)
    assert mark.name.startswith(".partial-step-6-")
    _write(root, 8)
    assert not bucket.objects("run/checkpoint/step-6") and leftovers(root) == []
    assert steps_in(root) == [2, 4, 8]


def test_a_large_object_that_was_never_ended_goes_too(bucket: s3.Bucket, root: StorePath) -> None:
    half = begin(root, 6, {}, Deleter())
    keys = [f"run/checkpoint/{name}/x" for name in ("step-6", "step-66")]
    for key in keys:
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)
    (half / "shard").write_bytes(SHARD)
    begin(root, 7, {}, Deleter())
    left = bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    assert [upload["Key"] for upload in left] == [keys[1]]


def test_killed_between_manifest_and_the_end_of_the_save(bucket: s3.Bucket, root: StorePath) -> None:
    """The mark of the save is still there, and the checkpoint is one."""
    _write(root, 2)
    bucket.write("run/checkpoint/.partial-step-2-01234567", b"")
    assert steps_in(root) == [2]
    Deleter().delete(leftovers(root))
    _write(root, 4)
    assert steps_in(root) == [2, 4] and leftovers(root) == [] and read_manifest(step_folder(root, 2)).step == 2


def test_killed_at_each_point_of_a_deletion(bucket: s3.Bucket, root: StorePath) -> None:
    _write(root, 2, 4)
    bucket.write("run/checkpoint/.deleted-step-2-01234567", b"")  # marked, not begun
    assert steps_in(root) == [2, 4]
    bucket.delete("run/checkpoint/step-2/manifest.json")  # begun
    assert steps_in(root) == [4]
    for mark in leftovers(root):
        store.delete(mark)  # type: ignore[arg-type]
    assert list(bucket.objects()) == ["run/checkpoint/step-4/manifest.json", "run/checkpoint/step-4/shard"]


def test_a_valid_step_is_never_written_again_and_an_invalid_one_is_kept(bucket: s3.Bucket, root: StorePath) -> None:
    _write(root, 2, 4)
    before = bucket.objects()
    with pytest.raises(CheckpointError, match="already holds a valid checkpoint"):
        begin(root, 4, {}, Deleter())
    assert bucket.objects() == before
    with pytest.raises(CheckpointError, match="holds a checkpoint meanwhile"):
        publish(step_folder(root, 4), root, replace(MANIFEST, step=4, train={"another": 1}))
    bucket.write("run/checkpoint/step-4/shard", b"12345")
    _write(root, 4)
    assert bucket.read("run/checkpoint/step-4.invalid-0/shard") == b"12345"
    assert "run/checkpoint/step-4.invalid-0/manifest.json" in bucket.objects()
    assert b"has 5 bytes, the manifest says 4" in bucket.read("run/checkpoint/step-4.invalid-0/invalid.txt")
    assert read_manifest(step_folder(root, 4)).step == 4 and steps_in(root) == [2, 4]


def test_retention(bucket: s3.Bucket, root: StorePath) -> None:
    _write(root, 1, 2, 3, 4, 5, 6, fingerprints=PRINTS)
    bucket.write("run/checkpoint/step-2/KEEP", b"")
    gone = retire(root, 6, latest=2, every=3, fingerprints=PRINTS)
    assert steps_in(root) == [2, 3, 5, 6], "before anything is deleted, but for the manifests"
    deleter = Deleter()
    deleter.delete(gone)
    assert deleter.wait(60) and leftovers(root) == []
    assert {key.split("/")[2] for key in bucket.objects()} == {"step-2", "step-3", "step-5", "step-6"}


def test_a_pin_that_comes_at_the_last_moment_counts(
    bucket: s3.Bucket, root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(root, 1, 2, 3)
    manifest, unlink = bucket.read("run/checkpoint/step-1/manifest.json"), StorePath.unlink

    def pinned_before(path: StorePath, missing_ok: bool = False) -> None:
        if path == root / "step-1" / "manifest.json":
            bucket.write("run/checkpoint/step-1/KEEP", b"")
        unlink(path, missing_ok)

    monkeypatch.setattr(StorePath, "unlink", pinned_before)
    assert retire(root, 3, latest=2) == [] and leftovers(root) == []
    assert bucket.read("run/checkpoint/step-1/manifest.json") == manifest and steps_in(root) == [1, 2, 3]


# On ranks


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.slow), "async"])
def test_four_and_four_equal_eight_bit_for_bit(pool: Pools, bucket: s3.Bucket, tmp_path: Path, mode: str) -> None:
    plan = CheckpointPlan(async_mode=mode, keep_latest_k=2)  # type: ignore[arg-type]
    straight = pool(2).run(train, RUN, str(tmp_path), 1, 8, draw=True)
    at = bucket.environment
    first = pool(2).run(s3.there, at, train, RUN, bucket.root, 1, 4, draw=True, every=1, plan=plan)
    assert steps_in(StorePath(bucket.root)) == [3, 4]
    second = pool(2).run(s3.there, at, train, RUN, bucket.root, 5, 8, draw=True, every=2, plan=plan)
    for rank in range(2):
        assert first[rank]["losses"] + second[rank]["losses"] == straight[rank]["losses"]
        assert first[rank]["draws"] + second[rank]["draws"] == straight[rank]["draws"]
    _equal(second[0]["weights"], straight[0]["weights"])
    _equal(second[0]["state"], straight[0]["state"])
    assert second[0]["loaded"].verified and second[0]["loaded"].folder == StorePath(f"{bucket.root}/step-4")
    sides = Contents(StorePath(f"{bucket.root}/step-8")), Contents(tmp_path / "step-8")
    assert not [one.name for one in compare(*sides) if one.elements or one.left != one.right]
    assert steps_in(StorePath(bucket.root)) == [4, 6, 8], "that which was resumed from stays"
    assert leftovers(StorePath(bucket.root)) == []


@pytest.mark.slow
def test_another_number_of_ranks(pool: Pools, written: s3.Bucket, tmp_path: Path) -> None:
    plan = CheckpointPlan(initial_load_path=written.root, initial_load_model_only=False)
    straight = pool(2).run(train, RUN, str(tmp_path / "a"), 1, 8)[0]
    at = written.environment
    resumed = pool(1).run(s3.there, at, train, RUN, str(tmp_path / "b"), 5, 8, plan=plan)[0]
    torch.testing.assert_close(resumed["losses"], straight["losses"][4:], rtol=0, atol=5e-6)
    assert resumed["loaded"].origin == "from" and resumed["loaded"].folder == StorePath(f"{written.root}/step-4")


def test_one_changed_bit_is_found_and_the_older_one_is_used(pool: Pools, copied: s3.Bucket) -> None:
    shard = next(key for key in copied.objects() if "step-4/__1_" in key)
    copied.flip(shard)
    found = pool(2).run(s3.there, copied.environment, train, RUN, copied.root, 3, 4)
    for result in found:
        (told,) = [line for line in result["loaded"].notices if "has changed since it was written" in line]
        assert f"s3://{copied.name}/{shard}" in told
    # It was trained again, and the damaged one made way for it.
    assert steps_in(StorePath(copied.root)) == [2, 4]
    assert any("step-4.invalid-0/__1_" in key for key in copied.objects())
    assert main(["checkpoint", "verify", copied.root]) == exit_codes.DONE


def _refused_save(world: DistEnv, folder: str, mode: str) -> tuple[str, list[str]]:
    """A save of step 2 that fails, and one of step 3; what was said of the first."""
    model, optimizer, _ = build_tiny(world, RUN)
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder, async_mode=mode), world, PRINTS)  # type: ignore[arg-type]
    said = ""
    try:
        for step in (2, 3):
            try:
                saver.save(step, model, optimizer, {})
                saver.wait()
            except CheckpointError as error:
                said = f"{step}: {error}"
    finally:
        saver.close()
    return said, [type(saver.root).__name__]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_refused_save_is_told_and_leaves_nothing(pool: Pools, bucket: s3.Bucket, mode: str) -> None:
    def decide(method: str, path: str) -> s3.Answer | None:
        denied = method in ("PUT", "POST") and "/step-2/__1_" in path
        return (403, b"<Error><Code>AccessDenied</Code><Message>Not you</Message></Error>") if denied else None

    with s3.proxy(bucket.port, decide) as port:
        for said, _ in pool(2).run(s3.there, s3.environment(port), _refused_save, bucket.root, mode):
            assert said.startswith("2: saving s3://") and "rank 1" in said and "/step-2/__1_" in said
            assert "access denied (Not you)" in said
    assert steps_in(StorePath(bucket.root)) == [3] and leftovers(StorePath(bucket.root)) == []
    assert not bucket.objects("run/checkpoint/step-2/")


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
    assert found[0]["loaded"].step == 2 and steps_in(StorePath(bucket.root)) == [2, 4]
    assert refused["PUT shard"] > 1 and refused["PUT manifest"] > 1 and refused["GET shard"] > 1


@pytest.mark.slow
def test_a_store_that_fails_while_it_is_read_is_no_reason_for_an_older_one(pool: Pools, written: s3.Bucket) -> None:
    def decide(method: str, path: str) -> s3.Answer | None:
        broken = method == "GET" and "/step-4/__1_" in path
        return (403, b"<Error><Code>AccessDenied</Code><Message>Not you</Message></Error>") if broken else None

    with s3.proxy(written.port, decide) as port:
        said = pool(2).run(s3.there, s3.environment(port), refusal, RUN, written.root, 3, 4)
    assert said[0] == said[1] and "cannot read s3://" in said[0] and "access denied" in said[0]


# Two runs


def test_a_url_is_locked_by_one_run_and_a_dead_one_is_taken_over(bucket: s3.Bucket, root: StorePath) -> None:
    with RunLock(root), pytest.raises(LockedError, match=f"{root} belongs .* process {os.getpid()} on"), RunLock(root):
        pytest.fail("two hold it")
    assert bucket.objects() == {}
    code = (
        "import sys, os, signal; from titanlite.runs.lock import RunLock; "
        "from titanlite.checkpoint.place import StorePath; "
        "RunLock(StorePath(sys.argv[1])).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, **bucket.environment, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, str(root)], env=environment, timeout=300)
    assert list(bucket.objects()) == ["run/checkpoint/run.lock"]
    with RunLock(root):
        assert list(bucket.objects()) == ["run/checkpoint/run.lock"]
    assert bucket.objects() == {}


def test_of_runs_that_start_together_one_goes_on(bucket: s3.Bucket, root: StorePath) -> None:
    gate, over = threading.Barrier(4), threading.Event()
    outcomes: list[str] = []

    def run() -> None:
        gate.wait()
        try:
            with RunLock(root):
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


# The command


def _lines(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> list[str]:
    assert main(["checkpoint", *map(str, words)]) == code
    said = capsys.readouterr()
    return (said.out or said.err).splitlines()


def test_the_command_takes_urls(copied: s3.Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied.root.removesuffix("/checkpoint")
    copied.write("run/checkpoint/step-2/KEEP", b"")
    begin(StorePath(copied.root), 6, {}, Deleter())
    (StorePath(copied.root) / "step-6" / "shard").write_bytes(SHARD)
    lines = _lines(capsys, "ls", run)
    assert [line.split()[0] for line in lines[1:3]] == ["step-2", "step-4"] and lines[1].split()[1:3] == [
        "valid,",
        "pinned",
    ]
    assert lines[3].startswith(".partial-step-6-") and " partial " in lines[3] and " 4 B " in lines[3]
    assert lines[4].startswith(f"{copied.root}: ") and lines[4].endswith("newest valid: step-4")
    listed = json.loads("\n".join(_lines(capsys, "ls", copied.root, "--json")))
    assert listed[1]["folder"] == f"{copied.root}/step-4"
    assert listed[1]["bytes"] == sum(copied.objects("run/checkpoint/step-4/").values())

    assert _lines(capsys, "inspect", run)[0] == f"{copied.root}/step-4"
    assert all("hashes are right" in line for line in _lines(capsys, "verify", copied.root))
    assert _lines(capsys, "diff", f"{copied.root}/step-4", f"{copied.root}/step-4")[-1].startswith("all ")
    assert _lines(capsys, "diff", f"{copied.root}/step-2", f"{copied.root}/step-4", code=1)

    shard = next(key for key in copied.objects() if "step-4/__0_" in key)
    copied.flip(shard)
    lines = _lines(capsys, "verify", f"{copied.root}/step-4", code=exit_codes.CHECKPOINT)
    assert lines[0].endswith("step-4: DAMAGED") and f"s3://{copied.name}/{shard} has changed" in lines[1]
    assert "pinned" in _lines(capsys, "rm", f"{copied.root}/step-2", code=exit_codes.CHECKPOINT)[0]
    copied.delete("run/checkpoint/step-2/KEEP")
    assert "would be left" in _lines(capsys, "rm", f"{copied.root}/step-2", code=exit_codes.CHECKPOINT)[0]
    assert _lines(capsys, "rm", f"{copied.root}/step-4")[0].startswith(f"deleted {copied.root}/step-4: ")
    assert not copied.objects("run/checkpoint/step-4/") and steps_in(StorePath(copied.root)) == [2]


def _model(world: DistEnv, folder: str) -> None:
    from titanlite.models.shapes import as_record

    model, optimizer, _ = build_tiny(world, RUN)
    config = {"model": as_record("llama3", RUN.args)}
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder), world, PRINTS, config)
    saver.save(3, model, optimizer, {})
    saver.close()


@pytest.mark.slow
def test_weights_are_converted_out_of_a_store_and_into_it(
    pool: Pools, bucket: s3.Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool(1).run(s3.there, bucket.environment, _model, bucket.root)
    hf, back = tmp_path / "hf", f"s3://{bucket.name}/back"
    assert _lines(capsys, "convert", bucket.root, hf, "--to", "hf")[0].startswith(f"{hf}: ")
    assert _lines(capsys, "convert", hf, back, "--to", "checkpoint")[0].startswith(f"{back}/step-0: ")
    sides = Contents(StorePath(f"{bucket.root}/step-3")), Contents(StorePath(f"{back}/step-0"))
    assert sides[1].manifest.weights_only
    for one in compare(*sides):
        assert one.elements == 0 and (one.comparable or one.name.startswith(("optimizer.", "rng."))), one.name
    assert "is there already" in _lines(capsys, "convert", hf, back, "--to", "checkpoint", code=4)[0]
    assert "writes to this machine" in _lines(capsys, "convert", bucket.root, f"{back}/hf", "--to", "hf", code=4)[0]
    assert leftovers(StorePath(back)) == []


# What is wrong is said before any work


def test_no_such_bucket_no_access_no_server(
    server: int, root: StorePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(url: str) -> str:
        argv = [f"--job.dump_folder={tmp_path}", "--checkpoint.enable_checkpoint", f"--checkpoint.folder={url}"]
        with pytest.raises(CheckpointError) as refused, _lock(checked_plans(argv, 1, training=False)[1]):
            pytest.fail("it was not looked at")
        return str(refused.value)

    said = start("s3://no-such-bucket/run")
    assert said == "checkpoint.folder: s3://no-such-bucket/run: there is no bucket s3://no-such-bucket"
    (said,) = _lines(capsys, "ls", "s3://no-such-bucket/run", code=exit_codes.CHECKPOINT)
    assert said == "error: s3://no-such-bucket/run: there is no bucket s3://no-such-bucket"
    (said,) = _lines(capsys, "ls", f"{root}/none", code=exit_codes.CHECKPOINT)
    assert said == f"error: {root}/none: no such folder"

    s3.use(monkeypatch, {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{s3.free_port()}", "AWS_MAX_ATTEMPTS": "1"})
    said = start(str(root))
    assert said.startswith(f"checkpoint.folder: {root}: the store cannot be reached")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    nowhere = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "AWS_CONFIG_FILE": "/nowhere",
    }
    s3.use(monkeypatch, {**nowhere, **{"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server}"}})
    with pytest.raises(StoreError, match="no credentials .* set AWS_ACCESS_KEY_ID"):
        root.is_dir()


def test_urls_that_cannot_work_are_refused_with_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from titanlite.config.checks import missing_packages

    def said(*urls: str) -> str:
        keys = ("checkpoint.folder", "checkpoint.initial_load_path")
        flags = [f"--{key}={url}" for key, url in zip(keys, urls, strict=False)]
        return "\n".join(map(str, missing_packages(load(["--checkpoint.enable_checkpoint", *flags]))))

    assert said("s3://bucket/run", "s3://bucket/other") == "" and said("file:///tmp/x") == ""
    assert "memory of one process" in said("memory://run") and "names no bucket" in said("s3://")
    assert "of no kind that is known here: s33" in said("s33://bucket/run")
    assert "checkpoint.initial_load_path" in said("outputs", "s33://bucket/run")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs the package s3fs" in said("s3://b/run") and "pip install 'titanlite[s3]'" in said("s3://b/run")
    assert "pip install gcsfs" in said("gs://b/run")


# A whole run


def _torchrun(bucket: s3.Bucket, port: int, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", "train.py", *flags(folder, f"--checkpoint.folder={bucket.root}", *more)]
    environment = {**os.environ, **s3.environment(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _kill(run: subprocess.Popen[str]) -> None:
    """All at once, as a machine that fails: workers are no children of the test."""
    workers = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    for process in (run.pid, *map(int, workers)):
        os.kill(process, signal.SIGKILL)
    run.communicate()


@pytest.mark.slow
def test_killed_between_the_shards_and_the_manifest(bucket: s3.Bucket, tmp_path: Path) -> None:
    """Real processes: the next start deletes what the killed save has left, and ends as an undisturbed run does."""
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
    there = [key for key in bucket.objects("run/checkpoint/step-6/")]
    assert len(there) == 3 and not any("manifest" in key for key in there), "all shards and the index"
    assert steps_in(StorePath(bucket.root)) == [2, 4]

    again = _torchrun(bucket, bucket.port, tmp_path / "run")
    said, _ = again.communicate(timeout=600)
    assert again.returncode == 0, said
    assert f"resumed from step 4 in {bucket.root}" in said and "resume verified at step 4" in said
    assert steps_in(StorePath(bucket.root)) == [2, 4, 6, 8] and leftovers(StorePath(bucket.root)) == []
    assert not bucket.objects("run/checkpoint/run.lock")
    straight = s3.new_bucket(bucket.port)
    other = _torchrun(straight, bucket.port, tmp_path / "straight")
    said, _ = other.communicate(timeout=600)
    assert other.returncode == 0, said
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
    sides = [Contents(StorePath(f"{one.root}/step-8")) for one in (bucket, straight)]
    assert not [one.name for one in compare(*sides) if one.elements or one.left != one.right]


@pytest.mark.slow
def test_a_run_that_cannot_reach_its_store_ends_before_any_work(bucket: s3.Bucket, tmp_path: Path) -> None:
    gone = replace(bucket, name="no-such-bucket")
    run = _torchrun(gone, bucket.port, tmp_path / "run")
    said, _ = run.communicate(timeout=600)
    assert run.returncode and "error: checkpoint.folder: s3://no-such-bucket/run/checkpoint" in said
    assert "there is no bucket s3://no-such-bucket" in said and "botocore" not in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
