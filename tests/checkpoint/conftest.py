"""A real S3 server, for tests of checkpoints in object stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint import s3


@pytest.fixture(scope="session")
def server() -> Iterator[int]:
    with s3.serving() as port:
        yield port


@pytest.fixture
def bucket(server: int, monkeypatch: pytest.MonkeyPatch) -> s3.Bucket:
    s3.use(monkeypatch, s3.environment(server))
    return s3.new_bucket(server)
