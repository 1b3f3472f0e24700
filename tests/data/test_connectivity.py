"""The first contact with a server that is not there: short, with the cause and the way out."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.support.hub_server import HubServer
from tests.support.pool import free_port
from tests.support.shards import LINES, TEXTS
from titanlite.cli import main as cli
from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.sections import Training
from titanlite.data import DataError, connectivity
from titanlite.data.connectivity import contact_problem
from titanlite.data.records import Columns
from titanlite.data.text import TextReader
from titanlite.data.text_files import TextFiles
from titanlite.data.tokenizer import load_tokenizer
from titanlite.models.hf import config_file

pytest.importorskip("aiohttp")

TOKENIZER = load_tokenizer()
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_contact_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "_reached", set())
    for name in (*PROXIES, *map(str.lower, PROXIES)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a port that refuses, which is the hub's, too."""
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    return address


def refused(training: Training, data: Data | None = None, validation: Any = None) -> str:
    """The error of text that is opened with the patience of a run; it comes soon."""
    reader = TextReader(data or Data(), TOKENIZER, 2304, patience=300.0)
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        if validation is None:
            reader.train(training).sequence(0)
        else:
            reader.held_out(validation, 8)
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
        ({"dataset_path": "{}/folder/"}, "training.dataset_path: {}/folder/ cannot be read: "),
        (
            {"dataset_path": "hf://datasets/me/small/*.jsonl"},
            "training.dataset_path: hf://datasets/me/small/*.jsonl cannot be read: ",
        ),
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


def test_sources_and_held_out_texts_are_named_by_their_keys(nowhere: str) -> None:
    sources = [DataSource(name="c4_test"), DataSource(name="me/small")]
    found = refused(Training(seq_len=8), Data(source=sources))
    assert found.startswith("data.source[1].name: the hub's data set me/small cannot be listed: ")
    found = refused(Training(seq_len=8), validation=Validation(dataset="c4"))
    assert found.startswith("validation.dataset: the hub's data set allenai/c4, subset en, cannot")


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = refused(Training(dataset_path="https://host.example/a.jsonl", seq_len=8))
    assert "cannot be reached: gaierror: [Errno -2] Name or service not known; on a" in found


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


@pytest.mark.parametrize("url", ["http://host:port/a", "http://[::1/a", "gs://bucket/a", "a/b"])
def test_an_address_that_is_not_known_is_left_to_the_first_request(url: str) -> None:
    assert contact_problem(url) is None


def test_only_the_first_contact_is_short(tmp_path: Path) -> None:
    with HubServer(tmp_path) as server:
        assert contact_problem(server.url) is None
        assert server.requests == [], "it connects and asks nothing"
        with server.refused():
            assert contact_problem(server.url) is None


def test_commands_end_soon_too(
    nowhere: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "out"))
    for words in (
        ("data", "prepare", "c4", *out, "--tokenizer=bundled"),
        ("data", "prepare", f"{nowhere}/a.jsonl", *out, "--tokenizer=bundled"),
        ("data", "peek", "debug_model.toml", "--training.dataset=c4"),
    ):
        began = time.monotonic()
        assert cli.main(list(words)) == 2
        assert time.monotonic() - began < 15
        printed = "".join(capfd.readouterr())
        assert f"{nowhere} cannot be reached: ConnectionRefusedError" in printed, words
        assert "on a machine with a network" in printed


def test_a_model_of_the_hub_is_taken_from_the_cache_without_a_network(
    nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "unused")

    def cached(source: str, name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        return f"cache/{source}/{name}"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", cached)
    assert config_file("me/small") == "cache/me/small/config.json"
    monkeypatch.undo()
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    with pytest.raises(FileNotFoundError, match="cannot be reached: ConnectionRefusedError"):
        config_file("me/small-that-is-in-no-cache")
