"""A Hugging Face hub, a plain file server and a proxy of an S3 server on loopback.

It can inject network faults.

The folder that it serves:

    datasets/OWNER/NAME/...  a dataset repository, and its main branch; NAME@... holds an older
        commit of it
    models/OWNER/NAME/...    a model repository
    anything else            http://127.0.0.1:PORT/files/x.jsonl.gz is the file files/x.jsonl.gz
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support.hub_uploads import UploadRoutes, Uploads

_SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_OF_ONE_ANSWER = ("connection", "content-length", "date", "server", "transfer-encoding")


@dataclass
class Fault:
    """A fault of the requests whose URL path matches `path`.

    Without further fields it closes the connection.
    """

    #: Pattern of fnmatch, such as "*00001*.json.gz".
    path: str
    method: str = "GET"
    #: Answer with this status, such as 429, 500 or 503, and with this Retry-After header (seconds).
    status: int | None = None
    retry_after: int | None = None
    #: Close the connection after so many bytes of the body. With `declared` Content-Length names
    #: that number too.
    cut: int | None = None
    declared: bool = False
    #: Send no body for so many seconds.
    stall: float = 0.0
    #: The number of matching requests before the fault, and of those that fail; None: all from then
    #: on.
    after: int = 0
    times: int | None = 1

    @property
    def breaks(self) -> bool:
        """Whether it closes the connection at once."""
        return not self.status and self.cut is None and not self.stall


@dataclass
class Request:
    """A request.

    `path` is its URL path, `range` the wanted bytes (first, last), `sent` the bytes of the body.
    """

    method: str
    path: str
    range: tuple[int, int] | None = None
    status: int = 0
    sent: int = 0


@dataclass
class HubServer:
    """Serve a folder in a `with` block. `url` is the value of HF_ENDPOINT."""

    root: Path
    port: int = 0
    #: Repository or first folder → the token that it wants, such as {"allenai/c4": "hf_secret"}.
    gated: dict[str, str] = field(default_factory=dict)
    #: Whether it obeys the Range header, and the header that tells a plain file from its successor.
    ranges: bool = True
    tag: str = "ETag"
    #: Port of an S3 server that answers instead.
    upstream: int | None = None
    #: Users and repositories that can be written to; None: there are none.
    uploads: Uploads | None = None
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Return variables for a process that imports huggingface_hub.

        home: a folder for its caches.
        """
        switches = dict.fromkeys(("DISABLE_XET", "DISABLE_TELEMETRY", "DISABLE_PROGRESS_BARS"), "1")
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home)} | {
            f"HF_HUB_{k}": v for k, v in switches.items()
        }

    def fail(self, path: str, **fault: Any) -> None:
        """Add a fault, before those that exist."""
        self.faults.insert(0, Fault(path, **fault))

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if method == fault.method and fnmatch(path, fault.path) and fault.times != 0:
                    fault.after -= 1
                    if fault.after < 0:
                        fault.times = fault.times and fault.times - 1
                        return fault
        return None

    def of(self, path: str, method: str = "GET") -> list[Request]:
        """Return the requests so far whose URL path matches a pattern."""
        return [
            request
            for request in self.requests
            if fnmatch(request.path, path) and request.method == method
        ]

    def __enter__(self) -> HubServer:
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", self.port), type("Bound", (Handler,), {"hub": self})
        )
        self.server.daemon_threads, self.port = True, self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


