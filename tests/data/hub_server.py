"""A Hugging Face hub and a plain file server on loopback, for tests of streamed text. It can inject network faults.

The folder that it serves:

    datasets/OWNER/NAME/...           a dataset repository, and its main branch
    datasets/OWNER/NAME@REVISION/...  another revision of it
    models/OWNER/NAME/...             a model repository
    anything else                     http://127.0.0.1:PORT/files/x.jsonl.gz is the file files/x.jsonl.gz

By hand: `python -m tests.data.hub_server FOLDER --port 8000`, then `HF_ENDPOINT=http://127.0.0.1:8000` elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit


@dataclass
class Fault:
    """A fault of all requests whose URL path matches `path`. Without further fields it closes the connection at once."""

    #: Pattern in the style of fnmatch, such as "*00001*.json.gz".
    path: str
    method: str = "GET"
    #: Answer with this status, such as 429, 500 or 503, and with this Retry-After header.
    status: int | None = None
    retry_after: int | None = None
    #: Close the connection after so many bytes of the body; with `declared`, Content-Length names that number too.
    cut: int | None = None
    declared: bool = False
    #: Send nothing for so many seconds, after so many bytes of the body.
    stall: float = 0.0
    stall_after: int = 0
    #: The number of requests that fail; None: all from now on.
    times: int | None = 1


@dataclass
class Request:
    """A request that was answered. `path` is its URL path, `range` the wanted bytes [first, last]."""

    method: str
    path: str
    range: tuple[int, int] | None
    authorized: bool
    status: int = 0
    #: Bytes of the body that were sent.
    sent: int = 0


@dataclass
class HubServer:
    """Serve a folder until the `with` block ends. `url` is the value of HF_ENDPOINT."""

    root: Path
    port: int = 0
    #: Repository or first folder → the token that it wants, such as {"allenai/c4": "hf_secret"}.
    gated: dict[str, str] = field(default_factory=dict)
    #: Entries of a tree listing in one answer.
    page_size: int = 1000
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Return the variables that a process needs before it imports huggingface_hub. home: a folder for its caches."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **({"HF_TOKEN": token} if token else {}),
        }

    def fail(self, path: str, **fault: object) -> Fault:
        """Add a fault, before those that exist."""
        self.faults.insert(0, Fault(path, **fault))  # type: ignore[arg-type]
        return self.faults[0]

    def of(self, path: str, method: str = "GET") -> list[Request]:
        """Return the requests so far whose URL path matches a pattern."""
        return [r for r in self.requests if fnmatch(r.path, path) and r.method == method]

    def __enter__(self) -> HubServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads, self.port = True, self._server.server_port
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        with self.lock:
            for connection in self._open:
                reset(connection)

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse all connections, and end those that exist."""
        self.__exit__()
        try:
            yield
        finally:
            self.closing.clear()
            self.__enter__()

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if method == fault.method and fnmatch(path, fault.path) and fault.times != 0:
                    fault.times = fault.times and fault.times - 1
                    return fault
        return None

    def folder(self, kind: str, repo: str, revision: str) -> Path | None:
        """Return the folder of a revision, which may be the hash of a commit."""
        branches = {"main": self.root / kind / repo}
        branches |= {p.name.partition("@")[2]: p for p in (self.root / kind).glob(f"{repo}@*")}
        return next((p for name, p in branches.items() if revision in (name, commit(p))), None)


def commit(folder: Path) -> str:
    """Return the hash of a repository's state: it changes with its files."""
    stats = [(str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))]
    return hashlib.sha1(repr(stats).encode()).hexdigest()


