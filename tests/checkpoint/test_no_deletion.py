"""A run in a store that lets it list, read and write, and not delete."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.support import s3
from tests.support.checkpoints import RUN, names, train
from tests.support.pool import Pools
from titanlite.checkpoint.manifest import find, steps_in
from titanlite.checkpoint.paths import StoreError
from titanlite.runs.lock import LockedError, RunLock

_DENIED = b"<Error><Code>AccessDenied</Code><Message>no right to delete</Message></Error>"


def _handler(port: int, denied: list[str]) -> type[BaseHTTPRequestHandler]:
    """A proxy of the server at `port` that refuses deletions, and notes them."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if (
                self.command == "DELETE"
                or self.command == "POST"
                and "delete" in self.path.partition("?")[2]
            ):
                denied.append(f"{self.command} {self.path}")
                self._answer(403, {}, _DENIED)
                return
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            self._answer(answer.status, dict(answer.getheaders()), answer.read())
            connection.close()

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            length = headers.get("Content-Length") if self.command == "HEAD" else str(len(body))
            kept = {
                name: value
                for name, value in headers.items()
                if name not in ("Content-Length", "Connection")
            }
            for name, value in {**kept, "Content-Length": length or "0"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def _without_deletion(bucket: s3.Bucket) -> Iterator[tuple[s3.Bucket, list[str]]]:
    denied: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(bucket.port, denied)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield s3.Bucket(bucket.name, server.server_port), denied
        server.shutdown()


@pytest.mark.slow
def test_saves_work_and_old_checkpoints_stay(
    bucket: s3.Bucket, pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _without_deletion(bucket) as (locked, denied):
        s3.use(monkeypatch, locked.environment)
        with pytest.raises(StoreError, match="access denied"):
            (locked.path / "x").write_bytes(b"")
            (locked.path / "x").unlink()
        for first, last in ((1, 4), (5, 6)):  # the second one resumes
            steps = (RUN, locked.root, first, last)
            pool(2).run(s3.there, locked.environment, train, *steps, every=2, keep_latest_k=1)
        manifest, passed = find(locked.path)
        assert manifest is not None
        assert manifest.step == 6
        assert passed == []
        assert steps_in(locked.path) == [2, 4, 6]
        assert ".metadata" in names(locked.path / "step-6")
        assert ".metadata.tmp" not in names(locked.path / "step-6")
        assert any("manifest.json" in request for request in denied), (
            "it has tried to delete old ones"
        )


@pytest.mark.slow
def test_a_lock_that_cannot_be_deleted_is_released_and_taken_over(
    bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _without_deletion(bucket) as (locked, _):
        s3.use(monkeypatch, locked.environment)
        for _ in range(2):
            with (
                RunLock(locked.path),
                pytest.raises(LockedError, match="belongs to a run that is alive"),
            ):
                RunLock(locked.path).__enter__()
