"""Token files behind URLs: the batches of local files, by ranges, through faults of the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.foreign_tokens import (
    FORMS,
    joined,
    make_documents,
    write_llmc,
    write_raw,
)
from tests.support.hub_server import HubServer
from tests.support.s3 import new_bucket, serving
from tests.support.token_folders import SIZE, TOKENIZER
from titanlite.config.data_sections import Data, DataSource
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.foreign.ranges import RemoteFile
from titanlite.data.hashes import batch_hash, step_hash
from titanlite.data.loader import TrainLoader
from titanlite.data.rows import Rows
from titanlite.data.text import TextReader
from titanlite.data.token_files import TokenFiles

pytest.importorskip("aiohttp")

BATCH = 6
STEPS = 3


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("titanlite.data.remote._FIRST_WAIT", 0.01)
    (tmp_path / "files").mkdir()
    with HubServer(tmp_path) as running:
        yield running


def built(path: Path | str, patience: float = 30, form: Any = "auto", **data: Any) -> Rows:
    reader = TextReader(Data(mask_documents=True, **data), TOKENIZER, SIZE, patience=patience)
    source = DataSource(path=str(path), format=form)
    return reader.open(source, "data.source[0]", 32, None)


def hashes(rows: Rows) -> list[str | None]:
    return [step_hash(rows, step * BATCH, BATCH) for step in range(STEPS)]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "Megatron-LM"])
def test_a_file_behind_a_url_gives_the_batches_of_the_local_file(
    server: HubServer, tmp_path: Path, form: str
) -> None:
    path = FORMS[form](tmp_path / "files", make_documents())
    for data in ({}, {"shuffle": False}, {"packing": "best-fit"}):
        remote = built(f"{server.url}/files/{path.name}", **data)
        assert isinstance(remote.corpus, TokenFiles)
        assert hashes(remote) == hashes(built(path, **data))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("packing", ["split", "best-fit"])
def test_the_rows_of_a_step_are_fetched_at_the_same_time(
    server: HubServer, tmp_path: Path, packing: str
) -> None:
    """Each answer comes after 0.2 s: one after the other, 24 rows would take 5 s."""
    documents = make_documents(4000)
    path = write_raw(tmp_path / "files/a.ds", joined(documents))
    other = write_raw(tmp_path / "b.bin", joined(documents))

    def loader(place: str) -> TrainLoader:
        sources = [DataSource(name="a", path=place), DataSource(name="b", path=str(other))]
        settings = Data(mask_documents=True, source=sources, packing=packing)  # type: ignore[arg-type]
        reader = TextReader(settings, TOKENIZER, SIZE, patience=30)
        return TrainLoader(reader.train(Training(seq_len=32)), 48, 48)

    remote = loader(f"{server.url}/files/a.ds")
    local = loader(str(path))
    assert batch_hash(remote.next_step()) == batch_hash(local.next_step())
    server.fail("*a.ds*", stall=0.2, times=None)
    began = time.monotonic()
    second = remote.next_step()
    assert time.monotonic() - began < 2.5
    assert batch_hash(second) == batch_hash(local.next_step())


#: Far more than what is read at the start.
LARGE = joined(make_documents(400)) * 300


@pytest.mark.slow
def test_faults_of_the_server_change_no_batch(server: HubServer, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "files/a.bin", LARGE)
    rows = built(f"{server.url}/files/a.bin")
    server.fail("*a.bin", status=503, times=3)
    server.fail("*a.bin", cut=7, times=4)
    server.fail("*a.bin", times=2)
    assert hashes(rows) == hashes(built(path))
    assert [fault.times for fault in server.faults] == [0, 0, 0]


@pytest.mark.slow
def test_a_source_that_stays_away_is_named_after_its_patience(
    server: HubServer, tmp_path: Path
) -> None:
    write_raw(tmp_path / "files/a.bin", LARGE)
    rows = built(f"{server.url}/files/a.bin", patience=0.1)
    with server.refused(), pytest.raises(DataError, match=r"files/a.bin cannot be read at byte .*"):
        hashes(rows)
    with pytest.raises(DataError, match="there is no file at .*files/b.bin"):
        built(f"{server.url}/files/b.bin", patience=0.1)


@pytest.mark.slow
def test_ranges_alone_are_read(server: HubServer, tmp_path: Path) -> None:
    """A file of 64 MiB: its start and some rows take a sixteenth of it."""
    ids = np.full(32 << 20, 5, "<u2")
    ids[:: 1 << 12] = TOKENIZER.eos_id
    ids.tofile(tmp_path / "files/a.bin")
    rows = built(f"{server.url}/files/a.bin")
    started = sum(request.sent for request in server.of("*a.bin"))
    hashes(rows)
    asked = server.of("*a.bin")
    sent = sum(request.sent for request in asked)
    assert started < 4 << 20, started
    assert sent - started == BATCH * STEPS * 33 * 2
    assert len(asked) < 400


def test_rows_in_order_are_read_ahead(server: HubServer, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "files/a.bin", joined(make_documents(2000)))
    rows = built(f"{server.url}/files/a.bin", shuffle=False)
    before = len(server.of("*a.bin"))
    local = built(path, shuffle=False)
    for number in range(300):
        assert (rows.sequence(number).tokens == local.sequence(number).tokens).all()
    assert len(server.of("*a.bin")) - before < 20


@pytest.mark.slow
def test_a_file_that_is_replaced_is_named(server: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "files/a.bin"
    np.full(4 << 20, 5, "<u2").tofile(path)
    for fetch in (lambda rows: hashes(rows), lambda rows: TrainLoader(rows, 6, 6).next_step()):
        rows = built(f"{server.url}/files/a.bin")
        np.full(4 << 20, 6, "<u2").tofile(path)
        with pytest.raises(DataError, match="a.bin has changed while it was read"):
            fetch(rows)


def test_a_new_connection_reads_the_same_file_or_none(server: HubServer, tmp_path: Path) -> None:
    """Other threads compare with the file that was seen first."""
    path = write_raw(tmp_path / "files/a.bin", [5] * 5000)
    file = RemoteFile(f"{server.url}/files/a.bin", 10_000, patience=1)
    assert file.read(0, 4) == b"\5\0\5\0"
    write_raw(path, [6] * 5000)
    file._idle.clear()
    with pytest.raises(DataError, match="a.bin has changed while it was read"):
        file.read(5000, 4)


def test_bad_files_behind_urls_are_named(server: HubServer, tmp_path: Path) -> None:
    path = write_llmc(tmp_path / "files/a.bin", [5, 6, 7])
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="files/a.bin has 1,028 bytes instead of 1,030"):
        built(f"{server.url}/files/a.bin?signature=secret")
    write_raw(tmp_path / "files/b.bin", [5, SIZE] * 100)
    with pytest.raises(DataError, match=r"files/b.bin, token 1 \(from 0\)") as error:
        built(f"{server.url}/files/b.bin?signature=secret")
    assert "secret" not in str(error.value)
    write_raw(tmp_path / "files/c.idx", [1])
    with pytest.raises(DataError, match="Megatron-LM's files are read from a local disk") as error:
        built(f"{server.url}/files/c.idx?signature=secret")
    assert "copy the files" in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.slow
def test_several_threads_read_one_file(server: HubServer, tmp_path: Path) -> None:
    """Validation and the thread of the next steps may read together."""
    path = write_raw(tmp_path / "files/a.bin", LARGE)
    rows = built(f"{server.url}/files/a.bin")
    local = built(path)
    wrong: list[int] = []

    def read(first: int) -> None:
        for number in range(first, 60, 4):
            if (rows.sequence(number).tokens != local.sequence(number).tokens).any():
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_folders_and_patterns_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    documents = make_documents(30)
    with serving() as port:
        bucket = new_bucket(port)
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        for number in range(3):
            part = documents[10 * number : 10 * number + 10]
            write_raw(tmp_path / f"{number:05}_shuffled.ds", joined(part))
        write_raw(tmp_path / "whole.bin", joined(documents))
        for file in sorted(tmp_path.iterdir()):
            bucket.client.upload_file(str(file), bucket.name, f"tokens/{file.name}")
        root = f"s3://{bucket.name}/tokens"
        expected = hashes(built(tmp_path / "whole.bin"))
        assert hashes(built(f"{root}/*.ds")) == expected
        assert hashes(built(f"{root}/whole.bin")) == expected
        with pytest.raises(DataError, match="several kinds"):
            built(f"{root}/", form="tokens")
        bucket.client.delete_object(Bucket=bucket.name, Key="tokens/whole.bin")
        rows = built(f"{root}/", form="tokens")
        assert rows.corpus.documents == 30  # type: ignore[union-attr]
        assert hashes(rows) == expected
        bucket.client.put_object(Bucket=bucket.name, Key="tokens/00000_shuffled.ds.loss", Body=b"0")
        with pytest.raises(DataError, match="ds.loss masks tokens, which is not read"):
            built(f"{root}/", form="tokens")
