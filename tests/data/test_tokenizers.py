"""Tokenizer files of three kinds: which kind a path holds, the ids of the libraries, round trips
and errors.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tiktoken_ext import openai_public

from titanlite.config.checks import missing_files
from titanlite.config.load import load
from titanlite.data import DataError
from titanlite.data.text_files import BUNDLED, iter_records
from titanlite.data.tokenizer import (
    BUNDLED_SENTENCEPIECE,
    BUNDLED_TOKENIZER,
    kind_of,
    load_tokenizer,
    tiktoken_ranks,
)
from titanlite.data.tokenizer.tiktoken_ranks import SPECIAL_TOKENS, TiktokenTokenizer, parse_ranks

TIKTOKEN = load_tokenizer()
SENTENCEPIECE = load_tokenizer(family="llama2")
LIBRARY = sentencepiece.SentencePieceProcessor(model_file=str(BUNDLED_SENTENCEPIECE))
RANKS = parse_ranks(BUNDLED_TOKENIZER.read_bytes(), BUNDLED_TOKENIZER)
TEXTS = [
    "",
    " ",
    "In the beginning God created the heaven and the earth.",
    "naïve café — “quotes” … 1811, £20,000",
    "日本語 русский العربية हिन्दी 👩‍👩‍👧‍👦",
    "".join(map(chr, range(0x300))),
    "tabs\t\tand\r\nlines\n\n\n  spaces   ",
    "nul\0nul",
    "<|begin_of_text|> not special <|end_of_text|> <s> </s> <unk> <0x0A>",
]


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    assert str(caught.value).startswith(f"model.tokenizer_path: {path}")
    return str(caught.value)


def write_json(path: Path) -> Path:
    """A tokenizer.json of four words."""
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


def train(path: Path, **options: object) -> Path:
    """A small sentencepiece model."""
    model = io.BytesIO()
    sentence = "the cat sat on the mat and the ﬁrst dog ran after that cat"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence] * 20),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"model_type": "bpe", "normalization_rule_name": "identity", **options},
    )
    path.write_bytes(model.getvalue())
    return path


def test_the_content_decides_and_the_name_does_not(tmp_path):
    sizes = {}
    for source in (
        BUNDLED_TOKENIZER,
        BUNDLED_SENTENCEPIECE,
        write_json(tmp_path / "tokenizer.json"),
    ):
        path = tmp_path / f"{source.suffix[1:]}.bin"
        shutil.copy(source, path)
        tokenizer = load_tokenizer(str(path))
        sizes[kind_of(path.read_bytes(), path)] = (
            tokenizer.vocab_size,
            tokenizer.bos_id,
            tokenizer.eos_id,
        )
    assert sizes == {
        "tiktoken": (2304, 2048, 2049),
        "sentencepiece": (2304, 1, 2),
        "tokenizer.json": (4, 0, 1),
    }


def test_of_a_folder_the_json_is_read_before_the_model(tmp_path, logged):
    shutil.copy(BUNDLED_TOKENIZER, tmp_path / "llama.tiktoken")
    with pytest.raises(DataError, match="holds no tokenizer.json or .* give the file itself$"):
        load_tokenizer(str(tmp_path))
    shutil.copy(BUNDLED_SENTENCEPIECE, tmp_path / "tokenizer.model")
    assert load_tokenizer(str(tmp_path)).vocab_size == 2304
    write_json(tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path)).vocab_size == 4
    assert "(tokenizer.json), 4 ids; BOS 0 and EOS 1" in logged()


_LINES = BUNDLED_TOKENIZER.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b" \n\n", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a pointer of Git LFS"),
        (b"<!DOCTYPE html><html>", "line 1: expected a base64 token"),
        (b"PK\x03\x04\0\0\0\0", "line 1: expected a base64 token"),
        (b"".join([*_LINES[:99], b"a*k= 256\n"]), "line 100: expected a base64 token"),
        (
            b"".join([*_LINES[:99], *_LINES[100:]]),
            "line 100: .* has rank 100, expected a new token of rank 99",
        ),
        (b"".join(_LINES[:255]), "has no token .1 of 256 missing."),
        (
            BUNDLED_SENTENCEPIECE.read_bytes()[:-1],
            "is a sentencepiece model that is damaged or cut short",
        ),
    ],
)
def test_other_and_damaged_files_are_refused(tmp_path, content, words):
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    assert re.search(words, refused(path))


def test_an_id_of_the_hub_and_a_url_are_refused_with_the_other_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-3.1-8B"
    fetch = f"`hf download {name} --include 'tokenizer*' --local-dir {name}` fetches it"
    copy = "copy its files to a folder of this machine, and give that folder"
    for path, remedy in ((name, fetch), ("s3://bucket/tokenizer", copy)):
        (problem,) = missing_files(load([f"--model.tokenizer_path={path}"]))
        assert problem.remedy == remedy
    with pytest.raises(DataError, match=re.escape(f"does not exist; {fetch}")):
        load_tokenizer(name)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [TIKTOKEN, SENTENCEPIECE])
def test_text_comes_back_and_never_becomes_a_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(tokenizer.special_tokens.values()) & set(ids)
    assert tokenizer is TIKTOKEN or LIBRARY.unk_id() not in ids
    begin, end = tokenizer.bos_id, tokenizer.eos_id
    document = tokenizer.encode_document(text)
    assert document.tolist() == [begin, *ids, end]
    # A first space goes with each document.
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    assert tokenizer.decode([*document, *document]) == f"{names[begin]}{text}{names[end]}" * 2


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("tokenizer", [TIKTOKEN, SENTENCEPIECE])
def test_odd_texts_and_foreign_ids(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a�b"
    for text in ("a" * 500_000, " " * 200_000, "é" * 50_000, "x\n" * 100_000):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
    with pytest.raises(
        DataError, match="token id 2304 at position 1 is outside the tokenizer's vocabulary of 2304"
    ):
        tokenizer.decode([5, 2304])
    line = "And God said, Let there be light: and there was light.\n"
    assert TIKTOKEN.encode(line * 1000) == TIKTOKEN.encode(line) * 1000, (
        "ordinary text must not be cut"
    )


def test_fingerprints_follow_the_ids(tmp_path):
    by_rank = sorted(RANKS, key=lambda token: RANKS[token])
    swapped = {token: i for i, token in enumerate([*by_rank[:-2], by_rank[-1], by_rank[-2]])}
    assert TiktokenTokenizer(RANKS).fingerprint == TIKTOKEN.fingerprint
    plain = train(tmp_path / "a.model")
    split = train(tmp_path / "b.model", split_digits=True)
    others = [TiktokenTokenizer(swapped), TiktokenTokenizer(RANKS, SPECIAL_TOKENS[:-1])]
    others += [load_tokenizer(str(plain)), load_tokenizer(str(split)), TIKTOKEN, SENTENCEPIECE]
    assert len({tokenizer.fingerprint for tokenizer in others}) == 6


def test_special_tokens_have_llama3_ids():
    """They follow the 128,000 ranks of Meta's file."""
    for name, published in {
        "begin_of_text": 128000,
        "end_of_text": 128001,
        "reserved_special_token_0": 128002,
        "reserved_special_token_3": 128005,
        "start_header_id": 128006,
        "end_header_id": 128007,
        "reserved_special_token_4": 128008,
        "eot_id": 128009,
        "reserved_special_token_250": 128255,
    }.items():
        assert TIKTOKEN.special_tokens[f"<|{name}|>"] - 2048 + 128_000 == published
    assert len(set(SPECIAL_TOKENS)) == 256
    assert TIKTOKEN.vocab_size == 2304


