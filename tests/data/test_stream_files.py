"""Files of a stream behind HTTP, S3 and a hub: faults of the server cost time, never a byte or a
record.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from tests.support.hub_server import HubServer
from tests.support.pool import free_port
from tests.support.processes import python
from tests.support.s3 import new_bucket, serving
from tests.support.shards import LINES, TEXTS, write_c4
from titanlite.config.data_sections import Data
from titanlite.config.sections import Training
from titanlite.data import DataError, connection_check
from titanlite.data.connection_check import contact_problem
from titanlite.data.dataset_builder import TextReader
from titanlite.data.listing import Place
from titanlite.data.records import Columns
from titanlite.data.stream_files import url_text
from titanlite.data.text_files import TextFiles
from titanlite.data.tokenizer import load_tokenizer

pytest.importorskip("aiohttp")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("titanlite.data.remote._FIRST_WAIT", 0.01)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "files/b.jsonl").write_bytes(LINES)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "files/c.parquet", row_group_size=300)
    with HubServer(tmp_path) as running:
        yield running


def read(url: str, start: int = 0, patience: float = 300) -> Iterator[str]:
    return (
        record.text for record in TextFiles((url,), Columns(), patience=patience).records(0, start)
    )


@pytest.mark.slow_after(10)
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 429, "retry_after": 0, "times": 2},
        {"times": 5},
        {"cut": 20_000, "times": 2},
        {"cut": 20_000, "declared": True, "times": None},
    ],
)
@pytest.mark.parametrize("file", ["a.jsonl.gz", "b.jsonl", "c.parquet"])
def test_no_record_is_lost_or_read_twice(server, file, fault):
    server.fail(f"*/{file}", **fault)
    assert list(read(f"{server.url}/files/{file}", start=7)) == TEXTS[7:]
    assert not server.faults[0].times
    size = (server.root / "files" / file).stat().st_size
    assert sum(request.sent for request in server.of(f"*/{file}")) < 3 * size, (
        "no retry begins at byte 0"
    )


def test_a_server_without_ranges_is_read_in_order(server):
    server.ranges = False
    assert list(read(f"{server.url}/files/a.jsonl.gz")) == TEXTS


@pytest.mark.parametrize("tag", ["ETag", "Last-Modified", "X-None"])
def test_a_file_that_was_replaced_is_not_read_on(server, tag, monkeypatch):
    """Between two ranges, where no answer fails; the size tells it if no header does."""
    monkeypatch.setattr("titanlite.data.remote._MOST", 20_000)
    server.tag, path = tag, server.root / "files/b.jsonl"
    found = read(f"{server.url}/files/b.jsonl")
    first = next(found)
    other = LINES.replace(b'"text ', b'"TEXT ')
    path.write_bytes(other + b" " * (tag == "X-None"))
    later: list[str] = []
    with pytest.raises(DataError, match=r"b\.jsonl has changed while it was read"):
        later += found
    assert [first, *later] == TEXTS[: len(later) + 1]


def test_a_server_that_refuses_stalls_or_starts_again(server, monkeypatch):
    monkeypatch.setattr("titanlite.data.remote._SILENCE", 1.0)
    server.fail("*/a.jsonl.gz", stall=60)
    for method in ("HEAD", "GET"):
        server.fail("*/a.jsonl.gz", method=method, status=503)

    def come_back():
        server.closing.clear()
        server.__enter__()

    server.__exit__()
    threading.Timer(0.3, come_back).start()
    assert list(read(f"{server.url}/files/a.jsonl.gz")) == TEXTS
    assert not any(fault.times for fault in server.faults)


def test_a_lasting_fault_is_an_error_with_file_and_status(server):
    with pytest.raises(
        DataError, match=r"nothing\.jsonl cannot be read at byte 0: ClientResponseError: 404"
    ):
        list(read(f"{server.url}/files/nothing.jsonl"))
    server.fail("*", status=500, times=None)
    with pytest.raises(
        DataError,
        match=r"a\.jsonl\.gz cannot be .* 0, \d+ attempts .*\(data.retry_seconds\): .*500",
    ):
        list(read(f"{server.url}/files/a.jsonl.gz?signature=secret", patience=0.5))


@pytest.mark.slow
def test_s3_text_with_faults(server, monkeypatch):
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with serving() as server.upstream:
        bucket = new_bucket(server.upstream)
        environment = {
            **bucket.environment,
            "AWS_ENDPOINT_URL_S3": server.url,
            "AWS_MAX_ATTEMPTS": "1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for file in ("a.jsonl.gz", "c.parquet"):
            bucket.client.upload_file(str(server.root / "files" / file), bucket.name, f"d/{file}")
        folder = f"s3://{bucket.name}/d/"
        names = url_text(Place(f"{folder}*.gz", "key")).files
        assert names == (f"{folder}a.jsonl.gz",)
        for name in (*names, f"{folder}c.parquet"):
            server.fail("*/d/*", cut=20_000, times=2)
            server.fail("*/d/*", status=503, times=3)
            assert list(read(name)) == TEXTS
            assert not any(fault.times for fault in server.faults)
        server.fail("*/d/*", status=503, times=None)
        with pytest.raises(
            DataError,
            match=r"a.jsonl.gz cannot be read at byte 0, \d+ attempts .*(reduce|SlowDown)",
        ):
            list(read(names[0], patience=1.0))


CLIENT = """
import json, os
from titanlite.config.dataset_registry import HubText, hub_text
from titanlite.data import DataError
from titanlite.data.records import Columns
from titanlite.data.text_files import TextFiles
from titanlite.data.stream_files import hub_files

