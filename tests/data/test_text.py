"""From keys to sequences: whole or streamed text, URLs, mixtures, and errors that name the key."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer
from tests.support.texts import write_texts
from titanlite.config.data_sections import Data, DataSource
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.dataset_builder import TextReader
from titanlite.data.mixtures.mixed_rows import MixedRows
from titanlite.data.rows import Rows
from titanlite.data.sequences import PackedDataset
from titanlite.data.stream import StreamRows
from titanlite.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
TEXTS = [f"The number {n} has the square {n * n}." for n in range(40)]


def read(data: Data, training: Training, **more) -> Rows:
    return TextReader(data, TOKENIZER, TOKENIZER.vocab_size, **more).train(training)


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


def test_streamed_and_whole_text_have_the_same_documents(folder: Path) -> None:
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
            tokens = [
                token for text in expected for token in TOKENIZER.encode_document(text).tolist()
            ]
            assert sorted(whole.corpus.tokens.tolist()) == sorted(tokens)


def test_the_order_of_a_source_does_not_depend_on_the_others(folder: Path) -> None:
    sources = [
        DataSource(name="numbers", path=str(folder), weight=3),
        DataSource(name="one", path=str(folder / "1.jsonl"), epochs=1),
    ]
    with pytest.raises(DataError, match="a stream, whose length is not known"):
        read(Data(source=sources, streaming=True), Training(seq_len=32))
    mixed = read(Data(source=sources), Training(seq_len=32))
    assert isinstance(mixed, MixedRows)
    alone = read(Data(source=sources[:1]), Training(seq_len=32))
    for index in range(40):
        source, number = mixed.locate(index)
        if source == 0:
            assert mixed.sequence(index).tokens.tolist() == alone.sequence(number).tokens.tolist()


def test_only_one_rank_lists_files_and_the_others_read_the_same(folder: Path) -> None:
    shared: dict[str, object] = {}

    def share(name, make):
        return shared.setdefault(name, make()) if name not in shared else shared[name]

    training = Training(dataset_path=str(folder), seq_len=32)
    first = read(Data(streaming=True), training, share=share)
    write_texts(folder / "9.jsonl", ["too late"])
    second = read(Data(streaming=True), training, share=share)
    assert first.text.shards.names == second.text.shards.names
    assert len(shared) == 1
    assert read(Data(streaming=True), training).fingerprint != first.fingerprint


def test_the_fingerprint_follows_files_and_columns_and_not_the_folder(
    folder: Path, tmp_path: Path
) -> None:
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
