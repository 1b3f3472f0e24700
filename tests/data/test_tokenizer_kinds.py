"""Which kind of tokenizer a path holds, by its content, and what is said when it holds none."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import tokenizers

from titanlite.config.plans import TokenizerPlan
from titanlite.data.errors import DataError
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER, kind_of, load_tokenizer


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_tokenizer(TokenizerPlan(str(path)))
    assert str(caught.value).startswith(f"model.tokenizer_path: {path}")
    return str(caught.value)


def write_json(path: Path) -> Path:
    """A tokenizer.json of four words."""
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


def test_the_content_decides_and_the_name_does_not(tmp_path: Path) -> None:
    sizes = {}
    for source in (BUNDLED_TOKENIZER, BUNDLED_SENTENCEPIECE, write_json(tmp_path / "tokenizer.json")):
        path = tmp_path / f"{source.suffix[1:]}.bin"
        shutil.copy(source, path)
        tokenizer = load_tokenizer(TokenizerPlan(str(path)))
        sizes[kind_of(path.read_bytes(), path)] = (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    assert sizes == {"tiktoken": (2304, 2048, 2049), "sentencepiece": (2304, 1, 2), "tokenizer.json": (4, 0, 1)}


def test_both_bundled_ones_are_read_without_a_path() -> None:
    assert load_tokenizer(TokenizerPlan()).bos_id == 2048
    assert load_tokenizer(TokenizerPlan(bundled="sentencepiece")).bos_id == 1


def test_of_a_folder_the_json_is_read_before_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="titanlite")
    logging.getLogger("titanlite").addHandler(caplog.handler)
    try:
        shutil.copy(BUNDLED_SENTENCEPIECE, tmp_path / "tokenizer.model")
        assert load_tokenizer(TokenizerPlan(str(tmp_path))).vocab_size == 2304
        write_json(tmp_path / "tokenizer.json")
        assert load_tokenizer(TokenizerPlan(str(tmp_path))).vocab_size == 4
    finally:
        logging.getLogger("titanlite").removeHandler(caplog.handler)
    said = list(dict.fromkeys(record.getMessage() for record in caplog.records))
    assert said == [
        f"tokenizer: {tmp_path}/tokenizer.model (sentencepiece), 2,304 ids; BOS 1 and EOS 2 by the file",
        f"tokenizer: {tmp_path} holds tokenizer.json and tokenizer.model; the first is read",
        f"tokenizer: {tmp_path}/tokenizer.json (tokenizer.json), 4 ids; BOS 0 and EOS 1 by their usual names",
    ]


def test_a_folder_without_them_names_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tokenizer.json or tokenizer.model; give the file itself$"):
        load_tokenizer(TokenizerPlan(str(tmp_path)))
    shutil.copy(BUNDLED_TOKENIZER, tmp_path / "llama.tiktoken")
    with pytest.raises(DataError, match="give the file itself: llama.tiktoken$"):
        load_tokenizer(TokenizerPlan(str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; copy the tokenizer again"),
        (b" \n\n", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a pointer of Git LFS"),
        (b"<!DOCTYPE html><html>", "is a web page"),
        (b"PK\x03\x04\0\0\0\0", "is a binary file of another kind; expected a tiktoken rank file, a sentencepiece"),
        (b"hello world again", "line 1: expected a base64 token"),
    ],
)
def test_what_is_no_tokenizer_is_called_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    assert words in refused(path)


def test_a_missing_file(tmp_path: Path) -> None:
    assert "does not exist; give the path of a tiktoken rank file" in refused(tmp_path / "nowhere.model")
