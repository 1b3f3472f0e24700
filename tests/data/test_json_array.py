"""One JSON array of records, as many sets of instructions are published."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.same_batches import check_ranks_and_resumes
from titanlite.cli import main as cli
from titanlite.config.data_sections import Data
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.formats import iter_rows
from titanlite.data.text import build_dataset
from titanlite.data.text_files import iter_records
from titanlite.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
TEXTS = ["", "a", 'é "\\', "日本\n" * 30, "🙂", "]", "},{", "x" * 500] * 3
RECORDS = [{"text": text, "n": [n, -n / 7, None, True]} for n, text in enumerate(TEXTS)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii", [True, False])
def test_records_are_those_of_json_from_any_start(
    tmp_path: Path, indent: int | None, ascii: bool
) -> None:
    content = "\ufeff \n" + json.dumps(RECORDS, indent=indent, ensure_ascii=ascii) + "\n\n"
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(content.encode()))
    found = [(one.number, one.text) for one in iter_records([path])]
    assert found == list(enumerate(TEXTS, 1))
    for start in (1, 7, 23, 24):
        with path.open("rb") as file:
            assert [one.number for one in iter_rows(file, path, start=start)] == list(
                range(start + 1, 25)
            )


BAD = [
    ('[{"text": "a"}, {"text": "b}]', "a.json: not valid JSON .Unterminated string"),
    ('[{"text": "a"} {"text": "b"}]', r"a.json: not valid JSON .Expecting ',' delim"),
    ('[{"text": "a"}, {"text": "b"}', r"a.json: not valid JSON .Expecting ',' delim"),
    ('[{"text": "a"}]\n{"text": "b"}', "not valid JSON .Extra data.*; expected one array"),
    ('[{"text": "a"}, 5]', ", record 2: expected a text, or a table .* found int"),
    ('[{"text": "a"}, {"body": "b"}]', ", record 2: the key 'text' is missing"),
    ('[{"text": "a"}, {"text": "\udce9"}]', "a.json: not valid JSON .*codec can't decode"),
    ("[{" + '"a": [' * 100_000, "a.json: not valid JSON"),
    ("[ ]", "no records in"),
]


@pytest.mark.parametrize(("content", "said"), BAD)
def test_bad_arrays_are_named_with_the_record(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=said):
        list(iter_records([path]))


def test_an_array_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.data.formats._LONGEST_ARRAY", 1 << 20)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a" * (1 << 19)}, {"text": "a" * (1 << 19)}]))
    with pytest.raises(DataError, match="is read whole, and has more than 1 MB; cut it up"):
        list(iter_records([path]))


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_ranks_resumes_and_prepared_tokens_are_those_of_json_lines(
    tmp_path: Path, streaming: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"text": f"text {n} {'w ' * (n % 9)}"} for n in range(60)]
    for name in ("array", "lines"):
        (tmp_path / name).mkdir()
    for part in range(3):
        some = records[part::3]
        (tmp_path / f"array/{part}.json").write_text(json.dumps(some, indent=1))
        (tmp_path / f"lines/{part}.json").write_text("\n".join(map(json.dumps, some)))
    data = Data(streaming=streaming, lanes=3 if streaming else None, shuffle_buffer=12)
    steps = []
    fingerprints = []
    for name in ("array", "lines"):
        training = Training(dataset_path=str(tmp_path / name), seq_len=8)

        def make(training: Training = training) -> object:
            return build_dataset(training, data, TOKENIZER, TOKENIZER.vocab_size)

        steps.append(check_ranks_and_resumes(make))  # type: ignore[arg-type]
        out = tmp_path / f"out-{name}"
        words = ["data", "prepare", str(tmp_path / name), "--out", str(out), "--workers", "2"]
        words.append("--tokenizer=bundled")
        assert cli.main([*words, "--part-tokens", "50", "--format", "json"]) == 0
        fingerprints.append(json.loads((out / "index.json").read_text())["tokens"])
    assert steps[0] == steps[1]
    assert fingerprints[0] == fingerprints[1]
