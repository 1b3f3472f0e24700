"""Tokens on disk: used when they are those of this text, and never in the way."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import environment
from tests.support.texts import write_texts
from titanlite.config.data_sections import Data, Validation
from titanlite.config.sections import Training
from titanlite.data import DataError, token_cache
from titanlite.data.text import TextReader, build_dataset
from titanlite.data.token_cache import load_corpus
from titanlite.data.tokenize_files import Corpus, tokenize
from titanlite.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "text.jsonl", [f"document {n} of some" for n in range(50)])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of threads of each tokenization, as they happen."""
    calls: list[int] = []

    def counting(
        files: Any, tokenizer: Any, vocab_size: int, workers: int = 0, *rest: Any
    ) -> Corpus:
        calls.append(workers)
        return tokenize(files, tokenizer, vocab_size, workers, *rest)

    monkeypatch.setattr(token_cache, "tokenize", counting)
    yield calls


def load(
    text: Path, cache: Path | str, vocab_size: int = TOKENIZER.vocab_size, workers: int | None = 0
) -> Corpus:
    return load_corpus([text], TOKENIZER, vocab_size, workers=workers, cache=str(cache))


def same(a: Corpus, b: Corpus) -> bool:
    assert (a.tokens.dtype, a.offsets.dtype) == (b.tokens.dtype, b.offsets.dtype)
    assert (a.fingerprint, a.pad_id, a.files) == (b.fingerprint, b.pad_id, b.files)
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.offsets, b.offsets)


def is_mapped(corpus: Corpus) -> bool:
    return isinstance(corpus.tokens.base, np.memmap) and isinstance(corpus.offsets.base, np.memmap)


def names(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir())


def test_a_second_start_reads_no_text(text: Path, cache: Path, counted: list[int]) -> None:
    plain = tokenize([text], TOKENIZER, TOKENIZER.vocab_size)
    for _ in range(3):
        found = load(text, cache)
        assert same(found, plain)
        assert is_mapped(found)
        assert counted == [0]
    assert names(cache) == [".tokens"]
    with pytest.raises(ValueError, match="read-only"):
        found.tokens[0] = 1


def test_another_text_vocabulary_or_time_is_another_file(
    text: Path, cache: Path, counted: list[int]
) -> None:
    load(text, cache)
    seen = text.stat()
    content = text.read_text()
    text.write_text(content.replace("some", "same"))  # as long, and set back in time
    os.utime(text, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    found = load(text, cache)
    assert same(found, tokenize([text], TOKENIZER, TOKENIZER.vocab_size))
    assert load(text, cache, 128_256).tokens.dtype == np.uint32
    assert len(counted) == 3
    assert names(cache) == [".tokens"] * 3
    with pytest.raises(DataError, match=r"text.jsonl, line 1: token id \d+ is outside"):
        load(text, cache, 300)
    with pytest.raises(DataError, match="gone.jsonl: cannot be read"):
        load(text.with_name("gone.jsonl"), cache)


def test_paths_start_at_the_home_or_at_the_working_directory(
    text: Path, tmp_path: Path, logged: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert is_mapped(load(text, "~/tokens"))
    assert names(tmp_path / "home" / "tokens") == [".tokens"]
    assert is_mapped(load(text, "here/tokens"))
    assert names(Path("here/tokens")) == [".tokens"]
    for unusable in ("~no-such-user/tokens", str(text / "below-a-file")):
        found = load(text, unusable)
        assert same(found, tokenize([text], TOKENIZER, TOKENIZER.vocab_size))
        assert not is_mapped(found)
        assert "data.token_cache:" in logged()
        assert unusable in logged()
    assert os.listdir() == ["here"]


def test_off_and_small_texts_leave_no_file_and_auto_takes_no_folder_of_somebody_else(
    text: Path,
    tmp_path: Path,
    counted: list[int],
    logged: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for setting in ("off", "auto"):
        assert not is_mapped(load(text, setting))
    assert list(temporary.iterdir()) == []
    assert not Path("off").exists()
    assert not Path("auto").exists()
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


def test_threads_follow_cores_and_ranks(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, counted: list[int]
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    load(text, "off", workers=None)
    load(text, cache, workers=None)  # the other ranks wait for this one
    load(text, "off", workers=5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "12")
    load(text, "off", workers=None)
    assert counted == [3, 8, 5, 0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(DataError, match="LOCAL_WORLD_SIZE is 'two'"):
        load(text, "off", workers=None)


def test_sections_reach_the_cache(text: Path, cache: Path, counted: list[int]) -> None:
    data = Data(num_workers=2, token_cache=str(cache))
    size = TOKENIZER.vocab_size
    assert is_mapped(
        build_dataset(Training(dataset_path=str(text), seq_len=4), data, TOKENIZER, size).corpus
    )
    held_out = Validation(dataset_path=str(text))
    assert is_mapped(TextReader(data, TOKENIZER, size).held_out(held_out, 4)[""].corpus)
    assert counted == [2]


PROGRAM = """
import logging, resource, sys, time
from pathlib import Path
from titanlite.data import token_cache
from titanlite.data.tokenize_files import tokenize
from titanlite.data.tokenizer import load_tokenizer

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

def slow(*arguments):
    print("tokenizing", flush=True)
    time.sleep({"hang": 600.0, "slow": 1.0}.get(sys.argv[3], 0.0))
    return tokenize(*arguments)

token_cache.tokenize = slow
tokenizer = load_tokenizer()
if sys.argv[3] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4500, resource.RLIM_INFINITY))
text = [Path(sys.argv[1])]
size = tokenizer.vocab_size
corpus = token_cache.load_corpus(text, tokenizer, size, workers=0, cache=sys.argv[2])
print("sum", int(corpus.tokens.sum()), type(corpus.tokens.base).__name__, flush=True)
"""


@pytest.mark.slow
def test_processes_that_wait_fill_the_disk_or_are_killed(text: Path, cache: Path) -> None:
    def start(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(text), str(cache), what]
        return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)

    out, _ = start("full").communicate(timeout=600)
    assert "tokens cannot be saved" in out
    assert "File too large" in out
    assert "NoneType" in out
    assert names(cache) == []
    with start("hang") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tokenizing\n"
        process.send_signal(signal.SIGKILL)
    assert names(cache) == [".lock"]  # it holds nobody up
    printed = [process.communicate(timeout=600)[0] for process in [start("slow"), start("slow")]]
    total = int(tokenize([text], TOKENIZER, TOKENIZER.vocab_size).tokens.sum())
    assert all(f"sum {total} memmap" in out for out in printed)
    assert sum("tokenizing" in out for out in printed) == 1
    assert names(cache) == [".tokens"]


def test_a_wait_for_another_process_is_told_and_ends(
    text: Path, cache: Path, logged: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
