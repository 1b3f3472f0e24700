"""The kinds of storage that checkpoints lie in: the same tests run on each."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import s3
from tests.support.s3 import Storage
from titanlite.checkpoint.store_paths import AnyPath, StorePath

S3 = pytest.param("s3", marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def server() -> Iterator[int]:
    with s3.serving() as port:
        yield port


@pytest.fixture
def bucket(server: int, monkeypatch: pytest.MonkeyPatch) -> s3.Bucket:
    bucket = s3.new_bucket(server)
    s3.use(monkeypatch, bucket.environment)
    return bucket


@pytest.fixture(params=["folder", "memory", S3])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    """A folder of checkpoints, for tests in one process: memory:// has no server."""
    if request.param == "folder":
        return tmp_path / "checkpoint"
    if request.param == "memory":
        return StorePath(f"memory://bucket-{uuid.uuid4().hex[:8]}/run/checkpoint")
    return StorePath(request.getfixturevalue("bucket").root)


@pytest.fixture(params=["folder", S3])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return Storage(tmp_path / "checkpoint", {})
    bucket: s3.Bucket = request.getfixturevalue("bucket")
    return Storage(StorePath(bucket.root), bucket.environment)
