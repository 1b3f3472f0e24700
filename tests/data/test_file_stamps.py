"""Files that were replaced between a save and a resume are named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign_tokens import write_raw
from tests.support.hub_server import HubServer
from tests.support.texts import TOKENIZER, write_records
from tests.support.train_runs import flags, train
from titanlite import exit_codes
from titanlite.config.data_sections import Data
from titanlite.config.sections import Training
from titanlite.data import file_stamps
from titanlite.data.dataset_builder import TextReader
from titanlite.data.rows import Rows

STREAM = Data(streaming=True, lanes=1)


def text_of(path: Path | str, data: Data | None = None) -> Rows:
    training = Training(dataset_path=str(path), seq_len=8)
    return TextReader(data or Data(token_cache="off"), TOKENIZER, 2304).train(training)


def saved(rows: Rows) -> Any:
    """The entry of a checkpoint, after its way through JSON."""
    return json.loads(json.dumps(file_stamps.record(rows)))


def put(file: Path, content: bytes, seconds: int) -> None:
    """Replace a file by another one, which was changed so many seconds after the first."""
    before = file.stat().st_mtime
    other = file.with_name("new")
    other.write_bytes(content)
    os.utime(other, (before + seconds, before + seconds))
    other.replace(file)


def test_a_replaced_file_is_named_with_its_sizes_and_a_copy_ends_no_stream(tmp_path, logged):
    folder = write_records(tmp_path / "text")
    before = saved(text_of(folder, STREAM))
    assert file_stamps.difference(before, text_of(folder, STREAM)) == ""
    file = folder / "1.jsonl"
    put(file, file.read_bytes(), 5)
    assert file_stamps.difference(before, text_of(folder, STREAM)) == ""
    assert f"{file} were written again since the checkpoint, and have the same size" in logged()
    size = file.stat().st_size
    put(file, file.read_bytes() + b'{"text": "more"}\n', 0)
    found = file_stamps.difference(before, text_of(folder, STREAM))
    assert found == f"{file} has another size ({size}, now {size + 17})"
    assert file_stamps.difference({}, text_of(folder, STREAM)) == ""
    assert saved(text_of(folder)) == {}, "the fingerprint of a whole text is of its content"


def test_token_files_whose_fingerprint_is_of_samples(tmp_path, logged):
    write_raw(tmp_path / "a.bin", range(3, 900))
    before = saved(text_of(tmp_path / "a.bin"))
    put(tmp_path / "a.bin", (tmp_path / "a.bin").read_bytes(), 5)
    assert file_stamps.difference(before, text_of(tmp_path / "a.bin")) == ""
    assert "a.bin were written again since the checkpoint" in logged()
    write_raw(tmp_path / "a.bin", range(3, 910))
    assert "a.bin has another size (" in file_stamps.difference(before, text_of(tmp_path / "a.bin"))


@pytest.mark.parametrize("tag", ["ETag", "Last-Modified"])
def test_a_file_behind_a_url(tmp_path, tag, logged):
    pytest.importorskip("aiohttp")
    folder = write_records(tmp_path / "text", 1)
    file = folder / "0.jsonl"
    with HubServer(tmp_path, tag=tag) as server:
        url = f"{server.url}/text/0.jsonl"
        before = saved(text_of(f"{url}?signature=secret"))
        assert "secret" not in str(before)
        assert file_stamps.difference(before, text_of(f"{url}?signature=other")) == ""
        put(file, file.read_bytes(), 5)
        found = file_stamps.difference(before, text_of(url))
        if tag == "ETag":
            assert found.startswith(f'{url} has another tag ("')
        else:
            assert found == ""
            assert f"{url} were written again" in logged()
        folder = f"{server.url}/text/"
        before = saved(text_of(folder))
        put(file, file.read_bytes()[:-30], 5)
        assert f"{url} has another " in file_stamps.difference(before, text_of(folder))


@pytest.mark.slow
def test_a_resume_with_a_replaced_file_is_refused_unless_it_is_meant(tmp_path):
    folder = write_records(tmp_path / "text")
    run = tmp_path / "run"
    words = flags(run, f"--data.source=[{{name='web', path='{folder}'}}, {{name='c4_test'}}]")
    words += ["--data.streaming", "--data.lanes=1"]
    codes, console = train([*words, "--training.steps=2"], 1, tmp_path / "console")
    assert codes == [0], console
    put(folder / "1.jsonl", (folder / "1.jsonl").read_bytes() * 2, 5)
    codes, console = train([*words, "--training.steps=4"], 1, tmp_path / "console")
    assert codes == [exit_codes.CHECKPOINT]
    assert f"text files: {folder / '1.jsonl'} has another size" in console
    assert "--checkpoint.allow_changes=data" in console
    allowed = [*words, "--training.steps=4", "--checkpoint.allow_changes=data"]
    codes, console = train(allowed, 1, tmp_path / "console")
    assert codes == [0], console
    assert "another data, by checkpoint.allow_changes" in console
