"""tokenizer.json: the ids of `tokenizers` and transformers, which tokens are BOS and EOS, and
errors.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from tests.support.hf import bundled_as_json
from titanlite.data import DataError
from titanlite.data.text_files import BUNDLED, iter_records
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, Tokenizer, load_tokenizer
from titanlite.data.tokenizer.export_files import hf_files
from titanlite.data.tokenizer.tiktoken_ranks import SPECIAL_TOKENS

TEXTS = [
    "",
    " ",
    "naïve café — “quotes” … 1811, £20,000",
    "日本語 русский العربية हिन्दी 👩‍👩‍👧‍👦",
    "tabs\t\tand\r\nlines\n\n\n  spaces   ",
    "nul\0nul",
]


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it for Llama 2's kind, from the bundled sentencepiece
    model.
    """
    source = tmp_path_factory.mktemp("model")
    folder = tmp_path_factory.mktemp("llama2")
    shutil.copy(BUNDLED_SENTENCEPIECE, source / "tokenizer.model")
    transformers.LlamaTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled ranks as transformers writes them."""
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.json"
    bundled_as_json().save(str(path))
    return path


def load(path: Path) -> Tokenizer:
    return load_tokenizer(str(path))


def refused(path: Path, words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(path.parent) in str(caught.value)


def test_ids_are_those_of_transformers_and_of_sentencepiece(llama2):
    ours = load(llama2)
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (2304, 1, 2)
    sentencepiece = load(BUNDLED_SENTENCEPIECE)
    records = iter_records(BUNDLED["c4_validation"])
    texts = [*TEXTS, *(record.text for record in itertools.islice(records, 40))]
    theirs = transformers.AutoTokenizer.from_pretrained(llama2)
    for text in texts:
        wanted = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == wanted
        # transformers puts no second space before a first one: its own choice, in the file.
        if not text.startswith(" "):
            assert sentencepiece.encode(text) == wanted
            assert ours.decode([1, *wanted, 2]) == f"<s>{text}</s>"
    text = "<s> is not </s> special <unk> here"
    ids = ours.encode(text)
    assert ids == sentencepiece.encode(text)
    assert not {0, 1, 2} & set(ids)


def test_post_processor_truncation_and_padding_have_no_effect(llama3, tmp_path):
    changed = tokenizers.Tokenizer.from_file(str(llama3))
    begin, end = SPECIAL_TOKENS[:2]
    changed.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(begin, 2048), (end, 2049)]
    )
    changed.enable_truncation(8)
    changed.enable_padding(length=64)
    changed.save(str(tmp_path / "tokenizer.json"))
    text = "In the beginning God created the heaven and the earth."
    ours = load(tmp_path / "tokenizer.json")
    tiktoken = load_tokenizer()
    assert ours.encode(text, bos=True, eos=True) == tiktoken.encode(text, bos=True, eos=True)
    assert ours.fingerprint == load(llama3).fingerprint, "it is no part of the identity"


def write_words(folder: Path, *words: str, **beside: Any) -> Path:
    """A tokenizer.json of whole words, without special tokens of its own, and files beside it."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


WORDS = ("?", "a", "<s>", "</s>", "<|endoftext|>", "B", "E", "<|im_end|>")
NAMED = {"bos_token": "B", "eos_token": "E"}


