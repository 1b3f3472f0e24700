"""C4-format records: order of reading, and an error that names the place of every mistake."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from titanlite.config.sections import Data, Training
from titanlite.data import DataError
from titanlite.data.packing import build_dataset
from titanlite.data.sources import iter_records, source_files
from titanlite.data.tokenizer import load_tokenizer


def record(text: object) -> str:
    return json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"})


def write(path: Path, lines: list[str]) -> Path:
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(iter_records(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "c4-02.json.gz", [record("e")])
    write(tmp_path / "c4-01.jsonl", [record("c"), "", record("d")])
    write(tmp_path / "c4-00.json", [record("a"), record("b")])
    write(tmp_path / "c4-03.jsonl.gz", [record("f")])
    (tmp_path / "README.md").write_text("not a record")
    records = list(iter_records(tmp_path))
    assert [r.text for r in records] == list("abcdef")
    assert [(r.file.name, r.number) for r in records][2:4] == [("c4-01.jsonl", 1), ("c4-01.jsonl", 3)]
    assert [r.text for r in iter_records(tmp_path / "c4-01.jsonl")] == ["c", "d"]


def test_names_lead_to_the_bundled_text_unless_a_path_is_given(tmp_path: Path) -> None:
    assert [file.parent.name for file in source_files("c4_test", None)] == ["train"] * 4
    assert [file.parent.name for file in source_files("c4_validation", None)] == ["validation"]
    file = write(tmp_path / "mine.jsonl", [record("a")])
    assert all(source_files(name, str(tmp_path)) == [file] for name in ("c4_test", "c4_validation", "c4"))
    for name in ("c4", "c4_tset"):
        with pytest.raises(DataError, match=f'"{name}" is not bundled; set validation.dataset_path'):
            source_files(name, None, "validation")


def test_missing_path_empty_folder_and_foreign_file(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "holds no record files; expected names in .json, .jsonl" in refused(tmp_path)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    assert "is not a record file" in refused(tmp_path / "data.parquet")
    with pytest.raises(DataError, match="allenai/c4 does not exist .*looked from"):
        source_files("c4", "allenai/c4")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut o', "not valid JSON"),
        ('{"text": "caf\udce9"}', "not valid JSON"),
        ("[1, 2]", "found list"),
        ('{"txt": "a", "url": "b"}', "(keys: 'txt', 'url')"),
        ('{"text": null}', "found NoneType"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json.gz"])
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, suffix: str, line: str, message: str) -> None:
    content = "\n".join([record("a"), record("b"), line, record("d")]).encode("utf-8", "surrogateescape")
    path = tmp_path / f"c4{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    found = refused(path)
    assert "line 3: " in found and message in found


def test_ids_over_the_models_vocabulary_name_file_line_and_id(tmp_path: Path) -> None:
    path = write(tmp_path / "c4.jsonl", [record("a")])
    tokenizer, training = load_tokenizer(), Training(dataset_path=str(path), seq_len=8)
    with pytest.raises(DataError) as caught:
        build_dataset(training, Data(), tokenizer, vocab_size=2049)
    assert f"{path}, line 1: token id 2049 is outside the model's vocabulary of 2049" in str(caught.value)
    build_dataset(training, Data(), tokenizer, vocab_size=2050)
