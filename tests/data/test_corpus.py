"""Tokenizing with several threads: the same tokens, the same fingerprint, the same first error."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from titanlite.config.plans import TokenizerPlan
from titanlite.data import corpus as corpus_module
from titanlite.data import load_tokenizer
from titanlite.data.corpus import tokenize
from titanlite.data.errors import DataError
from titanlite.data.sources import BUNDLED, Record, iter_records, list_files
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, Tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import read_ranks

TOKENIZER = load_tokenizer(TokenizerPlan())


def write(path: Path, texts: list[str], raw: dict[int, str] | None = None) -> Path:
    """Records of `texts`; raw: lines by number, from 1, that take the place of a record."""
    lines = [(raw or {}).get(n, json.dumps({"text": text})) for n, text in enumerate(texts, start=1)]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def tokenizing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("titanlite-tokenize")]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_threads_give_the_same_corpus(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = list_files(BUNDLED["c4_validation"])
    one = tokenize(files, TOKENIZER, TOKENIZER.vocab_size)
    monkeypatch.setattr(corpus_module, "_CHUNK", 2000)
    many = tokenize(files, TOKENIZER, TOKENIZER.vocab_size, workers)
    assert np.array_equal(many.tokens, one.tokens) and many.tokens.dtype == one.tokens.dtype == np.uint16
    assert np.array_equal(many.offsets, one.offsets) and many.offsets.dtype == one.offsets.dtype == np.int64
    assert (many.fingerprint, many.pad_id, many.files) == (one.fingerprint, one.pad_id, one.files)
    assert tokenizing_threads() == []


def test_the_plain_way_gives_the_same_tokens() -> None:
    files = list_files(BUNDLED["c4_validation"])
    expected = [i for r in iter_records(files) for i in TOKENIZER.encode(r.text, bos=True, eos=True)]
    assert tokenize(files, TOKENIZER, TOKENIZER.vocab_size, 2).tokens.tolist() == expected


@pytest.mark.parametrize("kind", ["tiktoken", "sentencepiece"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "plain",
        "  two  spaces ",
        "<|end_of_text|> and <s>",
        "Ähre 語 🦉\n\n",
        "lone \ud800 half",
        "ab " * 20_000,
    ],
)
def test_a_document_as_an_array_has_the_ids_of_the_list(kind: str, text: str) -> None:
    tokenizer = load_tokenizer(TokenizerPlan(bundled=kind))  # type: ignore[arg-type]
    document = tokenizer.encode_document(text)
    assert document.dtype == np.int64
    assert document.tolist() == tokenizer.encode(text, bos=True, eos=True)


def test_documents_are_tokenized_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads meet inside the tokenizer; with one, the first would wait for ever."""
    monkeypatch.setattr(corpus_module, "_CHUNK", 1)
    meeting = threading.Barrier(2, timeout=20)

    class Meeting(type(TOKENIZER)):  # type: ignore[misc]
        def encode_document(self, text: str) -> np.ndarray:
            meeting.wait()
            return super().encode_document(text)

    files = [write(tmp_path / "a.jsonl", ["one", "two", "three", "four"])]
    tokenizer = Meeting(read_ranks(BUNDLED_TOKENIZER))
    found = tokenize(files, tokenizer, tokenizer.vocab_size, 2)
    assert np.array_equal(found.tokens, tokenize(files, TOKENIZER, TOKENIZER.vocab_size).tokens)


TEXTS = [f"the number {n}" for n in range(40)]


class Marked(type(TOKENIZER)):  # type: ignore[misc]
    """Gives a "!" an id beyond the vocabulary, and is slow about all else."""

    def encode_document(self, text: str) -> np.ndarray:
        if "!" in text:
            return np.array([self.bos_id, 3000, self.eos_id])
        threading.Event().wait(0.002)
        return super().encode_document(text)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    ("marks", "raw", "first"),
    [
        ([9, 30], {}, "a.jsonl, line 9: token id 3000 is outside"),
        ([30], {12: "{"}, "a.jsonl, line 12: not valid JSON"),
        ([11], {12: "{"}, "a.jsonl, line 11: token id 3000 is outside"),
        ([], {12: '{"txt": ""}', 14: "{"}, "a.jsonl, line 12: the key 'text' is missing"),
    ],
)
def test_the_first_error_in_the_file_is_the_one_that_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    chunk: int,
    marks: list[int],
    raw: dict[int, str],
    first: str,
) -> None:
    monkeypatch.setattr(corpus_module, "_CHUNK", chunk)
    texts = [text + "!" * (n in marks) for n, text in enumerate(TEXTS, start=1)]
    file = write(tmp_path / "a.jsonl", texts, raw)
    with pytest.raises(DataError) as caught:
        tokenize([file], Marked(read_ranks(BUNDLED_TOKENIZER)), TOKENIZER.vocab_size, workers)
    assert first in str(caught.value)
    assert tokenizing_threads() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_no_records_is_an_error(tmp_path: Path, workers: int) -> None:
    with pytest.raises(DataError, match="no records in"):
        tokenize([write(tmp_path / "a.jsonl", [])], TOKENIZER, TOKENIZER.vocab_size, workers)


def _interrupted(files: list[Path]) -> Iterator[Record]:
    yield from itertools.islice(iter_records(files), 2)
    raise KeyboardInterrupt


def _worker_fails() -> Tokenizer:
    class Failing(type(TOKENIZER)):  # type: ignore[misc]
        def encode_document(self, text: str) -> np.ndarray:
            raise MemoryError

    return Failing(read_ranks(BUNDLED_TOKENIZER))


@pytest.mark.parametrize(
    ("tokenizer", "read", "error"),
    [(lambda: TOKENIZER, _interrupted, KeyboardInterrupt), (_worker_fails, iter_records, MemoryError)],
)
def test_threads_end_with_an_interrupt_or_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Callable[[], Tokenizer],
    read: Callable[[list[Path]], Iterator[Record]],
    error: type[BaseException],
) -> None:
    monkeypatch.setattr(corpus_module, "_CHUNK", 1)
    monkeypatch.setattr(corpus_module, "iter_records", read)
    with pytest.raises(error):
        tokenize([write(tmp_path / "a.jsonl", TEXTS)], tokenizer(), TOKENIZER.vocab_size, 3)
    assert tokenizing_threads() == []