@pytest.mark.parametrize(
    ("beside", "bos", "eos"),
    [
        ({}, "<s>", "</s>"),
        ({"tokenizer_config": NAMED}, "B", "E"),
        ({"tokenizer_config": {"bos_token": "B"}, "special_tokens_map": NAMED}, "B", "E"),
        ({"tokenizer_config": {"eos_token": "</s>", "model_max_length": 4}}, "<s>", "</s>"),
        (
            {"tokenizer_config": {"bos_token": None, "eos_token": "<|im_end|>"}},
            "<|endoftext|>",
            "<|im_end|>",
        ),
    ],
)
def test_files_that_name_bos_and_eos(tmp_path, beside, bos, eos):
    tokenizer = load(write_words(tmp_path, *WORDS, **beside))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (WORDS.index(bos), WORDS.index(eos))
    assert tokenizer.special_tokens == {bos: WORDS.index(bos), eos: WORDS.index(eos)}
    assert tokenizer.encode("a a", bos=True, eos=True) == [WORDS.index(bos), 1, 1, WORDS.index(eos)]


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({}, "no file names its bos_token and eos_token"),
        ({"tokenizer_config": {"eos_token": "E"}}, "no file names its bos_token, and"),
        ({"tokenizer_config": NAMED | {"pad_token": 3}}, "special tokens of tokenizer_config.json"),
    ],
)
def test_unknown_bos_and_eos_are_refused(tmp_path, beside, words):
    refused(write_words(tmp_path, "?", "a", "B", "E", **beside), words)


IN_CONFIG = {"content": "<|x|>", "normalized": False, "special": True}
#: Configs beside a vocabulary of 8 words, none of which is an added token: as torchtitan's test
#: tokenizer has them, whose ids in the config are none; and plain names.
ADDING = {
    "torchtitan": {
        "added_tokens_decoder": {
            "128001": IN_CONFIG | {"content": "<|end|>"},
            "128000": IN_CONFIG | {"content": "<|begin|>"},
            "5": IN_CONFIG | {"content": "E"},
            "6": IN_CONFIG | {"content": "plain", "special": False},
        },
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "img_token": "<|image|>",
        "pad_token": "E",
        "add_bos_token": True,
    },
    "names": {
        "additional_special_tokens": ["<|call|>", "B"],
        "cls_token": "<cls>",
        "pad_token": "<pad>",
        "unk_token": "?",
        "eos_token": {"__type": "AddedToken", **IN_CONFIG, "content": "<|end|>"},
        "bos_token": "<|begin|>",
    },
}


@pytest.mark.parametrize("kind", ADDING)
def test_tokens_of_the_files_beside_get_the_ids_of_transformers(tmp_path, kind):
    path = write_words(tmp_path, *WORDS)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**ADDING[kind], "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load(path)
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (
        len(theirs),
        theirs.bos_token_id,
        theirs.eos_token_id,
    )
    added = theirs.added_tokens_decoder
    assert ours.special_tokens == {t.content: i for i, t in added.items() if t.special}
    text = "a plain a E <|end|> B"
    expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ours.encode(text) == expected
    # An export has them in its tokenizer.json, for programs that read that alone.
    for name, content in hf_files(str(tmp_path)).items():
        (tmp_path / name).write_bytes(content)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert exported(text)["input_ids"] == [ours.bos_id, *theirs(text)["input_ids"]]
    (tmp_path / "tokenizer_config.json").unlink()
    alone = tokenizers.Tokenizer.from_file(str(path))
    assert alone.get_vocab_size() == ours.vocab_size


def test_fingerprint_follows_what_decides_the_ids(tmp_path):
    path = write_words(tmp_path, *WORDS)
    first = load(path).fingerprint
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert load(path).fingerprint == first
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMED))
    named = load(path).fingerprint
    write_words(tmp_path, *WORDS[:-2], "E", "B")
    assert len({first, named, load(path).fingerprint}) == 3
    assert len(first) == 64


def test_damaged_and_other_files_and_a_missing_library(tmp_path, llama3, monkeypatch):
    content = llama3.read_bytes()
    path = tmp_path / "tokenizer.json"
    other = json.dumps({**json.loads(content), "model": {"type": "Nonesuch"}}).encode()
    for damaged, words in (
        (content[:-2], "is JSON that is damaged or cut short"),
        (json.dumps(NAMED).encode(), 'is JSON without a "model" part'),
        (other, f"is not a tokenizer.json that tokenizers {tokenizers.__version__} reads"),
    ):
        path.write_bytes(damaged)
        refused(path, words)
    (llama3.parent / "special_tokens_map.json").write_text("{cut")
    refused(llama3, "special_tokens_map.json cannot be read")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(llama3, "needs the package tokenizers: pip install tokenizers")
