"""Files of every kind: order of reading, and an error that names the place of every mistake."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from titanlite.data import DataError
from titanlite.data.formats import iter_rows
from titanlite.data.records import Columns
from titanlite.data.text_files import find_text, iter_records


def record(text: object) -> str:
    return json.dumps(
        {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}
    )


def write(path: Path, *texts: str, raw: str = "") -> Path:
    """Write records of these texts, and a line without a record at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = ("\n".join([*map(record, texts), raw])).encode("utf-8", "surrogateescape")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def texts(path: Path) -> list[str]:
    return [record.text for record in iter_records(path)]


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(iter_records(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_folder_is_read_in_order_of_names(tmp_path):
    write(tmp_path / "c4-02.json.gz", "e")
    (tmp_path / "c4-01.jsonl").write_text(f"{record('c')}\n\n{record('d')}")
    write(tmp_path / "c4-00.json", "a", "b")
    (tmp_path / "README.md").write_text("not a record")
    assert texts(tmp_path) == list("abcde")
    records = list(iter_records(tmp_path))
    assert [(r.file.name, r.number) for r in records][2:4] == [
        ("c4-01.jsonl", 1),
        ("c4-01.jsonl", 3),
    ]


def test_names_lead_to_the_bundled_text_unless_a_path_is_given(tmp_path):
    key = "validation.dataset_path"
    files = map(Path, find_text("c4_test", None, key).files)
    assert [file.parent.name for file in files] == ["train"] * 4
    file = write(tmp_path / "mine.jsonl", "a")
    assert find_text("c4_test", str(tmp_path), key).files == (str(file),)
    with pytest.raises(DataError, match=f'"c4_tset" is not bundled; set {key}'):
        find_text("c4_tset", None, key)


def test_missing_path_empty_folder_and_foreign_file(tmp_path):
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "holds no text; expected names in .json, .jsonl, " in refused(tmp_path)
    (tmp_path / "text.tar").write_bytes(b"a.txt" + bytes(100))
    assert "is a file of another kind" in refused(tmp_path / "text.tar")


def test_patterns_subfolders_and_splits(tmp_path):
    for name in ("b/2.jsonl", "b/1.jsonl", "a/3.jsonl", ".cache/4.jsonl"):
        write(tmp_path / name, name)
    assert texts(tmp_path) == ["a/3.jsonl", "b/1.jsonl", "b/2.jsonl"]
    assert texts(tmp_path / "*" / "[12]*") == ["b/1.jsonl", "b/2.jsonl"]
    (tmp_path / "b").rename(tmp_path / "test")
    said = refused(tmp_path)
    assert "2 files of JSON lines, split test, in subfolders: test/1.jsonl, test/2.jsonl" in said
    assert "1 file of JSON lines, in subfolders: a/3.jsonl" in said


def test_a_file_is_read_once_also_behind_links_and_by_two_stars(tmp_path):
    for name in ("text/a/1.jsonl", "text/a/b/a/2.jsonl", "elsewhere/3.jsonl"):
        write(tmp_path / name, Path(name).name)
    (tmp_path / "text/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text/a/above").symlink_to(tmp_path / "text")
    (tmp_path / "text/0").symlink_to(tmp_path / "text/a")
    assert texts(tmp_path / "text") == ["1.jsonl", "2.jsonl", "3.jsonl"]
    for link in ("text/a/above", "text/0", "text/link"):
        (tmp_path / link).unlink()
    assert texts(tmp_path / "text/**/a/**/*.jsonl") == ["1.jsonl", "2.jsonl"]


def make(path: Path, table: pa.Table) -> Path:
    """Write a table as the file of that name, in record batches and row groups of 100."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=100, write_page_checksum=True)
    elif path.suffix == ".arrow":
        new = pa.ipc.new_file if path.stem == "file" else pa.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    else:
        content = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        # Several members and frames are one stream.
        half = len(content) // 2
        path.write_bytes(pack(content[:half]) + pack(content[half:]))
    return path


NAMES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "stream.arrow", "file.arrow"]


@pytest.mark.parametrize("name", NAMES)
def test_each_kind_has_the_same_rows_from_any_start_under_any_name(tmp_path, name):
    asked = [str(i) for i in range(250)]
    texts = [f"text {i} é" for i in asked]
    path = make(tmp_path / name, pa.table({"id": range(250), "body": texts, "ask": asked}))
    path.rename(path := tmp_path / "unnamed")
    columns = Columns("body", "ask")
    expected = [(path, int(i) + 1, text, i) for i, text in zip(asked, texts, strict=True)]
    assert list(iter_records([path], columns)) == expected
    for start in (1, 99, 100, 230, 250):
        with open(path, "rb") as file:
            assert list(iter_rows(file, path, "auto", columns, start)) == expected[start:]
    assert "text_key" in refused(path)


@pytest.mark.parametrize("name", NAMES[1:4])
def test_a_truncated_or_damaged_file_is_refused_after_its_whole_rows(tmp_path, name):
    path = make(
        tmp_path / name, pa.table({"text": [f"{i} {os.urandom(200).hex()}" for i in range(1000)]})
    )
    content = path.read_bytes()
    path.write_bytes(content[:-2000])
    assert re.search("truncated after line|damaged after row 0", refused(path))
    middle = len(content) // 2
    flipped = bytes(byte ^ 255 for byte in content[middle : middle + 99])
    path.write_bytes(content[:middle] + flipped + content[middle + 99 :])
    # Damaged gzip data may become other text first.
    assert re.search(r": damaged after (line|row) \d+ |, line \d+: not valid JSON", refused(path))


def test_an_arrow_stream_without_its_end_is_refused(tmp_path):
    path = make(tmp_path / "a.arrow", pa.table({"text": [str(n) for n in range(200)]}))
    path.write_bytes(path.read_bytes()[:-8])
    assert re.search("damaged after row|truncated", refused(path))


def test_zstd_frames_to_skip_are_skipped(tmp_path):
    path = tmp_path / "unnamed"
    # pzstd writes the size of the next frame into one.
    skip = struct.pack("<III", 0x184D2A5F, 4, 99)
    a, b = (zstandard.compress(record(one).encode() + b"\n") for one in "ab")
    path.write_bytes(skip + skip + a + skip + b + skip)
    assert texts(path) == ["a", "b"]
    path.write_bytes(skip + a + skip[:-2])
    assert "truncated after line 1" in refused(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", None, "c"], ", row 2: the key 'text' must be a string, found NoneType"),
        (
            [1, 2],
            ", row 1: the key 'text' must be a string, found int: 1; name the field by "
            "data.text_key",
        ),
        (
            pa.array([b"a", b"\xff"]).cast(pa.binary()).view(pa.string()),
            ", rows 1 to 2: 'utf-8' codec can't decode",
        ),
    ],
)
def test_bad_columns_are_named_by_row(tmp_path, values, message):
    table = pa.table({"text": values})
    for name in NAMES[3:]:
        assert message in refused(make(tmp_path / name, table))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.json",
            b'[{"text": "a"}]',
            "found list; of an array `jq -c '.[]'`",
        ),
        ("a", b'[\n{"text": "a"}\n]', "Of an array `jq -c '.[]'` writes them"),
        ("a.CSV", b"text\na\n", "CSV is not read; write parquet: python -c"),
        ("a.tsv.gz", gzip.compress(b"text\na\n", mtime=0), "CSV is not read"),
        ("a.parquet", b"<!DOCTYPE html>", "is no parquet file; copy it again"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS"),
        ("a.md", "text\na\n".encode("utf-16"), "is a file of another kind"),
        ("a.txt", b"a\ncaf\xe9\n", ", line 2: not UTF-8"),
        ("a.txt", b"", "the files are empty"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refused(tmp_path / name)


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf{one}\r\n\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    assert [(r.number, r.text) for r in iter_records(tmp_path)] == [
        (1, "{one}\r\n\ntwo\n"),
        (1, "three"),
    ]


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
def test_a_bad_record_is_named_by_file_and_line(tmp_path, line, message):
    for name in ("a.jsonl", "a.json.gz"):
        found = refused(write(tmp_path / name, "a", "b", raw=line))
        assert "line 3: " in found
        assert message in found
