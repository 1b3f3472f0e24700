"""C4-format records: order of reading, and an error that names the place for everything that is wrong."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest

from titanlite.config.plans import DataPlan, TokenizerPlan
from titanlite.data import build_dataset, load_tokenizer
from titanlite.data.errors import DataError
from titanlite.data.sources import BUNDLED, iter_records, source_files


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


def test_names_lead_to_the_bundled_text() -> None:
    assert [file.parent.name for file in source_files("c4_test", None)] == ["train"] * 4
    assert [file.parent.name for file in source_files("c4_validation", None)] == ["validation"]


def test_a_path_takes_the_place_of_the_bundled_text(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", [record("a")])
    for name in ("c4_test", "c4_validation", "c4"):
        assert source_files(name, str(tmp_path)) == [file]


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(DataError, match='"c4_tset" is unknown; known are c4_test, c4_validation, c4'):
        source_files("c4_tset", None)


def test_streaming_is_not_built_yet() -> None:
    with pytest.raises(DataError, match=r"streaming .* not built yet; set training.dataset_path"):
        source_files("c4", None)
    with pytest.raises(DataError, match=r"allenai/c4 does not exist .*hub are not built yet"):
        source_files("c4", "allenai/c4")


def test_missing_path_empty_folder_and_foreign_file(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "holds no record files; expected names in .json, .jsonl" in refused(tmp_path)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    assert "is not a record file" in refused(tmp_path / "data.parquet")


@pytest.mark.parametrize(("rank", "level"), [("0", "WARNING"), ("1", "INFO")])
def test_empty_files_beside_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, level: str
) -> None:
    """At every start, also with cached tokens; on the console of rank 0 only."""
    monkeypatch.setenv("RANK", rank)
    logger, handler, records = logging.getLogger("titanlite"), logging.Handler(), []
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    write(tmp_path / "a.json", [record("a")])
    source_files("c4", str(tmp_path))
    for name in "bcdef":
        (tmp_path / f"{name}.json").touch()
    source_files("c4", str(tmp_path), "validation")
    first = ", ".join(str(tmp_path / f"{name}.json") for name in "bcd")
    told = f"validation.dataset_path: 5 of 6 files are empty (0 bytes) and bring no text: {first} and 2 more"
    assert [(found.levelname, found.getMessage()) for found in records] == [(level, told)]


def test_files_without_records(tmp_path: Path) -> None:
    write(tmp_path / "a.json", ["", ""])
    write(tmp_path / "b.json.gz", [])
    with pytest.raises(DataError, match=r"no records in .*a\.json, .*b\.json\.gz"):
        list(iter_records(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut o', "line 3: not valid JSON"),
        ("[1, 2]", "line 3: expected a JSON object with the key 'text', found list"),
        ('{"txt": "a", "url": "b"}', "line 3: the key 'text' is missing (keys: 'txt', 'url')"),
        ('{"text": null}', "line 3: the key 'text' must be a string, found NoneType"),
        ('{"text": 7}', "line 3: the key 'text' must be a string, found int"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json.gz"])
def test_a_bad_record_is_named_by_file_line_and_key(tmp_path: Path, suffix: str, line: str, message: str) -> None:
    assert message in refused(write(tmp_path / f"c4{suffix}", [record("a"), record("b"), line, record("d")]))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin1.jsonl"
    path.write_bytes(record("a").encode() + b'\n{"text": "caf\xe9"}\n')
    assert "line 2: not valid JSON" in refused(path)


def test_truncated_gzip(tmp_path: Path) -> None:
    path = write(tmp_path / "c4.json.gz", [record(f"text {i * 7919**5}") for i in range(2000)])
    path.write_bytes(path.read_bytes()[:-5000])
    message = refused(path)
    assert "truncated after line" in message
    assert int(message.split("after line ")[1].split(":")[0]) > 100


def test_damaged_gzip(tmp_path: Path) -> None:
    path = write(tmp_path / "c4.json.gz", [record(f"text {i * 7919**5}") for i in range(2000)])
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 50] = bytes(50)
    path.write_bytes(content)
    refused(path)
    path.write_bytes(b"this is no gzip file")
    assert "damaged gzip data" in refused(path)


def test_ids_over_the_models_vocabulary_name_file_line_and_id(tmp_path: Path) -> None:
    path = write(tmp_path / "c4.jsonl", [record("a")])
    tokenizer = load_tokenizer(TokenizerPlan())
    with pytest.raises(DataError) as caught:
        build_dataset(DataPlan(dataset="c4", path=str(path), seq_len=8), tokenizer, vocab_size=2049)
    assert f"{path}, line 1: token id 2049 is outside the model's vocabulary of 2049 (the tokenizer has 2304)" in str(
        caught.value
    )
    build_dataset(DataPlan(dataset="c4", path=str(path), seq_len=8), tokenizer, vocab_size=2050)


def test_bundled_folders_hold_nothing_but_shards() -> None:
    for folder in BUNDLED.values():
        assert all(file.name.endswith(".json.gz") for file in folder.iterdir())
