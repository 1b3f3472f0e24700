"""Best-fit packing: whole documents in rows, every token served once, and rows that tell their
documents.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.support.texts import make_corpus
from titanlite.config.data_sections import Data, DataSource
from titanlite.config.errors import ConfigError
from titanlite.data import DataError, EndOfData, best_fit, loader
from titanlite.data.batch_hash import batch_hash
from titanlite.data.best_fit import BestFitDataset
from titanlite.data.dataset_builder import TextReader
from titanlite.data.loader import Batch, TrainLoader
from titanlite.data.rows import IGNORE, max_documents
from titanlite.data.sequences import PackedDataset
from titanlite.data.text_files import BUNDLED
from titanlite.data.tokenize_files import Corpus
from titanlite.data.tokenizer import load_tokenizer


def ends(corpus: Corpus) -> set[int]:
    """The last token of each document; a token's id tells where it is in the corpus."""
    return set(corpus.tokens[corpus.offsets[1:] - 1].tolist())


@pytest.mark.parametrize("seq_len", [1, 7, 64, 599])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_serves_every_token_once_and_each_predicts_the_next_of_its_document(
    corpus, seq_len, shuffle, monkeypatch
):
    monkeypatch.setattr(best_fit, "GROUP", 10)
    dataset = BestFitDataset(
        corpus, seq_len=seq_len, seed=3, shuffle=shuffle, epochs=2, mask_documents=True
    )
    size = dataset.sequences_per_epoch
    last = ends(corpus)
    assert dataset.total_sequences == 2 * size
    for epoch in (0, 1):
        served: list[int] = []
        for row in map(dataset.sequence, range(epoch * size, (epoch + 1) * size)):
            assert row.documents is not None
            real = row.tokens != corpus.pad_id
            assert (row.labels[~real] == IGNORE).all()
            tokens = row.tokens[real]
            wanted = np.where(np.isin(tokens, list(last)), IGNORE, tokens + 1)
            assert (row.labels[real] == wanted).all()
            served += row.tokens[real].tolist()
            # A document's number changes where the document does, and at the padding.
            steps = np.diff(row.documents)
            assert set(steps.tolist()) <= {0, 1}
            assert row.documents[0] == 0
            new = (np.diff(row.tokens) != 1) | np.isin(row.tokens[:-1], list(last))
            assert (steps[real[1:]] == new[real[1:]]).all()
        assert sorted(served) == list(range(1, 600))
    with pytest.raises(EndOfData, match=f"{2 * size:,} sequences? in 2 epochs"):
        dataset.sequence(2 * size)
    assert dataset.describe().endswith(f"best-fit with {1 - 599 / (size * seq_len):.2%} padding")


def test_a_document_that_fits_is_never_cut_and_its_row_names_it(corpus):
    dataset = BestFitDataset(corpus, seq_len=64, epochs=1)
    seen: list[int] = []
    for i in range(dataset.sequences_per_epoch):
        documents = [number for number, _ in dataset.documents_in(i)]
        whole = [corpus.tokens[corpus.offsets[d] : corpus.offsets[d + 1]] for d in documents]
        row = dataset.sequence(i)
        assert row.tokens[row.tokens != corpus.pad_id].tolist() == np.concatenate(whole).tolist()
        assert row.documents is None
        seen += documents
    assert sorted(seen) == list(range(29))
    assert dataset.sequences_per_epoch == 10  # 599 tokens in 640 places


def test_the_order_never_changes_and_depends_on_seed_and_epoch(corpus):
    def order(dataset, epoch=0):
        size = dataset.sequences_per_epoch
        numbers = range(epoch * size, (epoch + 1) * size)
        return [[n for n, _ in dataset.documents_in(i)] for i in numbers]

    endless = BestFitDataset(corpus, seq_len=64, seed=3)
    assert order(endless)[:3] == [[2, 13], [21, 18, 8], [4, 11]]
    assert order(endless, 5) != order(endless)
    assert sorted(order(endless, 5)) == sorted(order(endless))
    assert sorted(order(BestFitDataset(corpus, seq_len=64, seed=4))) != sorted(order(endless))
    in_file_order = [
        min(documents) for documents in order(BestFitDataset(corpus, seq_len=64, shuffle=False))
    ]
    assert in_file_order == sorted(in_file_order)


