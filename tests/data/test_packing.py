"""Sequences by number: every token a target once, over documents and epochs, in an order that never
changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import ROOT
from tests.support.texts import write_texts
from tests.support.token_folders import write_prepared
from titanlite.config.data_sections import Data, Validation
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.dataset_builder import TextReader, build_dataset
from titanlite.data.rows import IGNORE
from titanlite.data.sequences import PackedDataset, epoch_order
from titanlite.data.token_files import open_tokens
from titanlite.data.tokenize_files import Corpus, Tokens
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, Tokenizer, load_tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import SPECIAL_TOKENS, TiktokenTokenizer, parse_ranks

TOKENIZER = load_tokenizer()


def build(
    path: Path | None = None, tokenizer: Tokenizer = TOKENIZER, vocab_size: int = 0, **data: Any
) -> PackedDataset:
    training = {name: data.pop(name) for name in ("seq_len", "epochs") if name in data}
    sections = Training(dataset_path=path and str(path), **{"seq_len": 4, **training}), Data(**data)
    return build_dataset(*sections, tokenizer, vocab_size or tokenizer.vocab_size)


# The order


def test_the_order_never_changes() -> None:
    """A run resumed with a later version must read on where it stopped."""
    assert epoch_order(8, seed=0, epoch=0).tolist() == [7, 0, 2, 3, 1, 6, 4, 5]
    assert epoch_order(8, seed=0, epoch=1).tolist() == [4, 6, 2, 0, 5, 1, 7, 3]
    late = epoch_order(13, seed=42, epoch=1000).tolist()
    assert late == [7, 1, 8, 12, 6, 4, 2, 9, 0, 11, 10, 3, 5]
    assert epoch_order(5, 1, 2, shuffle=False).tolist() == [0, 1, 2, 3, 4]


# Sequences


def stream_of(corpus: Corpus, epochs: int, seed: int, shuffle: bool = True) -> list[int]:
    """All epochs' tokens end to end, put together the plain way."""
    stream: list[int] = []
    for epoch in range(epochs):
        for document in epoch_order(len(corpus.offsets) - 1, seed, epoch, shuffle):
            stream += corpus.tokens[
                corpus.offsets[document] : corpus.offsets[document + 1]
            ].tolist()
    return stream


@pytest.mark.parametrize("seq_len", [1, 7, 599, 1500])
@pytest.mark.parametrize("kind", ["shuffled", "in order", "token files"])
def test_every_token_is_a_target_once_per_epoch(
    corpus: Tokens, tmp_path: Path, seq_len: int, kind: str
) -> None:
    shuffle = kind != "in order"
    stream = stream_of(corpus, 3, 3, shuffle)
    if kind == "token files":
        folder = write_prepared(tmp_path / "a")
        corpus = open_tokens(str(folder), TOKENIZER, TOKENIZER.vocab_size)
        stream = list(range(1, corpus.size + 1)) * 3
    dataset = PackedDataset(corpus, seq_len=seq_len, seed=3, shuffle=shuffle, epochs=3)
    assert dataset.total_sequences is not None
    inputs: list[int] = []
    targets: list[int] = []
    by_place = sorted(range(dataset.total_sequences), key=dataset.window)
    assert [dataset.window(i) for i in by_place] == list(range(dataset.total_sequences))
    for i in by_place:
        tokens, labels, _ = dataset.sequence(i)
        assert tokens.shape == labels.shape == (seq_len,)
        inputs += tokens[labels != IGNORE].tolist()
        targets += labels[labels != IGNORE].tolist()
    assert inputs == stream[:-1]
    assert targets == stream[1:]


# From sections to sequences


def test_documents_begin_with_bos_and_end_with_eos(tmp_path: Path) -> None:
    path = write_texts(
        tmp_path / "c4.jsonl", ["In the beginning", "", "God created <|end_of_text|>"]
    )
    corpus = build(path, shuffle=False).corpus
    documents = [part.tolist() for part in np.split(corpus.tokens, corpus.offsets[1:-1])]
    bos, eos = TOKENIZER.bos_id, TOKENIZER.eos_id
    assert documents[0] == [bos, *TOKENIZER.encode("In the beginning"), eos]
    assert documents[1] == [bos, eos]
    assert documents[2].count(eos) == 1
    assert TOKENIZER.decode(documents[2][1:-1]) == "God created <|end_of_text|>"
    assert build(path, vocab_size=65_536).corpus.tokens.dtype == np.uint16
    assert build(path, vocab_size=128_256).corpus.tokens.dtype == np.uint32


def test_fingerprint_follows_text_and_tokenizer_only(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", ["one", "two"])
    first = build(path).fingerprint
    assert build(write_texts(tmp_path / "renamed.json", ["one", "two"])).fingerprint == first
    assert build(path, seq_len=8, seed=5, shuffle=False, epochs=2).fingerprint == first
    others = [["one", "twp"], ["two", "one"], ["on", "etwo"]]
    found = {build(write_texts(tmp_path / "b.jsonl", texts)).fingerprint for texts in others}
    assert len(found | {first}) == 4
    ranks = parse_ranks(BUNDLED_TOKENIZER.read_bytes(), BUNDLED_TOKENIZER)
    assert build(path, TiktokenTokenizer(ranks, SPECIAL_TOKENS[:128])).fingerprint != first


def test_sections_reach_the_data() -> None:
    reader = TextReader(Data(), TOKENIZER, TOKENIZER.vocab_size)
    held_out = reader.held_out(Validation(), 128)[""]
    assert held_out.settings == {"seq_len": 128, "seed": 0, "shuffle": False, "epochs": 1}
    with pytest.raises(DataError, match="^validation.dataset_path: /nowhere does not exist"):
        reader.held_out(Validation(dataset_path="/nowhere"), 128)
    training = build(seq_len=96, seed=4, epochs=2)
    assert training.settings == {"seq_len": 96, "seed": 4, "shuffle": True, "epochs": 2}


def test_the_example_in_the_docs_runs() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert names["first"].tokens.shape == names["second"].labels.shape == (4, 512)