def commit(folder: Path) -> str:
    """Return the hash of a repository's state, which changes with its files."""
    stats = [
        (str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
    ]
    return hashlib.sha1(repr(stats).encode()).hexdigest()


def entry(folder: Path, path: Path) -> dict[str, Any]:
    """Return the hub's record of a file or folder in a repository."""
    name = str(path.relative_to(folder))
    is_file = path.is_file()
    stat = path.stat()
    oid = hashlib.sha1(f"{name} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    return {
        "type": "file" if is_file else "directory",
        "oid": oid,
        "size": is_file and stat.st_size,
        "path": name,
    }


class Handler(UploadRoutes, BaseHTTPRequestHandler):
    """Answer one connection's requests."""

    hub: HubServer  # HTTP 1.0: each answer ends its connection

    def handle(self) -> None:
        with suppress(OSError):  # the client has gone
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet: `HubServer.requests` has all."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.record = Request(self.command, unquote(url.path))
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            self.record.range = int(wanted[1]), int(wanted[2] or 1 << 60)
        self.hub.requests.append(self.record)
        self.fault = fault = self.hub.take_fault(self.command, self.record.path)
        if fault and fault.breaks:
            return
        content = self.body()
        if self.hub.uploads is None:
            self.asked = parse_qs(url.query) | parse_qs(content.decode())
        if fault and fault.status:
            after = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            self.answer(_SLOW_DOWN, after, fault.status)
        elif self.hub.upstream:
            self.forward(self.hub.upstream)
        elif self.hub.uploads is not None:
            self.serve_uploads(url.path, content)
        else:
            self.route(self.record.path.strip("/").split("/"))

    do_HEAD = do_POST = do_PUT = do_GET

    def body(self) -> bytes:
        """Return the body of the request, which may come in chunks."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(parts)

    def forward(self, port: int) -> None:
        """Give the answer of the server on this port."""
        server = http.client.HTTPConnection("127.0.0.1", port)
        server.request(self.command, self.path, headers=dict(self.headers))
        answer = server.getresponse()
        body = answer.read() or bytes(
            int(answer.getheader("Content-Length") or 0)
        )  # of HEAD only its length counts
        self.answer(
            body,
            {k: v for k, v in answer.getheaders() if k.lower() not in _OF_ONE_ANSWER},
            answer.status,
        )

    def route(self, parts: list[str]) -> None:
        if parts[0] == "api":
            _, kind, owner, name, verb, *rest = parts + ["revision"] * (len(parts) == 4)
        elif "resolve" in parts:
            kind, owner, name, verb, *rest = parts if parts[0] == "datasets" else ["models", *parts]
        else:
            return self.plain(self.hub.root.joinpath(*parts), parts[0])
        repo = f"{owner}/{name}"
        folder = self.hub.root / kind / repo
        if not folder.is_dir():
            return self.refuse("RepoNotFound", 401)
        if not self.allowed(repo):
            return self.refuse("GatedRepo", 403)
        revision, *path = rest or ["main"]
        known = {commit(one): one for one in folder.parent.glob(f"{name}@*")} | {
            commit(folder): folder,
            "main": folder,
        }
        if revision not in known:
            return self.refuse("RevisionNotFound", 404)
        folder = known[revision]
        target = folder.joinpath(*path)
        if verb == "revision":
            files = [
                {"rfilename": str(p.relative_to(folder))}
                for p in sorted(folder.rglob("*"))
                if p.is_file()
            ]
            self.json(
                {
                    "id": repo,
                    "sha": commit(folder),
                    "gated": repo in self.hub.gated,
                    "siblings": files,
                }
            )
        elif verb == "paths-info":
            self.json(
                [entry(folder, folder / p) for p in self.asked["paths"] if (folder / p).exists()]
            )
        elif not target.exists():
            self.refuse("EntryNotFound", 404)
        elif verb == "tree":
            recursive = self.asked.get("recursive", ["false"])[0].lower() == "true"
            self.json(
                [
                    entry(folder, path)
                    for path in sorted(target.rglob("*") if recursive else target.glob("*"))
                ]
            )
        else:
            self.file(
                target,
                {"X-Repo-Commit": commit(folder), "ETag": f'"{entry(folder, target)["oid"]}"'},
            )

    def allowed(self, name: str) -> bool:
        token = self.hub.gated.get(name)
        return token is None or self.headers.get("Authorization") == f"Bearer {token}"

    def plain(self, path: Path, name: str) -> None:
        """Answer with a file outside any repository, or with a page of links to a folder's
        files.
        """
        if not self.allowed(name):
            self.answer(b"", {}, 401)
        elif path.is_dir():
            links = "".join(
                f'<a href="{quote(p.name)}">{p.name}</a>\n' for p in sorted(path.iterdir())
            )
            self.answer(links.encode(), {"Content-Type": "text/html"})
        elif path.is_file():
            self.file(path, {self.hub.tag: f'"{path.stat().st_mtime_ns}"'})
        else:
            self.answer(b"no such file", {}, 404)

    def refuse(self, code: str, status: int) -> None:
        self.answer(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)

    def json(self, value: object) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def file(self, path: Path, headers: dict[str, str]) -> None:
        """Answer with a file, or with the bytes of it that the Range header names."""
        with path.open("rb") as file:
            self.file_content(file, headers)

    def file_content(self, file: BinaryIO, headers: dict[str, str]) -> None:
        """Answer with what an open file holds, or with the bytes that the Range header names."""
        wanted = self.record.range
        if not self.hub.ranges or not wanted:
            return self.answer(file.read(), headers)
        size = file.seek(0, os.SEEK_END)
        first = wanted[0]
        last = min(wanted[1], size - 1)
        if first > last:
            return self.answer(b"", {"Content-Range": f"bytes */{size}"}, 416)
        headers |= {"Accept-Ranges": "bytes", "Content-Range": f"bytes {first}-{last}/{size}"}
        file.seek(first)
        self.answer(file.read(last + 1 - first), headers, 206)

    def answer(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        """Answer, with the fault of this request."""
        fault = self.fault or Fault("")
        whole = len(body)
        body = body[: fault.cut]
        self.record.status = status
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if fault.declared else whole))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.closing.wait(fault.stall)
        for start in range(0, len(body), 1 << 16):
            part = body[start : start + (1 << 16)]
            self.record.sent += len(part)  # before the client can have seen them
            self.wfile.write(part)