def test_a_token_that_is_no_target_has_no_label(corpus):
    targets = np.random.default_rng(0).random(599) < 0.5
    masked = BestFitDataset(dataclasses.replace(corpus, targets=targets), seq_len=20, epochs=1)
    plain = BestFitDataset(corpus, seq_len=20, epochs=1)
    for i in range(plain.sequences_per_epoch):
        row = masked.sequence(i)
        label = plain.sequence(i).labels
        wanted = np.where((label != IGNORE) & targets[label - 1], label, IGNORE)
        assert row.labels.tolist() == wanted.tolist()
        assert row.tokens.tolist() == plain.sequence(i).tokens.tolist()


def test_a_stream_is_refused_with_the_other_ways():
    tokenizer = load_tokenizer()
    reader = TextReader(Data(streaming=True, packing="best-fit"), tokenizer, tokenizer.vocab_size)
    source = DataSource(path=str(BUNDLED["c4_test"]))
    with pytest.raises(ConfigError, match="titanlite data prepare.*data.streaming = false"):
        reader.open(source, "training", 8, None)


def test_split_rows_tell_their_documents(corpus):
    """Tokens and labels are those without masks, but a document's last token predicts nothing."""
    plain = PackedDataset(corpus, seq_len=50, seed=3, epochs=2)
    masked = PackedDataset(corpus, seq_len=50, seed=3, epochs=2, mask_documents=True)
    for i in range(plain.total_sequences or 0):
        row = masked.sequence(i)
        expected = plain.sequence(i)
        is_last = np.isin(row.tokens, list(ends(corpus)))
        real = np.count_nonzero(row.tokens != corpus.pad_id)
        assert expected.documents is None
        assert row.documents is not None
        assert row.tokens.tolist() == expected.tokens.tolist()
        assert row.labels.tolist() == np.where(is_last, IGNORE, expected.labels).tolist()
        assert row.documents[:real].tolist() == [0, *np.cumsum(is_last[: real - 1])]
        assert len(set(row.documents[real:])) <= 1


def test_only_other_settings_are_in_the_order_of_a_checkpoint(corpus):
    plain = {"seq_len": 8, "seed": 0, "shuffle": True, "epochs": None}
    assert PackedDataset(corpus, seq_len=8).settings == plain
    both = BestFitDataset(corpus, seq_len=8, mask_documents=True).settings
    assert both == {**plain, "mask_documents": True, "packing": "best-fit"}


def test_batches_carry_documents_and_the_hash_sees_them(corpus):
    (batch,) = TrainLoader(
        BestFitDataset(corpus, seq_len=64, mask_documents=True), 4, 4
    ).next_step()
    assert batch.documents is not None
    assert batch.documents.shape == (4, 64)
    (plain,) = TrainLoader(BestFitDataset(corpus, seq_len=64), 4, 4).next_step()
    assert plain.documents is None
    assert torch.equal(plain.tokens, batch.tokens)
    other = batch._replace(documents=torch.zeros_like(batch.documents))
    assert len({batch_hash([b]) for b in (batch, plain, other)}) == 3


def test_rows_keep_to_the_documents_that_gpus_take_and_others_are_refused():
    corpus = make_corpus([2] * 500)
    dataset = BestFitDataset(corpus, seq_len=256, epochs=1, mask_documents=True)
    assert (
        max(len(dataset.documents_in(i)) for i in range(dataset.sequences_per_epoch))
        == max_documents(256) - 1
        == 63
    )
    loader._check_documents(Batch(*map(torch.from_numpy, np.stack(dataset.sequence(0))[:, None])))  # type: ignore[arg-type]
    (split,) = TrainLoader(
        PackedDataset(corpus, seq_len=256, mask_documents=True), 1, 1
    ).next_step()
    with pytest.raises(
        DataError,
        match='256 tokens holds 128 documents, and on GPUs attention keeps 64.*"best-fit"',
    ):
        loader._check_documents(split)