def reset(connection: socket.socket) -> None:
    """Close a connection so that its other end sees it at once."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)


def _entry(folder: Path, path: Path) -> dict[str, object]:
    """Return what the hub tells of a file or folder in a repository."""
    oid = hashlib.sha1(f"{path.relative_to(folder)} {path.stat().st_size}".encode()).hexdigest()
    size = path.stat().st_size if path.is_file() else 0
    return {
        "type": "file" if path.is_file() else "directory",
        "oid": oid,
        "size": size,
        "path": str(path.relative_to(folder)),
    }


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            with hub.lock:
                hub._open.add(self.connection)

        def finish(self) -> None:
            with suppress(OSError):
                super().finish()
            with hub.lock:
                hub._open.discard(self.connection)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path = unquote(url.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.asked = {**parse_qs(url.query), **parse_qs(body.decode())}
            self.record = Request(self.command, path, None, self.headers.get("Authorization") is not None)
            with hub.lock:
                hub.requests.append(self.record)
            self.fault = hub.take_fault(self.command, path)
            if self.fault and self.fault.status:
                wait = {} if self.fault.retry_after is None else {"Retry-After": str(self.fault.retry_after)}
                return self.answer(self.fault.status, b"injected fault", wait)
            if self.fault and self.fault.cut is None and not self.fault.stall:
                return self.hang_up()
            try:
                self.route(path.strip("/").split("/"))
            except OSError:  # the client has gone
                self.close_connection = True

        do_HEAD = do_POST = do_GET

        def hang_up(self) -> None:
            self.close_connection = True
            reset(self.connection)

        def route(self, parts: list[str]) -> None:
            if parts == ["api", "whoami-v2"]:
                return self.json({"name": "tester", "type": "user", "orgs": []} if self.record.authorized else {})
            if parts[0] == "api":
                kind, repo, verb, rest = (
                    parts[1],
                    "/".join(parts[2:4]),
                    parts[4] if len(parts) > 4 else "revision",
                    parts[5:],
                )
            elif "resolve" in parts[:4]:
                kind, at = (parts[0], 1) if parts[0] == "datasets" else ("models", 0)
                repo, verb, rest = "/".join(parts[at : at + 2]), "resolve", parts[at + 3 :]
            else:
                return self.plain(hub.root.joinpath(*parts), parts[0])
            if not (hub.root / kind / repo).is_dir():
                return self.refuse("RepoNotFound", 401)
            if not self.allowed(repo):
                return self.refuse("GatedRepo", 403 if self.record.authorized else 401)
            folder = hub.folder(kind, repo, unquote(rest[0]) if rest else "main")
            if folder is None:
                return self.refuse("RevisionNotFound", 404)
            self.sha = commit(folder)
            {"revision": self.info, "tree": self.tree, "paths-info": self.paths, "resolve": self.file}[verb](
                folder, rest, repo
            )

        def allowed(self, name: str) -> bool:
            return name not in hub.gated or self.headers.get("Authorization") == f"Bearer {hub.gated[name]}"

        def info(self, folder: Path, rest: list[str], repo: str) -> None:
            files = [{"rfilename": str(p.relative_to(folder))} for p in sorted(folder.rglob("*")) if p.is_file()]
            self.json({"id": repo, "sha": self.sha, "private": False, "gated": repo in hub.gated, "siblings": files})

        def tree(self, folder: Path, rest: list[str], repo: str) -> None:
            top, start = folder.joinpath(*rest[1:]), int(self.asked.get("cursor", ["0"])[0])
            if not top.is_dir():
                return self.refuse("EntryNotFound", 404)
            found = sorted(top.rglob("*") if self.asked.get("recursive") == ["true"] else top.glob("*"))
            query = f"?recursive={self.asked.get('recursive', ['false'])[0]}&cursor={start + hub.page_size}"
            more = {"Link": f'<{hub.url}{quote(self.record.path)}{query}>; rel="next"'}
            page = [_entry(folder, path) for path in found[start : start + hub.page_size]]
            self.json(page, more if start + hub.page_size < len(found) else {})

        def paths(self, folder: Path, rest: list[str], repo: str) -> None:
            self.json([_entry(folder, folder / p) for p in self.asked["paths"] if (folder / p).exists()])

        def file(self, folder: Path, rest: list[str], repo: str) -> None:
            path = folder.joinpath(*rest[1:])
            if not path.is_file():
                return self.refuse("EntryNotFound", 404)
            self.send(path, {"X-Repo-Commit": self.sha, "ETag": f'"{_entry(folder, path)["oid"]}"'})

        def plain(self, path: Path, name: str) -> None:
            if not self.allowed(name):
                return self.answer(403 if self.record.authorized else 401, b"")
            if path.is_dir():
                links = "".join(f'<a href="{quote(p.name)}">{p.name}</a>\n' for p in sorted(path.iterdir()))
                return self.answer(200, links.encode(), {"Content-Type": "text/html"})
            if not path.is_file():
                return self.answer(404, b"no such file")
            self.send(path, {"ETag": f'"{path.stat().st_size}-{path.stat().st_mtime_ns}"'})

        def json(self, value: object, headers: dict[str, str] | None = None) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

        def refuse(self, code: str, status: int) -> None:
            self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def send(self, path: Path, headers: dict[str, str]) -> None:
            """Answer with a file, or with the bytes of it that the Range header names."""
            size, headers = path.stat().st_size, {"Accept-Ranges": "bytes", **headers}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if not wanted:
                return self.answer(200, path.read_bytes(), headers)
            first, last = int(wanted[1]), min(int(wanted[2] or size), size - 1)
            self.record.range = (first, last)
            if first >= size:
                return self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
            with path.open("rb") as opened:
                opened.seek(first)
                body = opened.read(last - first + 1)
            self.answer(206, body, {**headers, "Content-Range": f"bytes {first}-{last}/{size}"})

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            fault = self.fault if self.fault and not self.fault.status else None
            length = len(body)
            if fault and fault.cut is not None:
                body = body[: fault.cut]
                length = len(body) if fault.declared else length
            self.record.status = status
            self.send_response(status)
            for name, value in {"Content-Length": str(length), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            before = fault.stall_after if fault and fault.stall else len(body)
            for part in (body[:before], body[before:]):
                self.wfile.write(part)
                self.record.sent += len(part)
                if fault and fault.stall and part is not body[before:]:
                    hub.closing.wait(fault.stall)
                    fault = None
            if len(body) < length:
                self.hang_up()

    return Handler


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, metavar="FOLDER")
    parser.add_argument("--port", type=int, default=0)
    with HubServer(**vars(parser.parse_args())) as server:
        print(server.url, flush=True)
        while True:
            time.sleep(60)
