"""Sequences by number: every token a target once, over documents and epochs, in an order that never
changes.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hub_server import HubServer
from tests.support.processes import ROOT
from tests.support.texts import write_texts
from tests.support.token_folders import SIZE, TOKENIZER, write_prepared
from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.errors import ConfigError
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.dataset_builder import TextReader
from titanlite.data.epoch_order import epoch_order
from titanlite.data.mixtures.mixed_rows import MixedRows
from titanlite.data.rows import IGNORE, Rows
from titanlite.data.sequences import PackedDataset
from titanlite.data.stream import StreamRows
from titanlite.data.token_files import open_tokens
from titanlite.data.tokenize_files import Corpus
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, Tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import SPECIAL_TOKENS, TiktokenTokenizer, parse_ranks


def build(
    path: Path | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    vocab_size: int = SIZE,
    seq_len: int = 4,
    epochs: int | None = None,
    **data: Any,
) -> PackedDataset:
    training = Training(dataset_path=path and str(path), seq_len=seq_len, epochs=epochs)
    return TextReader(Data(**data), tokenizer, vocab_size).train(training)


# The order


def test_the_order_never_changes():
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
def test_every_token_is_a_target_once_per_epoch(corpus, tmp_path, seq_len, kind):
    shuffle = kind != "in order"
    stream = stream_of(corpus, 3, 3, shuffle)
    if kind == "token files":
        folder = write_prepared(tmp_path / "a")
        corpus = open_tokens(str(folder), TOKENIZER, SIZE)
        stream = list(range(1, corpus.size + 1)) * 3
    dataset = PackedDataset(corpus, seq_len=seq_len, seed=3, shuffle=shuffle, epochs=3)
    numbers = range(dataset.total_sequences)
    inputs: list[int] = []
    targets: list[int] = []
    by_place = sorted(numbers, key=dataset.window)
    assert list(map(dataset.window, by_place)) == list(numbers)
    for i in by_place:
        tokens, labels, _ = dataset.sequence(i)
        assert tokens.shape == labels.shape == (seq_len,)
        inputs += tokens[labels != IGNORE].tolist()
        targets += labels[labels != IGNORE].tolist()
    assert inputs == stream[:-1]
    assert targets == stream[1:]


# From sections to sequences


def test_documents_begin_with_bos_and_end_with_eos(tmp_path):
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


def test_fingerprint_follows_text_and_tokenizer_only(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", ["one", "two"])
    first = build(path).fingerprint
    assert build(write_texts(tmp_path / "renamed.json", ["one", "two"])).fingerprint == first
    assert build(path, seq_len=8, seed=5, shuffle=False, epochs=2).fingerprint == first
    others = [["one", "twp"], ["two", "one"], ["on", "etwo"]]
    found = {build(write_texts(tmp_path / "b.jsonl", texts)).fingerprint for texts in others}
    assert len(found | {first}) == 4
    ranks = parse_ranks(BUNDLED_TOKENIZER.read_bytes(), BUNDLED_TOKENIZER)
    assert build(path, TiktokenTokenizer(ranks, SPECIAL_TOKENS[:128])).fingerprint != first


def test_sections_reach_the_data():
    reader = TextReader(Data(), TOKENIZER, SIZE)
    held_out = reader.held_out(Validation(), 128)[""]
    assert held_out.settings == {"seq_len": 128, "seed": 0, "shuffle": False, "epochs": 1}
    with pytest.raises(DataError, match="^validation.dataset_path: /nowhere does not exist"):
        reader.held_out(Validation(dataset_path="/nowhere"), 128)
    training = build(seq_len=96, seed=4, epochs=2)
    assert training.settings == {"seq_len": 96, "seed": 4, "shuffle": True, "epochs": 2}


def test_the_example_in_the_docs_runs():
    page = (ROOT / "docs" / "data.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert names["first"].tokens.shape == names["second"].labels.shape == (4, 512)


# From keys to sequences


TEXTS = [f"The number {n} has the square {n * n}." for n in range(40)]


def read(data: Data, training: Training, **more) -> Rows:
    return TextReader(data, TOKENIZER, SIZE, **more).train(training)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(4):
        write_texts(tmp_path / "text" / f"{number}.jsonl", TEXTS[number * 10 : number * 10 + 10])
    return tmp_path / "text"


def texts_of(rows: Rows, count: int) -> Counter[str]:
    """Decode the documents of the first rows of lane 0 that are whole."""
    ids = [
        token
        for i in range(count)
        for token in rows.sequence(i * (rows.lanes or 1)).tokens.tolist()
    ]
    return Counter(
        TOKENIZER.decode(ids).replace("<|begin_of_text|>", "").split("<|end_of_text|>")[1:-1]
    )


def test_streamed_and_whole_text_have_the_same_documents(folder):
    with HubServer(folder.parent) as server:
        for path, expected in (
            (str(folder), TEXTS),
            (f"{server.url}/text/2.jsonl", TEXTS[20:30]),
            (f"{server.url}/text/", TEXTS),
        ):
            training = Training(dataset_path=path, seq_len=32)
            streamed = read(Data(streaming="auto" if "http" in path else True, lanes=1), training)
            whole = read(Data(streaming=False), training)
            assert isinstance(streamed, StreamRows)
            assert isinstance(whole, PackedDataset)
            assert set(texts_of(streamed, 2 * whole.sequences_per_epoch + 4)) == set(expected)
            assert sorted(whole.corpus.tokens.tolist()) == sorted(
                token for text in expected for token in TOKENIZER.encode_document(text).tolist()
            )


def test_the_order_of_a_source_does_not_depend_on_the_others(folder):
    sources = [
        DataSource(name="numbers", path=str(folder), weight=3),
        DataSource(name="one", path=str(folder / "1.jsonl"), epochs=1),
    ]
    with pytest.raises(ConfigError, match="epochs: needs the length of all of"):
        read(Data(source=sources, streaming=True), Training(seq_len=32))
    mixed = read(Data(source=sources), Training(seq_len=32))
    assert isinstance(mixed, MixedRows)
    alone = read(Data(source=sources[:1]), Training(seq_len=32))
    for index in range(40):
        source, number = mixed.locate(index)
        if source == 0:
            assert mixed.sequence(index).tokens.tolist() == alone.sequence(number).tokens.tolist()


def test_only_one_rank_lists_files_and_the_others_read_the_same(folder):
    shared: dict[str, object] = {}

    def share(name, make):
        if name not in shared:
            shared[name] = make()
        return shared[name]

    training = Training(dataset_path=str(folder), seq_len=32)
    first = read(Data(streaming=True), training, share=share)
    write_texts(folder / "9.jsonl", ["too late"])
    second = read(Data(streaming=True), training, share=share)
    assert first.text.shards.names == second.text.shards.names
    assert len(shared) == 1
    assert read(Data(streaming=True), training).fingerprint != first.fingerprint


def test_the_fingerprint_follows_files_and_columns_and_not_the_folder(folder, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "moved")
    prints = [
        read(data, Training(dataset_path=str(path), seq_len=32)).fingerprint
        for data, path in (
            (Data(streaming=True), folder),
            (Data(streaming=True), moved),
            (Data(streaming=True, text_key="body"), moved),
        )
    ]
    assert prints[0] == prints[1] != prints[2]
