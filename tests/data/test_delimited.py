"""CSV and TSV with a header: the rows that their own tools write, exact resumes, and bad files."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
import zstandard
from msgspec.structs import replace

from tests.support.hub_server import HubServer
from tests.support.same_batches import check_ranks_and_resumes
from titanlite.cli import main as cli
from titanlite.config.data_sections import Data
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.formats import iter_rows
from titanlite.data.records import Columns
from titanlite.data.text import build_dataset
from titanlite.data.text_files import iter_records
from titanlite.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
#: Texts that a field of CSV must quote, or that look like a border.
TEXTS = [
    "plain",
    "",
    "a, b;c\td",
    "two\nlines",
    "two\r\nlines\n\n",
    'he said "no", twice ""',
    '"',
    '"quoted"',
    " spaces ",
    "NA",
    "null",
    "é 日本 🙂",
    "#",
    "1.5",
    "x" * 3000,
    'q"' * 2000,
    "\n" * 40,
]
TABLE = [{"id": str(n), "body": text, "ask": f"ask {n},\n"} for n, text in enumerate(TEXTS * 3)]
COLUMNS = Columns("body", "ask")


def by_csv(path: Path, rows: list[dict[str, str]], **options: Any) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), **options)
        writer.writeheader()
        writer.writerows(rows)


def by_pyarrow(path: Path, rows: list[dict[str, str]]) -> None:
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), path)


def by_pandas(path: Path, rows: list[dict[str, str]], **options: Any) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(rows).to_csv(path, index=False, **options)


def by_datasets(path: Path, rows: list[dict[str, str]]) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).to_csv(path)


def packed(path: Path, pack: Any) -> None:
    by_csv(path, TABLE)
    path.write_bytes(pack(path.read_bytes()))


WRITERS = {
    "csv.csv": by_csv,
    "all-quoted.csv": lambda path, rows: by_csv(path, rows, quoting=csv.QUOTE_ALL),
    "lines.csv": lambda path, rows: by_csv(path, rows, lineterminator="\n"),
    "tabs.tsv": lambda path, rows: by_csv(path, rows, dialect="excel-tab"),
    "semicolons.csv": lambda path, rows: by_csv(path, rows, delimiter=";"),
    "pyarrow.csv": by_pyarrow,
    "pandas.csv": by_pandas,
    "pandas.tsv": lambda path, rows: by_pandas(path, rows, sep="\t"),
    "bom.csv": lambda path, rows: by_pandas(path, rows, encoding="utf-8-sig"),
    "datasets.csv": by_datasets,
    "a.csv.gz": lambda path, _: packed(path, gzip.compress),
    "a.csv.zst": lambda path, _: packed(path, zstandard.compress),
}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_those_that_the_tool_wrote_from_any_start(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path, TABLE)
    expected = [(path, n, row["body"], row["ask"]) for n, row in enumerate(TABLE, 1)]
    assert list(iter_records([path], COLUMNS)) == expected
    for start in (1, 16, 17, 50, 51, 60):
        with path.open("rb") as file:
            assert list(iter_rows(file, path, "auto", COLUMNS, start)) == expected[start:]


def test_quotes_within_a_field_are_where_pyarrow_sees_them(tmp_path: Path) -> None:
    """No writer makes such quotes."""
    pieces = ['a"b', '"a""b"', '"c\nd"', "e", '""', '"x"y', " ", '5" disk', '"n,m"', '"""q"""']
    rows = [f"{one},{two}" for one in pieces for two in pieces]
    content = "text,other\n" + "\n".join(rows)
    path = tmp_path / "a.csv"
    path.write_text(content)
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    expected = pyarrow.csv.read_csv(
        path,
        parse_options=options,
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={"text": pa.string()}, strings_can_be_null=False
        ),
    )["text"].to_pylist()
    assert len(expected) == 100
    assert [one.text for one in iter_records([path])] == expected


def test_lines_may_end_with_a_carriage_return_as_in_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for content in ("text,id\ra,1\rb,2\r", "text,id\na,1\rb,2\r\n"):
        path.write_bytes(content.encode())
        expected = pyarrow.csv.read_csv(path)["text"].to_pylist()
        assert [one.text for one in iter_records([path])] == expected == ["a", "b"]


def test_a_row_may_be_longer_than_blocks_and_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["short", "é\n" * 2_000_000, "end"]
    path = tmp_path / "a.csv"
    by_csv(path, [{"text": text} for text in texts])
    assert [one.text for one in iter_records([path])] == texts
    monkeypatch.setattr("titanlite.data.delimited._LONGEST", 1 << 20)
    with pytest.raises(DataError, match=r"a\.csv, row 2: field larger .*fields of more than 1 MB"):
        list(iter_records([path]))


BAD = [
    ('5" size,words\n1,a\n2,b\n', r"the header: no column 'text' \(5\" size, words\); name"),
    ("Hello world,3\nb,4\n", r": the header: no column 'text' \(Hello world, 3\); name the field"),
    ("text,id\na,1\nb\nc,3\n", r', row 2: 1 fields, and the header has 2: "b"; put a field'),
    ("text,id\na,1\n\nb,2,more\n", r', row 2: 3 fields, .*: "b,2,more"; put a field that holds'),
    ('text,id\na,1\n"b,2\nc,3\n', r', row 2: the file ends within a quoted field of \["b,2\\nc,3'),
    ("text,id,text\na,1,b\n", r"the header names two columns 'text'"),
    (
        b"text,id\na,1\ncaf\xe9,2\n",
        r", row 2: the field text holds \\udce9 at .*of CSV: a byte that is not",
    ),
    (b"t\xe9xt,id\na,1\n", r"the header: no column 'text' \(t\?xt, id\)"),
    ("text,id\na,1\n".encode("utf-16"), r"is a file of another kind; .* in UTF-8"),
    ("", r"no records in .*: the files are empty"),
    ("\n\r\n", r"no records in .*: the files are empty"),
    ("text,id\n", r"no records in .*: the files are empty"),
]


@pytest.mark.parametrize(("content", "said"), BAD)
def test_bad_files_are_named_with_their_row(
    tmp_path: Path, content: str | bytes, said: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=f"a.csv.*{said}|^{said}"):
        list(iter_records([path]))


def test_a_truncated_file_is_refused_after_its_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    rows = [{"text": f"{n} {os.urandom(2000).hex()}"} for n in range(1000)]
    by_csv(path, rows)
    path.write_bytes(gzip.compress(path.read_bytes())[:-20])
    with pytest.raises(DataError, match=r"truncated after row [1-9]\d+"):
        list(iter_records([path]))


def test_fields_that_are_not_read_may_hold_anything(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,name,name\na,\xff,1\nb,\xfe,2\n")
    assert [one.text for one in iter_records([path])] == ["a", "b"]


def write_parts(folder: Path) -> Path:
    """Files of both kinds of delimiters with 90 texts of two lines, and 30 of one."""
    folder.mkdir(exist_ok=True)
    for part in range(4):
        rows = [{"n": str(n), "text": f"part {part}\n{n}, {'w ' * (n % 9)}"} for n in range(30)]
        if part % 2:
            by_csv(folder / f"{part}.tsv", rows, dialect="excel-tab")
        else:
            by_csv(folder / f"{part}.csv", rows)
    return folder


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("data", [Data(), Data(streaming=True, lanes=4, shuffle_buffer=16)])
def test_ranks_and_resumes_see_the_batches_of_json_lines(tmp_path: Path, data: Data) -> None:
    folder = write_parts(tmp_path / "csv")
    (tmp_path / "json").mkdir()
    for path in sorted(folder.iterdir()):
        lines = [json.dumps({"text": one.text}) + "\n" for one in iter_records([path])]
        (tmp_path / "json" / path.name).write_text("".join(lines))

    def steps(name: str, kind: str) -> Any:
        training = Training(dataset_path=f"{tmp_path}/{name}/*", seq_len=8)
        forced = replace(data, format=kind)
        return check_ranks_and_resumes(
            lambda: build_dataset(training, forced, TOKENIZER, TOKENIZER.vocab_size)
        )

    assert steps("csv", "auto") == steps("json", "json")


def test_prompts_urls_and_prepared_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"q": f"Question {n}?\n", "a": f' "{n}", yes'} for n in range(40)]
    by_csv(tmp_path / "chat.csv", rows)
    by_csv(tmp_path / "chat.csv.gz", rows)
    (tmp_path / "chat.csv.gz").write_bytes(gzip.compress((tmp_path / "chat.csv").read_bytes()))
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["--prompt-key", "q", "--completion-key", "a", "--workers", "1"]
    out = tmp_path / "out"
    words = ["data", "prepare", str(tmp_path / "chat.csv"), "--out", str(out), *keys]
    assert cli.main([*words, "--tokenizer=bundled"]) == 0
    data = Data(shuffle=False, prompt_key="q", completion_key="a", streaming=False)

    def labels(path: object) -> list[list[int]]:
        training = Training(dataset_path=str(path), seq_len=16, epochs=1)
        found = build_dataset(training, data, TOKENIZER, TOKENIZER.vocab_size)
        return [found.sequence(n).labels.tolist() for n in range(found.total_sequences or 0)]

    pytest.importorskip("aiohttp")
    with HubServer(tmp_path) as server:
        urls = [f"{server.url}/chat.csv", f"{server.url}/chat.csv.gz"]
        found = [labels(one) for one in [*urls, tmp_path / "chat.csv", out]]
    assert found == [labels(tmp_path / "chat.jsonl")] * 4


def test_conversations_are_json_in_a_field(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": 'Say "yes".'}]
    by_csv(tmp_path / "a.csv", [{"messages": json.dumps(chat)}])
    by_csv(tmp_path / "b.csv", [{"messages": str(chat)}])
    data = Data(messages_key="messages", chat_template="plain")

    def text(name: str) -> str:
        training = Training(dataset_path=str(tmp_path / name), seq_len=8, epochs=1)
        rows = build_dataset(training, data, TOKENIZER, TOKENIZER.vocab_size)
        assert rows.corpus is not None
        return TOKENIZER.decode(rows.corpus.read(0, rows.corpus.size).tolist())

    assert re.sub(r"<\|\w+\|>", "", text("a.csv")) == 'User: Hi?\nAssistant: Say "yes".'
    with pytest.raises(DataError, match=r"b\.csv, row 1: the field 'messages' must hold JSON"):
        text("b.csv")
