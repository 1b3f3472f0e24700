"""Files of a stream behind HTTP: faults of the server cost time, never a record."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.hub_server import HubServer
from titanlite.data import DataError
from titanlite.data.formats import Columns
from titanlite.data.shards import Shards, url_files
from titanlite.tools.cli import main

pytest.importorskip("aiohttp")
TEXTS = [f"text {i} " + "abcdefgh" * (i % 50) for i in range(400)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("titanlite.data.shards._FIRST_WAIT", 0.01)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "files/b.jsonl").write_text("\n".join(lines))
    with HubServer(tmp_path) as running:
        yield running


def texts(server: HubServer, file: str, start: int = 0, patience: float = 30) -> list[str]:
    shards = Shards((f"{server.url}/files/{file}",), Columns(), patience=patience)
    return [record.text for record in shards.records(0, start)]


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 429, "retry_after": 0, "times": 2},
        {"status": 503, "times": 3},
        {"times": 5},
        {"cut": 900, "times": 3},
        {"cut": 900, "declared": True, "times": 2},
    ],
)
@pytest.mark.parametrize("file", ["a.jsonl.gz", "b.jsonl"])
def test_no_record_is_lost_or_read_twice(server: HubServer, file: str, fault: dict[str, int]) -> None:
    server.fail(f"*/{file}", **fault)
    assert texts(server, file) == TEXTS
    assert server.faults[0].times == 0


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 429, "retry_after": 0}, {}])
def test_a_server_that_fails_while_a_file_is_opened(server: HubServer, fault: dict[str, int]) -> None:
    for method in ("HEAD", "GET"):
        server.fail("*", method=method, times=2, **fault)
    assert texts(server, "a.jsonl.gz", start=390) == TEXTS[390:]


def test_a_server_that_starts_again(server: HubServer) -> None:
    down = server.refused()
    down.__enter__()
    threading.Timer(0.3, down.__exit__, (None, None, None)).start()
    assert texts(server, "a.jsonl.gz") == TEXTS


def test_a_lasting_fault_is_an_error_with_file_and_status(server: HubServer) -> None:
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"nothing\.jsonl cannot be read after record 0: ClientResponseError: 404"):
        texts(server, "nothing.jsonl")
    for method in ("HEAD", "GET"):
        server.fail("*", method=method, status=500, times=None)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read after record 7, \d+ tries in .*: 500"):
        texts(server, "a.jsonl.gz", start=7, patience=0.5)
    assert time.monotonic() - begin < 20


def test_a_folder_and_a_pattern_list_files(server: HubServer) -> None:
    folder = f"{server.url}/files/"
    assert url_files(folder, "key") == [folder + "a.jsonl.gz", folder + "b.jsonl"]
    assert url_files(folder + "*.gz", "key") == [folder + "a.jsonl.gz"]


class _Cut(io.RawIOBase):
    """A file that gives a few bytes at a time, and fails after so many of them."""

    def __init__(self, content: bytes, limit: int) -> None:
        self._content, self._limit, self._at = content, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._limit:
            raise OSError("the connection is gone")
        piece = self._content[self._at : self._at + min(40, len(buffer))]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def test_a_file_that_fails_in_the_middle_goes_on_at_its_next_record(monkeypatch: pytest.MonkeyPatch) -> None:
    content = "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(20)).encode()
    limits = iter([100, 300, 10**6])
    monkeypatch.setattr("titanlite.data.shards.open_file", lambda _: _Cut(content, next(limits)))
    shards = Shards(("http://host/a.jsonl",), Columns(), patience=60.0)
    assert [record.text for record in shards.records(0, 0)] == [f"document {n}" for n in range(20)]


def test_fetched_files_are_whole_and_a_part_is_continued(server: HubServer, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    whole = (tmp_path / "files/b.jsonl").read_bytes()
    out.mkdir()
    url = f"{server.url}/files/b.jsonl"
    (out / f"b.jsonl.{hashlib.sha256(url.encode()).hexdigest()[:8]}.partial").write_bytes(whole[:1000])
    (out / "b.jsonl.01234567.partial").write_bytes(b"of another revision")
    server.fail("*a.jsonl.gz", status=503, times=2)
    command = ["data", "fetch", f"{server.url}/files/", "--out", str(out)]
    assert main(command) == 0 and "2 files in" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["a.jsonl.gz", "b.jsonl", "b.jsonl.01234567.partial"]
    assert sum(request.sent for request in server.of("*/b.jsonl")) < len(whole)
    assert (out / "b.jsonl").read_bytes() == whole
    assert (out / "a.jsonl.gz").read_bytes() == (tmp_path / "files/a.jsonl.gz").read_bytes()
    served = len(server.of("*.jsonl*"))
    assert main([*command, "--files", "1"]) == 0 and len(server.of("*.jsonl*")) == served
    assert main([*command, "--files", "2"]) == 2 and "0 to 1" in capsys.readouterr().err
