"""sentencepiece models: the library's ids, and errors that name the file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece

from titanlite.config.plans import TokenizerPlan
from titanlite.data.errors import DataError
from titanlite.data.sources import BUNDLED, iter_records
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, Tokenizer, load_tokenizer
from titanlite.data.tokenizer.sentencepiece_model import protobuf_fields

TEXTS = [
    "",
    " ",
    "In the beginning God created the heaven and the earth.",
    "naïve café — “quotes” … 1811, £20,000",
    "日本語 русский العربية हिन्दी 👩‍👩‍👧‍👦",
    "tabs\t\tand\r\nlines\n\n\n  spaces   ",
    "nul\0nul",
    "<s> is not </s> special <unk> here <0x0A> ▁",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TokenizerPlan(str(BUNDLED_SENTENCEPIECE)))


@pytest.fixture(scope="module")
def library() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(BUNDLED_SENTENCEPIECE))


def train(path: Path, **options: object) -> TokenizerPlan:
    model = io.BytesIO()
    sentence = "the cat sat on the mat and the ﬁrst dog ran after that cat"
    settings = {"vocab_size": 40, "model_type": "bpe", "hard_vocab_limit": False, "minloglevel": 2}
    settings |= {"normalization_rule_name": "identity", **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter([sentence] * 20), model_writer=model, **settings)
    path.write_bytes(model.getvalue())
    return TokenizerPlan(str(path))


def test_bundled_model_is_made_like_llama2s(
    tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor
) -> None:
    assert BUNDLED_SENTENCEPIECE.stat().st_size < 60_000
    assert tokenizer.vocab_size == 2304
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.special_tokens == {"<s>": 1, "</s>": 2}
    # Llama 2's first 259 ids: unknown, BOS, EOS, then the bytes.
    pieces = [library.id_to_piece(i) for i in range(259)]
    assert pieces == ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    assert [library.id_to_piece(i) for i in tokenizer.encode("12\n")] == ["▁", "1", "2", "<0x0A>"]


def test_ids_are_the_librarys(tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor) -> None:
    texts = [record.text for record in iter_records(BUNDLED["c4_validation"])]
    for text in [*texts, *TEXTS]:
        plain = library.encode(text)
        assert tokenizer.encode(text) == plain
        assert tokenizer.encode(text, bos=True, eos=True) == library.encode(text, add_bos=True, add_eos=True)
        assert tokenizer.encode(text, bos=True) == [1, *plain]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_without_special_ids(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    # The library writes U+2581 for a space, so it cannot tell the two apart again.
    assert tokenizer.decode(ids) == text.replace("▁", " ")
    assert not {0, 1, 2} & set(ids), "text must never become a special token, nor be unknown"


def test_each_documents_first_space_goes_with_it(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("In the", bos=True, eos=True), *tokenizer.encode("And God", bos=True, eos=True)]
    assert tokenizer.decode(ids) == "<s>In the</s><s>And God</s>"


def test_odd_texts_are_encoded(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a�b"
    for text in ("a" * 200_000, " " * 200_000, "!" * 200_000, "é" * 50_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decode_refuses_foreign_ids(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="token id 2304 at position 1 is outside the tokenizer's vocabulary of 2304"):
        tokenizer.decode([5, 2304])


def test_a_models_own_options_are_obeyed(tmp_path: Path) -> None:
    """Another algorithm, normalisation, no dummy prefix, pieces of the user's, ids of BOS and EOS elsewhere."""
    plan = train(
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
    tokenizer = load_tokenizer(plan)
    library = sentencepiece.SentencePieceProcessor(model_file=plan.path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (5, 6)
    assert tokenizer.special_tokens == {"<begin>": 5, "</s>": 6, "<pad>": 7}
    for text in ("The ﬁrst CAT", "the cat<sep>the mat", "a  b <begin></s>", "日"):
        assert tokenizer.encode(text) == library.encode(text)
        assert not {5, 6, 7} & set(tokenizer.encode(text))
    assert library.piece_to_id("<sep>") in tokenizer.encode("the cat<sep>the mat")
    assert tokenizer.decode(tokenizer.encode("The ﬁrst CAT")) == "the first cat"


def test_fingerprint_follows_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    copy = tmp_path / "renamed"
    copy.write_bytes(BUNDLED_SENTENCEPIECE.read_bytes())
    assert load_tokenizer(TokenizerPlan(str(copy))).fingerprint == tokenizer.fingerprint
    plain, split = train(tmp_path / "a.model"), train(tmp_path / "b.model", split_digits=True)
    prints = {load_tokenizer(plan).fingerprint for plan in (plain, split)}
    assert len(prints | {tokenizer.fingerprint, load_tokenizer(TokenizerPlan()).fingerprint}) == 4
    assert len(tokenizer.fingerprint) == 64


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_model_without_bos_or_eos(tmp_path: Path, name: str) -> None:
    plan = train(tmp_path / "t.model", **{f"{name}_id": -1})
    with pytest.raises(DataError, match=rf"^model.tokenizer_path: {plan.path} has no {name.upper()} piece.*{name}_id"):
        load_tokenizer(plan)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    """Also between two pieces, where what is left is a whole model of fewer pieces to the library."""
    content = Path(str(train(tmp_path / "t.model").path)).read_bytes()
    path = tmp_path / "cut.model"
    whole_messages = 0
    for end in range(4, len(content)):
        path.write_bytes(content[:end])
        try:
            whole = {2, 3} <= protobuf_fields(content[:end])
            whole_messages += 1
        except ValueError:
            whole = False
        if whole:  # only the empty message of denormalisation, the last two bytes, may be missing
            assert end >= len(content) - 2
            continue
        with pytest.raises(
            DataError, match=f"^model.tokenizer_path: {path} is a sentencepiece model that is damaged or"
        ):
            load_tokenizer(TokenizerPlan(str(path)))
    assert whole_messages > 40


def test_a_damaged_model(tmp_path: Path) -> None:
    path = tmp_path / "t.model"
    content = bytearray(BUNDLED_SENTENCEPIECE.read_bytes())
    content[16] = 0x7F
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path} is a sentencepiece model that is damaged .*copy the file again"):
        load_tokenizer(TokenizerPlan(str(path)))
