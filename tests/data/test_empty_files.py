"""Files that add nothing to a text are named, however the text is read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titanlite.cli import main as cli
from titanlite.config.data_sections import Data, DataSource
from titanlite.config.sections import Training
from titanlite.data import empty_files
from titanlite.data.text import build_dataset
from titanlite.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
NO_ROWS = "it holds no rows, or empty lines alone"


@pytest.fixture(autouse=True)
def nothing_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(empty_files, "_known", set())


def write_arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def write_tables(folder: Path, suffix: str) -> None:
    write = pq.write_table if suffix == "parquet" else lambda table, path: write_arrow(path, table)
    for name, texts in (("a", ["word " * 90]), ("b", []), ("c", [" ", "\n"])):
        write(pa.table({"text": pa.array(texts, pa.string())}), folder / f"{name}.{suffix}")


def write_lines(folder: Path, suffix: str) -> None:
    contents = {
        "a": json.dumps({"text": "word " * 90}) + "\n",
        "b": "\n  \n\n",
        "c": '{"text": " "}\n\n{"text": "\\n"}\n',
    }
    for name, content in contents.items():
        raw = content.encode()
        packed = gzip.compress(raw) if suffix.endswith(".gz") else raw
        (folder / f"{name}.{suffix}").write_bytes(packed)


def write_texts(folder: Path, suffix: str) -> None:
    for name, content in (("a", "word " * 90), ("b", " \n"), ("c", "\n\n")):
        (folder / f"{name}.{suffix}").write_text(content)


KINDS: dict[str, Callable[[Path, str], None]] = {
    "jsonl": write_lines,
    "jsonl.gz": write_lines,
    "parquet": write_tables,
    "arrow": write_tables,
    "txt": write_texts,
}


def expected(folder: Path, suffix: str) -> list[str]:
    found = [f"{folder / f'b.{suffix}'} adds nothing to the text: {NO_ROWS}"]
    what = NO_ROWS if suffix == "txt" else "it holds white space alone in 2 records"
    found.append(f"{folder / f'c.{suffix}'} adds nothing to the text: {what}")
    return found


@pytest.mark.parametrize("mode", ["whole", "stream", "mixture"])
@pytest.mark.parametrize("suffix", KINDS)
def test_training_warns_once_of_each_file_without_text(
    tmp_path: Path, suffix: str, mode: str, logged: Callable[[], str]
) -> None:
    KINDS[suffix](tmp_path, suffix)
    training = Training(dataset_path=str(tmp_path), seq_len=8)
    data = Data(streaming=mode != "whole", lanes=1, shuffle_buffer=1)
    if mode == "mixture":
        source = DataSource(name="mine", path=str(tmp_path))
        data = Data(source=[source, DataSource(name="c4_test")], streaming=False)
    rows = build_dataset(training, data, TOKENIZER, 2304)
    for number in range(60):  # three passes of the stream
        rows.sequence(number)
    for line in expected(tmp_path, suffix):
        assert logged().count(line) == 1
    assert logged().count("adds nothing to the text") == 2


def test_rank_0_alone_warns_of_a_file_that_all_ranks_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, logged
) -> None:
    write_lines(tmp_path, "jsonl")
    levels = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        empty_files._known.clear()
        caplog.clear()
        build_dataset(Training(dataset_path=str(tmp_path), seq_len=8), Data(), TOKENIZER, 2304)
        levels[rank] = [one.levelname for one in caplog.records if "adds nothing" in one.message]
    assert levels == {"0": ["WARNING"] * 2, "1": ["INFO"] * 2}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt"])
def test_prepare_warns_too(tmp_path: Path, suffix: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    KINDS[suffix](folder, suffix)
    if suffix != "parquet":
        (folder / f"d.{suffix}").touch()
    words = ["data", "prepare", str(folder), "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--tokenizer=bundled"]) == 0
    printed = "".join(capfd.readouterr())
    for line in expected(folder, suffix):
        assert printed.count(line) == 1
    if suffix != "parquet":
        assert f"d.{suffix} adds nothing to the text: {NO_ROWS}" in printed
