"""Tokens on disk: used when they are those of this text, and never in the way."""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.texts import write_texts
from tests.support.token_folders import SIZE, TOKENIZER
from titanlite.data import DataError, token_cache, tokenize_files
from titanlite.data.text_files import BUNDLED, Record, iter_records, list_files
from titanlite.data.token_cache import load_corpus
from titanlite.data.tokenize_files import Corpus, tokenize
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, Tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import TiktokenTokenizer, parse_ranks


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "text.jsonl", [f"document {n} of some" for n in range(50)])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads of each tokenization, as they happen."""
    calls: list[int] = []

    def counting(*arguments: Any) -> Corpus:
        calls.append(arguments[3])
        return tokenize(*arguments)

    monkeypatch.setattr(token_cache, "tokenize", counting)
    return calls


def load(text: Path, cache: Path | str, vocab_size: int = SIZE) -> Corpus:
    return load_corpus([text], TOKENIZER, vocab_size, workers=0, cache=str(cache))


def same(a: Corpus, b: Corpus) -> bool:
    assert (a.tokens.dtype, a.offsets.dtype) == (b.tokens.dtype, b.offsets.dtype)
    assert (a.fingerprint, a.pad_id, a.files) == (b.fingerprint, b.pad_id, b.files)
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.offsets, b.offsets)


def is_mapped(corpus: Corpus) -> bool:
    return isinstance(corpus.tokens.base, np.memmap) and isinstance(corpus.offsets.base, np.memmap)


def names(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir())


def test_a_second_start_reads_no_text(text, cache, counted):
    plain = tokenize([text], TOKENIZER, SIZE)
    for _ in range(2):
        found = load(text, cache)
        assert same(found, plain)
        assert is_mapped(found)
    assert counted == [0]
    assert names(cache) == [".tokens"]


def test_another_text_vocabulary_or_time_is_another_file(text, cache, counted):
    load(text, cache)
    seen = text.stat()
    content = text.read_text()
    text.write_text(content.replace("some", "same"))  # as long, and set back in time
    os.utime(text, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert same(load(text, cache), tokenize([text], TOKENIZER, SIZE))
    assert load(text, cache, 128_256).tokens.dtype == np.uint32
    assert len(counted) == 3
    assert names(cache) == [".tokens"] * 3
    with pytest.raises(DataError, match="gone.jsonl: cannot be read"):
        load(text.with_name("gone.jsonl"), cache)


@pytest.mark.parametrize("flipped", [0, 40, -1, None])
def test_a_damaged_file_is_replaced(text, cache, counted, flipped, logged):
    plain = load(text, "off")
    load(text, cache)
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    if flipped is None:
        del content[-2:]
    else:
        content[flipped] ^= 1
    path.write_bytes(content)
    assert same(load(text, cache), plain)
    assert "is damaged" in logged()
    assert same(load(text, cache), plain)
    assert len(counted) == 3


def test_a_path_starts_at_the_home_and_one_that_is_no_use_is_told(
    text, tmp_path, logged, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert is_mapped(load(text, "~/tokens"))
    assert names(tmp_path / "home" / "tokens") == [".tokens"]
    unusable = str(text / "below-a-file")
    assert not is_mapped(load(text, unusable))
    assert "data.token_cache:" in logged()
    assert unusable in logged()


def test_off_and_small_texts_leave_no_file_and_auto_takes_no_folder_of_somebody_else(
    text, tmp_path, counted, logged, monkeypatch
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for setting in ("off", "auto"):
        assert not is_mapped(load(text, setting))
    assert list(temporary.iterdir()) == []
    monkeypatch.setattr(token_cache, "AUTO_BYTES", text.stat().st_size)
    for _ in range(2):
        assert is_mapped(load(text, "auto"))
    (folder,) = temporary.iterdir()
    assert folder.name == f"titanlite-tokens-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(counted) == 3
    theirs = folder.rename(tmp_path / "theirs")
    folder.symlink_to(theirs)  # others may put a link into a shared folder
    assert not is_mapped(load(text, "auto"))
    assert "belongs to another user" in logged()


def test_a_wait_for_another_process_is_told_and_ends(text, cache, logged, monkeypatch):
    """The locks of two open files exclude each other, as those of two processes do."""
    load(text, cache)
    (tokens,) = cache.iterdir()
    tokens.unlink()
    monkeypatch.setattr(token_cache, "_LONGEST_WAIT", 0.5)
    monkeypatch.setattr(token_cache, "_REPORT_SECONDS", 0.2)
    with tokens.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another process has held .*\.lock for"):
            load(text, cache)
    assert logged().count("waiting for another process to tokenize the text") == 3
    assert load(text, cache).size > 0


def test_one_of_two_tokenizes_and_a_full_disk_leaves_no_file(
    text, cache, counted, logged, monkeypatch
):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: load(text, cache), range(2)))
    assert same(*found)
    assert all(map(is_mapped, found))
    assert len(counted) == 1
    assert names(cache) == [".tokens"]

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache, "sync", full)
    assert not is_mapped(load(text, cache, 128_256))
    assert "tokens cannot be saved in" in logged()
    assert names(cache) == [".tokens"]


# Tokenizing with several threads


RANKS = parse_ranks(BUNDLED_TOKENIZER.read_bytes(), BUNDLED_TOKENIZER)
TEXTS = [f"the number {n}" for n in range(40)]


def tokenizing_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("titanlite-tokenize")]


def encoding(encode: Callable[[Tokenizer, str], np.ndarray | None]) -> Tokenizer:
    """The bundled tokenizer, with the array of `encode` for texts for which it gives one."""

    class Changed(TiktokenTokenizer):
        def encode_document(self, text: str) -> np.ndarray:
            ids = encode(self, text)
            return super().encode_document(text) if ids is None else ids

    return Changed(RANKS)


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_give_the_same_corpus_as_the_plain_way(workers, monkeypatch):
    files = list_files(BUNDLED["c4_validation"])
    one = tokenize(files, TOKENIZER, SIZE)
    assert one.tokens.tolist() == [
        i for r in iter_records(files) for i in TOKENIZER.encode(r.text, bos=True, eos=True)
    ]
    monkeypatch.setattr(tokenize_files, "_CHUNK", 2000)
    many = tokenize(files, TOKENIZER, SIZE, workers)
    assert same(many, one)
    assert (many.tokens.dtype, many.offsets.dtype) == (np.uint16, np.int64)
    assert tokenizing_threads() == []


@pytest.mark.parametrize(("workers", "chunk"), [(0, 100), (3, 1), (3, 1 << 20)])
@pytest.mark.parametrize(
    ("marked", "first"),
    [
        (30, "a.jsonl, line 12: not valid JSON"),
        (11, "a.jsonl, line 11: token id 3000 is outside"),
    ],
)
def test_the_first_error_in_the_file_is_the_one_that_is_named(
    tmp_path, monkeypatch, workers, chunk, marked, first
):
    """A "!" has an id beyond the vocabulary, line 12 is cut, and all other texts are slow."""

    def encode(tokenizer, text):
        if "!" in text:
            return np.array([tokenizer.bos_id, 3000, tokenizer.eos_id])
        threading.Event().wait(0.002)
        return None

    monkeypatch.setattr(tokenize_files, "_CHUNK", chunk)
    texts = [text + "!" * (n == marked) for n, text in enumerate(TEXTS, start=1)]
    file = write_texts(tmp_path / "a.jsonl", texts, {12: "{"})
    with pytest.raises(DataError, match=first):
        tokenize([file], encoding(encode), SIZE, workers)
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
def test_threads_end_with_an_interrupt_or_an_error(tmp_path, monkeypatch, tokenizer, read, error):
    monkeypatch.setattr(tokenize_files, "_CHUNK", 1)
    monkeypatch.setattr(tokenize_files, "iter_records", read)
    with pytest.raises(error):
        tokenize([write_texts(tmp_path / "a.jsonl", TEXTS)], tokenizer, SIZE, 3)
    assert tokenizing_threads() == []
