"""The first contact with a server that is not there: short, with the cause and the way out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.hub_server import HubServer
from tests.support.pool import free_port
from tests.support.shards import LINES, TEXTS
from titanlite.config.data_sections import Data
from titanlite.config.sections import Training
from titanlite.data import DataError, connection_check
from titanlite.data.connection_check import contact_problem
from titanlite.data.dataset_builder import TextReader
from titanlite.data.records import Columns
from titanlite.data.text_files import TextFiles
from titanlite.data.tokenizer import load_tokenizer

pytest.importorskip("aiohttp")

TOKENIZER = load_tokenizer()
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
    reader = TextReader(Data(), TOKENIZER, 2304, patience=300.0)
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
def test_a_server_that_refuses_ends_the_start_soon_with_cause_and_command(
    nowhere: str, text: dict[str, str], begin: str
) -> None:
    where = {name: value.format(nowhere) for name, value in text.items()}
    found = refused(Training(**where, seq_len=8))
    assert found.startswith(begin.format(nowhere))
    assert f"{nowhere} cannot be reached: ConnectionRefusedError: " in found
    assert "copy the files (of a data set of the hub by `hf download`), and give" in found
    assert "HF_TOKEN" not in found and "secret" not in found


def test_text_is_read_by_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.jsonl").write_bytes(LINES)
    with HubServer(tmp_path) as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        url = "http://host.example/files/a.jsonl"
        assert contact_problem(url) is None
        found = TextFiles((url,), Columns(), patience=1.0).records(0, 0)
        assert [record.text for record in found] == TEXTS


def test_only_the_first_contact_is_short(tmp_path: Path) -> None:
    with HubServer(tmp_path) as server:
        assert contact_problem(server.url) is None
        assert server.requests == [], "it connects and asks nothing"
    assert contact_problem(server.url) is None, "it was there, and may come back"
    # The first request tells.
    for url in ("http://host:port/a", "http://[::1/a", "gs://bucket/a", "a/b"):
        assert contact_problem(url) is None