def test_ids_are_those_of_the_library():
    assert SENTENCEPIECE.special_tokens == {"<s>": 1, "</s>": 2}
    # Llama 2's first 259 ids: unknown, BOS, EOS, then the bytes.
    pieces = [LIBRARY.id_to_piece(i) for i in range(259)]
    assert pieces == ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    for text in [*(record.text for record in iter_records(BUNDLED["c4_validation"])), *TEXTS]:
        assert SENTENCEPIECE.encode(text, bos=True, eos=True) == LIBRARY.encode(
            text, add_bos=True, add_eos=True
        )


def test_a_models_own_options_are_obeyed(tmp_path):
    """Another algorithm, normalisation, no dummy prefix, pieces of the user's, ids of BOS and EOS
    elsewhere.
    """
    path = train(
        tmp_path / "other.model",
        model_type="unigram",
        normalization_rule_name="nmt_nfkc_cf",
        add_dummy_prefix=False,
        user_defined_symbols=["<sep>"],
        bos_id=5,
        eos_id=6,
        pad_id=7,
        bos_piece="<begin>",
    )
    tokenizer = load_tokenizer(str(path))
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (5, 6)
    assert tokenizer.special_tokens == {"<begin>": 5, "</s>": 6, "<pad>": 7}
    for text in ("The ﬁrst CAT", "the cat<sep>the mat", "a  b <begin></s>", "日"):
        assert tokenizer.encode(text) == library.encode(text)
        assert not {5, 6, 7} & set(tokenizer.encode(text))
    assert library.piece_to_id("<sep>") in tokenizer.encode("the cat<sep>the mat")
    assert tokenizer.decode(tokenizer.encode("The ﬁrst CAT")) == "the first cat"


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_model_without_bos_or_eos(tmp_path, name):
    assert f"has no {name.upper()} piece" in refused(
        train(tmp_path / "t.model", **{f"{name}_id": -1})
    )


def test_published_ranks_of_other_models_are_refused(tmp_path, monkeypatch):
    content = BUNDLED_TOKENIZER.read_bytes() + base64.b64encode(b"I'm") + b" 2048\n"
    path = tmp_path / "tokenizer.model"
    # Other ends of lines are the same ranks.
    path.write_bytes(content.replace(b"\n", b"\r\n"))
    ranks = parse_ranks(content, path)
    unknown = load_tokenizer(str(path), "llama3")
    assert unknown.fingerprint == TiktokenTokenizer(ranks).fingerprint
    assert [unknown.decode([one]) for one in unknown.encode("I'm")] == ["I", "'", "m"]
    with pytest.raises(DataError, match=r"tokenizer\.model: its ranks are not published\."):
        load_tokenizer(str(path), "qwen3")
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(tiktoken_ranks.PUBLISHED, digest, "Qwen")
    with pytest.raises(DataError, match=r"are those of Qwen\. .* give the tokenizer\.json"):
        load_tokenizer(str(path), "llama3")


def test_hashes_are_those_of_the_library(monkeypatch):
    monkeypatch.setattr(
        openai_public, "load_tiktoken_bpe", lambda url, expected_hash: expected_hash
    )
    for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
        encoding = getattr(openai_public, name)()
        assert name in tiktoken_ranks.PUBLISHED[encoding["mergeable_ranks"]]
