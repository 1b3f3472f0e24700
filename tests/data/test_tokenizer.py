"""tiktoken rank files: what is read, what is refused, and that text survives the round trip."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from titanlite.config.plans import TokenizerPlan
from titanlite.data.errors import DataError
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, Tokenizer, load_tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import SPECIAL_TOKENS, TiktokenTokenizer, read_ranks


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TokenizerPlan())


def write_ranks(path: Path, tokens: list[bytes]) -> Path:
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return path


BYTES = [bytes([byte]) for byte in range(256)]


def test_bundled_vocabulary(tokenizer: Tokenizer) -> None:
    assert len(read_ranks(BUNDLED_TOKENIZER)) == 2048
    assert tokenizer.vocab_size == 2304 == 36 * 64
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2048, 2049)


def test_metas_vocabulary_gets_llama3_ids(tmp_path: Path) -> None:
    """128,000 ranks, as in Meta's file, must give the ids published with Llama 3."""
    tokens = BYTES + [b"%06d" % i for i in range(128_000 - 256)]
    tokenizer = load_tokenizer(TokenizerPlan(str(write_ranks(tmp_path / "tokenizer.model", tokens))))
    assert tokenizer.vocab_size == 128_256
    published = {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|reserved_special_token_0|>": 128002,
        "<|reserved_special_token_3|>": 128005,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|reserved_special_token_4|>": 128008,
        "<|eot_id|>": 128009,
        "<|reserved_special_token_5|>": 128010,
        "<|reserved_special_token_250|>": 128255,
    }
    assert {name: tokenizer.special_tokens[name] for name in published} == published
    assert len(SPECIAL_TOKENS) == len(set(SPECIAL_TOKENS)) == 256


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "In the beginning God created the heaven and the earth.",
        "naïve café — “quotes” … 1811, £20,000",
        "日本語 русский العربية हिन्दी 👩‍👩‍👧‍👦",
        "".join(map(chr, range(0x300))),
        bytes(range(256)).decode("latin-1"),
        "tabs\t\tand\r\nlines\n\n\n  spaces   ",
        "<|begin_of_text|> is not special here <|end_of_text|><|reserved_special_token_7|>",
    ],
)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(token_id < 2048 for token_id in ids), "text must never become a special token"


def test_every_byte_alone_is_a_token(tokenizer: Tokenizer) -> None:
    ranks = read_ranks(BUNDLED_TOKENIZER)
    assert all(token in ranks for token in BYTES)
    assert tokenizer.decode([ranks[bytes([byte])] for byte in "é".encode()]) == "é"


def test_bos_and_eos_are_added_only_when_asked(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("abc def")
    assert tokenizer.encode("abc def", bos=True, eos=True) == [2048, *plain, 2049]
    assert tokenizer.encode("abc def", bos=True) == [2048, *plain]
    assert tokenizer.encode("", bos=True, eos=True) == [2048, 2049]


@pytest.mark.parametrize("text", ["a" * 500_000, " " * 500_000, "!" * 300_000, "word " * 100_000, "x\n" * 100_000])
def test_endless_runs_are_encoded(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_cutting_long_texts_changes_no_ordinary_text(tokenizer: Tokenizer) -> None:
    """A text long enough to be looked at, but without endless runs, must not be cut."""
    line = "And God said, Let there be light: and there was light.\n"
    assert tokenizer.encode(line * 1000) == tokenizer.encode(line) * 1000


def test_lone_surrogate_does_not_stop_a_run(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a�b"


def test_decode_refuses_foreign_ids(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="token id 2304 at position 1 is outside the tokenizer's vocabulary of 2304"):
        tokenizer.decode([5, 2304])


def test_fingerprint_follows_ranks_and_special_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ranks = read_ranks(BUNDLED_TOKENIZER)
    assert TiktokenTokenizer(ranks).fingerprint == tokenizer.fingerprint
    by_rank = sorted(ranks, key=lambda token: ranks[token])
    swapped = [*by_rank[:-2], by_rank[-1], by_rank[-2]]
    assert TiktokenTokenizer({token: i for i, token in enumerate(swapped)}).fingerprint != tokenizer.fingerprint
    assert TiktokenTokenizer(ranks, SPECIAL_TOKENS[:-1]).fingerprint != tokenizer.fingerprint
    assert len(tokenizer.fingerprint) == 64


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_tokenizer(TokenizerPlan(str(path)))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere.model")


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "t.model"
    path.write_bytes(b"\n")
    assert "is empty" in refused(path)


@pytest.mark.parametrize("broken", [b"hello world again", b"aGk=", b"aGk= x", b"a*k= 256", b"aGk= -1", "é 3".encode()])
def test_a_line_that_is_not_one_is_named(tmp_path: Path, broken: bytes) -> None:
    path = write_ranks(tmp_path / "t.model", BYTES)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:99], broken, *lines[99:]]))
    assert "line 100: expected a base64 token" in refused(path)


def test_gap_duplicates_and_missing_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.model"
    lines = write_ranks(path, [*BYTES, b"ab", b"cd"]).read_bytes().splitlines()

    path.write_bytes(b"\n".join([*lines[:256], *lines[257:]]))
    assert "rank 256 is missing (line 257 has rank 257)" in refused(path)

    path.write_bytes(b"\n".join([*lines, base64.b64encode(b"ef") + b" 7"]))
    assert "line 259: rank 7 was already given on line 8" in refused(path)

    path.write_bytes(b"\n".join([*lines, base64.b64encode(b"ab") + b" 258"]))
    assert "line 259: the token b'ab' was already given rank 256" in refused(path)

    write_ranks(path, [*BYTES[:65], *BYTES[66:]])
    assert "the byte 0x41 has no token (1 of 256 missing)" in refused(path)
