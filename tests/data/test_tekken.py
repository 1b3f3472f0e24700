"""Mistral's tekken.json: ids of tiktoken behind the special tokens, as in `mistral-common`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken

from tests.support import tekken
from tests.support.tekken import PATTERN, SPECIALS, USED, content, tokens, write
from titanlite.data import DataError
from titanlite.data.text_files import BUNDLED, iter_records
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.tokenizer.hf_export import SAMPLES

#: The engine of `mistral-common`, without special tokens.
ENGINE = tiktoken.Encoding(
    name="engine",
    pat_str=PATTERN,
    mergeable_ranks={token: rank for rank, token in enumerate(tokens()[:USED])},
    special_tokens={},
)
NEWER = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]"]


def texts() -> list[str]:
    records = list(iter_records(BUNDLED["c4_validation"]))
    return [*SAMPLES, *(record.text for record in records[:20]), "".join(map(chr, range(0x300)))]


def test_ids_are_those_of_the_engine_after_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write(tmp_path / "tekken.json")))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (USED + SPECIALS, 1, 2)
    for text in texts():
        ids = [rank + SPECIALS for rank in ENGINE.encode_ordinary(text)]
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, bos=True, eos=True) == [1, *ids, 2]
        document = tokenizer.encode_document(text)
        assert document.dtype == np.int64 and document.tolist() == [1, *ids, 2]
        assert tokenizer.decode(ids) == text
    # The tokens behind the vocabulary's size are not used.
    assert len(tokens()) > USED
    assert max(max(tokenizer.encode(text), default=0) for text in texts()) < USED + SPECIALS


def test_a_control_token_in_text_is_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write(tmp_path / "t", special_tokens=None)))
    names = tokenizer.special_tokens
    assert list(names)[:5] == ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    assert (names["[TOOL_CONTENT]"], names["<SPECIAL_20>"], names["<SPECIAL_29>"]) == (19, 20, 29)
    assert len(names) == SPECIALS
    for name in names:
        ids = tokenizer.encode(f"a {name} b")
        assert min(ids) >= SPECIALS
        assert tokenizer.decode(ids) == f"a {name} b"
    assert tokenizer.decode([1, 3, *tokenizer.encode("hi"), 4, 2]) == "<s>[INST]hi[/INST]</s>"
    with pytest.raises(DataError, match="outside the tokenizer's vocabulary of 1530"):
        tokenizer.decode([USED + SPECIALS])


def test_newer_files_list_their_special_tokens(tmp_path: Path) -> None:
    newer = content(NEWER, "v13")
    (tmp_path / "tekken.json").write_text(json.dumps(newer))
    tokenizer = load_tokenizer(str(tmp_path))
    assert list(tokenizer.special_tokens) == [*NEWER, *(f"<SPECIAL_{i}>" for i in range(7, 30))]
    older = load_tokenizer(str(write(tmp_path / "older.json")))
    assert tokenizer.encode("as before") == older.encode("as before")
    assert tokenizer.fingerprint != older.fingerprint
    smaller = content()["config"] | {"default_vocab_size": 1400}
    other = load_tokenizer(str(write(tmp_path / "smaller.json", config=smaller)))
    assert other.fingerprint != older.fingerprint


def test_long_texts_and_endless_runs(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write(tmp_path / "t.json")))
    # Longer than the cuts of Llama 3's text: Mistral makes none.
    long = "In the beginning was the word, and " * 20_000
    assert tokenizer.encode(long) == [i + SPECIALS for i in ENGINE.encode_ordinary(long)]
    for run in ("a" * 300_000, " " * 100_000, "\u00e9" * 50_000):
        assert tokenizer.decode(tokenizer.encode(run)) == run


_VOCAB = content()["vocab"]
_CONFIG = content()["config"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": None}, "missing required field `config`"),
        (
            {"config": {**_CONFIG, "pattern": 5}},
            r"Expected `str`, got `int` - at `\$.config.pattern`",
        ),
        (
            {"config": {**_CONFIG, "pattern": "(("}},
            "position 2: Opening parenthesis without closing parenthesis",
        ),
        (
            {"config": {**_CONFIG, "default_vocab_size": 9000}},
            "default_vocab_size is 9000 with 30 special tokens, and vocab has 2048 tokens",
        ),
        ({"config": {**_CONFIG, "version": "v13"}}, "missing, and config.version is 'v13'"),
        (
            {"vocab": [*_VOCAB[:400], *_VOCAB[401:]]},
            r"vocab\[400\] is .*rank=401.* expected rank 400",
        ),
        ({"vocab": [_VOCAB[0], *_VOCAB[:-1]]}, r"vocab\[1\] is .*rank=0"),
        (
            {"vocab": [*_VOCAB[:700], {**_VOCAB[700], "token_bytes": "a*"}, *_VOCAB[701:]]},
            r"base64 encoded string - at `\$.vocab\[...\].token_bytes`",
        ),
        (
            {"vocab": [*_VOCAB[:700], {**_VOCAB[600], "rank": 700}, *_VOCAB[701:]]},
            r"vocab\[700\] is .* stands twice",
        ),
        (
            {"vocab": [{**_VOCAB[1], "rank": 0}, *_VOCAB[1:]]},
            r"vocab\[0\] is .*b'\\x01'.*, expected rank 0, and bytes as the first 256",
        ),
        (
            {"special_tokens": [{"rank": 1, "token_str": "<s>"}]},
            "special_tokens are not in the order of their ranks",
        ),
        ({"special_tokens": content(["<s>", "<s>"])["special_tokens"]}, "30 names, 29 of them dif"),
        (
            {"special_tokens": content(["<s>", "<eos>"])["special_tokens"]},
            "expected '<s>' and '</s>' among them",
        ),
        ({"special_tokens": content(list(map(str, range(31))))["special_tokens"]}, "31 names"),
    ],
)
def test_a_file_that_is_not_as_mistral_writes_it_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = write(tmp_path / "tekken.json", **changes)
    with pytest.raises(DataError, match=words) as error:
        load_tokenizer(str(path))
    assert str(error.value).startswith(f"model.tokenizer_path: {path} is no tekken.json")


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tekken.json")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="or is cut short"):
        load_tokenizer(str(path))


def test_a_tokenizer_json_is_read_before_it(tmp_path: Path) -> None:
    from tests.support.hf import bundled_as_json

    write(tmp_path / "tekken.json")
    assert load_tokenizer(str(tmp_path)).vocab_size == tekken.USED + SPECIALS
    bundled_as_json().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).vocab_size == 2304
