"""Tokenizing with several threads: the same tokens, the same fingerprint, the same first error."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.texts import write_texts
from titanlite.data import DataError, tokenize_files
from titanlite.data.text_files import BUNDLED, Record, iter_records, list_files
from titanlite.data.tokenize_files import tokenize
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, Tokenizer, load_tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import TiktokenTokenizer, parse_ranks

TOKENIZER = load_tokenizer()
RANKS = parse_ranks(BUNDLED_TOKENIZER.read_bytes(), BUNDLED_TOKENIZER)
TEXTS = [f"the number {n}" for n in range(40)]


def tokenizing_threads() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("titanlite-tokenize")
    ]


def encoding(encode: Callable[[Tokenizer, str], np.ndarray | None]) -> Tokenizer:
    """The bundled tokenizer, with the array of `encode` for texts for which it gives one."""

    class Changed(TiktokenTokenizer):
        def encode_document(self, text: str) -> np.ndarray:
            ids = encode(self, text)
            return super().encode_document(text) if ids is None else ids

    return Changed(RANKS)


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_give_the_same_corpus_as_the_plain_way(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list_files(BUNDLED["c4_validation"])
    one = tokenize(files, TOKENIZER, TOKENIZER.vocab_size)
    assert one.tokens.tolist() == [
        i for r in iter_records(files) for i in TOKENIZER.encode(r.text, bos=True, eos=True)
    ]
    monkeypatch.setattr(tokenize_files, "_CHUNK", 2000)
    many = tokenize(files, TOKENIZER, TOKENIZER.vocab_size, workers)
    assert np.array_equal(many.tokens, one.tokens)
    assert np.array_equal(many.offsets, one.offsets)
    assert (many.tokens.dtype, many.offsets.dtype) == (np.uint16, np.int64)
    assert (many.fingerprint, many.pad_id, many.files) == (one.fingerprint, one.pad_id, one.files)
    assert tokenizing_threads() == []


@pytest.mark.parametrize(("workers", "chunk"), [(0, 100), (3, 1), (3, 1 << 20)])
@pytest.mark.parametrize(
    ("marks", "raw", "first"),
    [
        ([30], {12: "{"}, "a.jsonl, line 12: not valid JSON"),
        ([11], {12: "{"}, "a.jsonl, line 11: token id 3000 is outside"),
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
    """A "!" has an id beyond the vocabulary, and all other texts are slow."""

    def encode(tokenizer: Tokenizer, text: str) -> np.ndarray | None:
        if "!" in text:
            return np.array([tokenizer.bos_id, 3000, tokenizer.eos_id])
        threading.Event().wait(0.002)
        return None

    monkeypatch.setattr(tokenize_files, "_CHUNK", chunk)
    texts = [text + "!" * (n in marks) for n, text in enumerate(TEXTS, start=1)]
    with pytest.raises(DataError) as caught:
        tokenize(
            [write_texts(tmp_path / "a.jsonl", texts, raw)],
            encoding(encode),
            TOKENIZER.vocab_size,
            workers,
        )
    assert first in str(caught.value)
    assert tokenizing_threads() == []


def _interrupted(files: list[Path]) -> Iterator[Record]:
    yield from itertools.islice(iter_records(files), 2)
    raise KeyboardInterrupt


def _fails(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("tokenizer", "read", "error"),
    [(TOKENIZER, _interrupted, KeyboardInterrupt), (encoding(_fails), iter_records, MemoryError)],
)
def test_threads_end_with_an_interrupt_or_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Tokenizer,
    read: object,
    error: type[BaseException],
) -> None:
    monkeypatch.setattr(tokenize_files, "_CHUNK", 1)
    monkeypatch.setattr(tokenize_files, "iter_records", read)
    with pytest.raises(error):
        tokenize([write_texts(tmp_path / "a.jsonl", TEXTS)], tokenizer, TOKENIZER.vocab_size, 3)
    assert tokenizing_threads() == []
