"""A real S3 server on loopback, and a proxy before it that can refuse requests or hold them back."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.pool import free_port
from titanlite.checkpoint.paths import StorePath, _filesystem

if TYPE_CHECKING:
    from titanlite.parallel.dist_env import DistEnv

_SERVER = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"
#: An answer instead of the server's: its status and body.
Answer = tuple[int, bytes]
DENIED: Answer = (403, b"<Error><Code>AccessDenied</Code><Message>Not you</Message></Error>")
SLOW_DOWN: Answer = (503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>")


@dataclass(frozen=True)
class Bucket:
    """An empty bucket. Its contents are looked at with boto3, which titanlite does not use."""

    name: str
    port: int

    @property
    def root(self) -> str:
        return f"s3://{self.name}/run/checkpoint"

    @property
    def path(self) -> StorePath:
        return StorePath(self.root)

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.port)

    @property
    def client(self) -> Any:
        return client(self.port)

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Key → bytes."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix).get("Contents", [])
        return {entry["Key"]: entry["Size"] for entry in found}

    def read(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return content

    def write(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)


def environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def client(port: int) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )


@contextmanager
def serving() -> Iterator[int]:
    """The port of a server that lives as long as the block."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the S3 server did not start"
            assert time.monotonic() < deadline, "the S3 server does not listen"
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def new_bucket(port: int) -> Bucket:
    bucket = Bucket(f"bucket-{uuid.uuid4().hex[:8]}", port)
    bucket.client.create_bucket(Bucket=bucket.name)
    return bucket


@contextmanager
def proxy(port: int, decide: Callable[[str, str], Answer | None]) -> Iterator[int]:
    """The port of a proxy before the server at `port`.

    decide: method and path of each request → what is answered instead; None: the server is asked.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: object) -> None:
            pass

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = decide(self.command, self.path)
            if answer is not None:
                self._send(answer[0], {"Content-Type": "application/xml"}, answer[1])
                return
            upstream = http.client.HTTPConnection("127.0.0.1", port)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "connection")}
            upstream.request(self.command, self.path, body, headers)
            reply = upstream.getresponse()
            left_out = ("connection", "transfer-encoding", "content-length")
            kept = {name: value for name, value in reply.getheaders() if name.lower() not in left_out}
            content = reply.read()
            length = reply.getheader("Content-Length") if self.command == "HEAD" else None
            self._send(reply.status, kept, content, length)
            upstream.close()

        def _send(self, status: int, headers: dict[str, str], content: bytes, length: str | None = None) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that was killed

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def there(world: DistEnv, variables: dict[str, str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """For the ranks of a pool: `function(world, …)` with a store's address and keys in the environment."""
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.environ.update(variables)
        _filesystem.cache_clear()
    return function(world, *args, **kwargs)


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """The same for the test's own process."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _filesystem.cache_clear()