os.environ["HF_TOKEN"] = "hf_right"
found = {}
for split in (None, "validation", "test"):
    try:
        names, revision, kind = hub_files(hub_text("c4"), None, split, "training.dataset")
    except DataError as error:
        found["error"] = str(error)
        continue
    shards = TextFiles(tuple(names), Columns(), kind, revision, 60.0)
    texts = [record.text for n in range(len(names)) for record in shards.records(n, 0)]
    found[split or "train"] = texts
os.environ["HF_TOKEN"] = "hf_wrong"
try:
    hub_files(HubText("me/secret"), None, None, "training.dataset")
except DataError as error:
    found["secret"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_listed_and_read(tmp_path):
    pytest.importorskip("datasets")
    write_c4(tmp_path, 2)
    (tmp_path / "datasets/me/secret").mkdir(parents=True)
    (tmp_path / "datasets/me/secret/a.jsonl").write_bytes(LINES)
    with HubServer(tmp_path, gated={"allenai/c4": "hf_right", "me/secret": "hf_right"}) as hub:
        hub.fail("*/revision/*", status=503)
        hub.fail("*00001-of-00002*", cut=30_000)
        hub.fail("*00000-of-00002*", status=429, retry_after=0)
        done = python("-c", CLIENT, env=hub.environment(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["train"] == TEXTS
    assert found["validation"] == TEXTS[:1]
    assert (
        found["error"]
        == "training.dataset: allenai/c4 has no split 'test'; it has train, validation"
    )
    assert (
        "me/secret cannot be listed (a private or gated one needs HF_TOKEN): Dataset"
        in found["secret"]
    )
    assert [fault.times for fault in hub.faults] == [0, 0, 0]


# The first contact with a server that is not there


PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_contact_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_check, "_reached", set())
    for name in (*PROXIES, *map(str.lower, PROXIES)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a port that refuses, which is the hub's, too."""
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    return address


def refused(training: Training) -> str:
    """The error of text that is opened with the patience of a run; it comes soon."""
    reader = TextReader(Data(), load_tokenizer(), 2304, patience=300.0)
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        reader.train(training).sequence(0)
    assert time.monotonic() - began < 15
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        (
            {"dataset": "c4"},
            "training.dataset: the hub's data set allenai/c4, subset en, cannot be listed: ",
        ),
        ({"dataset_path": "{}/a.jsonl?sig=secret"}, "training.dataset_path: {}/a.jsonl cannot be "),
    ],
)
def test_a_server_that_refuses_ends_the_start_soon_with_cause_and_command(nowhere, text, begin):
    where = {name: value.format(nowhere) for name, value in text.items()}
    found = refused(Training(**where, seq_len=8))
    assert found.startswith(begin.format(nowhere))
    assert f"{nowhere} cannot be reached: ConnectionRefusedError: " in found
    assert "copy the files (of a data set of the hub by `hf download`), and give" in found
    assert "HF_TOKEN" not in found and "secret" not in found


def test_text_is_read_by_the_proxy_of_the_environment(tmp_path, monkeypatch):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.jsonl").write_bytes(LINES)
    with HubServer(tmp_path) as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        url = "http://host.example/files/a.jsonl"
        assert contact_problem(url) is None
        found = TextFiles((url,), Columns(), patience=1.0).records(0, 0)
        assert [record.text for record in found] == TEXTS


def test_only_the_first_contact_is_short(tmp_path):
    with HubServer(tmp_path) as server:
        assert contact_problem(server.url) is None
        assert server.requests == [], "it connects and asks nothing"
    assert contact_problem(server.url) is None, "it was there, and may come back"
    # The first request tells.
    for url in ("http://host:port/a", "http://[::1/a", "gs://bucket/a", "a/b"):
        assert contact_problem(url) is None
