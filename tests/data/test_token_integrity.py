"""Prepared tokens that were changed: found at the start, and when a part is first read."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.processes import titanlite
from tests.support.token_folders import SIZE, TOKENIZER, write_prepared
from titanlite.data import DataError, token_integrity
from titanlite.data.damaged_tokens_callback import TokenHashes
from titanlite.data.token_files import TokenFiles, TokenKeys, open_tokens
from titanlite.data.token_paths import INDEX
from titanlite.dist.signals import StopSignal


def prepared(folder: Path, masked: int = 2) -> Path:
    return write_prepared(folder, [[30, 20, 50]] * 3, masked)


def flip(file: Path, place: int = 20) -> None:
    """Change a byte, and nothing else that a file system tells quickly."""
    content = bytearray(file.read_bytes())
    seen = file.stat()
    content[place] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def opened(folder: Path, records: Path | None) -> TokenFiles:
    return open_tokens(str(folder), TOKENIZER, SIZE, keys=TokenKeys(records=records))


def begin(files: TokenFiles, first: int, end: int) -> None:
    """Read tokens; the thread may be faster than the rest of the reading."""
    with suppress(DataError):
        files.read(first, end)


def settled(files: TokenFiles) -> int:
    assert files.check is not None
    return files.check.settle(300.0)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose hashes are computed."""
    names: list[str] = []

    def digest(path: Path) -> str:
        names.append(path.name)
        return hash_of(path)

    hash_of = token_integrity.hash_of
    monkeypatch.setattr(token_integrity, "hash_of", digest)
    return names


@pytest.mark.parametrize("suffix", ["tokens", "offsets", "targets"])
def test_a_flipped_byte_ends_the_run_when_its_part_is_read(tmp_path, suffix):
    folder = prepared(tmp_path / "a")
    damaged = folder / f"part-1.{suffix}"
    # Documents of 30 and 20 tokens become 31 and 19: in order, and wrong.
    flip(damaged, 8)
    files = opened(folder, tmp_path / "records")
    files.read(0, 100)
    assert settled(files) == 0, "the first part is whole"
    begin(files, 90, 110)
    with pytest.raises(
        DataError,
        match=rf"part-1\.{suffix} is damaged: its content does not fit its hash .*first read at",
    ):
        settled(files)
    with pytest.raises(DataError, match="`titanlite data prepare` with the arguments"):
        files.read(0, 10)


def test_a_part_is_checked_when_it_is_read_and_once_on_a_machine(tmp_path, read, monkeypatch):
    folder = prepared(tmp_path / "a", masked=0)
    records = tmp_path / "records"
    records.mkdir()
    files = opened(folder, records)
    assert read == []
    files.read(10, 20)
    assert settled(files) == 0
    assert sorted(read) == ["part-0.offsets", "part-0.tokens"]
    files.read(0, 300)
    assert settled(files) == 0
    assert len(read) == 6
    again = opened(folder, records)
    again.read(0, 300)
    assert settled(again) == 0 and len(read) == 6, "the records tell"
    flip(folder / "part-2.tokens")
    changed = opened(folder, records)
    begin(changed, 0, 300)
    with pytest.raises(DataError, match=r"part-2\.tokens is damaged"):
        settled(changed)
    assert read[6:] == ["part-2.tokens"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    other = opened(folder, records)
    other.read(0, 10)
    assert other.check is None, "the first rank of a machine checks for all"


def test_offsets_and_sizes_are_checked_at_the_start(tmp_path):
    folder = prepared(tmp_path / "a")
    (folder / "part-1.offsets").write_bytes(np.array([0, 60, 50, 100], dtype="<i8").tobytes())
    with pytest.raises(
        DataError,
        match=r"part-1\.offsets is damaged: document 1 \(from 0\) begins at 60 and ends before",
    ):
        opened(folder, None)
    index = json.loads((folder / INDEX).read_text())
    for change, said in (
        ({"name": "../part-1"}, "names '../part-1', which is no part of this folder"),
        ({"bytes": None}, "index.json is damaged"),
    ):
        parts = [index["parts"][0] | change, *index["parts"][1:]]
        (folder / INDEX).write_text(json.dumps({**index, "parts": parts}))
        with pytest.raises(DataError, match=said):
            opened(folder, None)


def test_a_save_waits_for_the_parts_that_were_read(tmp_path):
    folder = prepared(tmp_path / "a")
    flip(folder / "part-0.tokens", 5)
    files = opened(folder, None)
    assert files.check is not None
    callback = TokenHashes([files.check])
    trainer: Any = SimpleNamespace(stop=StopSignal())
    callback.on_phase(trainer, "save")
    begin(files, 0, 10)
    with pytest.raises(DataError, match=r"part-0\.tokens is damaged"):
        callback.on_phase(trainer, "save")


@pytest.mark.slow
def test_a_run_ends_before_a_checkpoint_holds_damaged_tokens(tmp_path):
    folder = prepared(tmp_path / "a", masked=0)
    out = tmp_path / "run"
    flip(folder / "part-1.tokens", 5)
    words = ["debug_model.toml", "--training.dataset_path", folder, "--job.dump_folder", out]
    words += ["--training.steps=2", "--training.seq_len=16", "--training.batch_size=8"]
    words += ["--checkpoint.enable_checkpoint", "--checkpoint.interval=1", "--no-validation.enable"]
    done = titanlite("train", *words, "--data.token_cache", tmp_path / "cache")
    assert done.returncode == 2
    assert "part-1.tokens is damaged: its content does not fit its hash" in done.stderr
    assert not list(out.glob("checkpoint/step-*/manifest.json"))
