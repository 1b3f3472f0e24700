"""Sequences by number: every token a target once, over documents and epochs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.config.plans import DataPlan, TokenizerPlan, ValidationPlan
from titanlite.data import EndOfData, PackedDataset, build_dataset, build_validation_dataset, load_tokenizer
from titanlite.data.corpus import Corpus
from titanlite.data.errors import DataError
from titanlite.data.order import epoch_order
from titanlite.data.packing import IGNORE
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, Tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import SPECIAL_TOKENS, TiktokenTokenizer, read_ranks


def stream_of(corpus: Corpus, epochs: int, seed: int, shuffle: bool = True) -> list[int]:
    """All epochs' tokens end to end, put together the plain way."""
    stream: list[int] = []
    for epoch in range(epochs):
        for document in epoch_order(len(corpus.offsets) - 1, seed, epoch, shuffle):
            stream += corpus.tokens[corpus.offsets[document] : corpus.offsets[document + 1]].tolist()
    return stream


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64, 599, 600, 1500])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_token_is_a_target_once_per_epoch(corpus: Corpus, seq_len: int, shuffle: bool) -> None:
    dataset = PackedDataset(corpus, seq_len=seq_len, seed=3, shuffle=shuffle, epochs=3)
    stream = stream_of(corpus, 3, 3, shuffle)
    assert dataset.total_sequences is not None
    inputs: list[int] = []
    targets: list[int] = []
    by_place = sorted(range(dataset.total_sequences), key=dataset.window)
    assert [dataset.window(i) for i in by_place] == list(range(dataset.total_sequences))
    for i in by_place:
        tokens, labels = dataset.sequence(i)
        assert tokens.shape == labels.shape == (seq_len,)
        assert tokens.dtype == labels.dtype == np.int64
        inputs += tokens[labels != IGNORE].tolist()
        targets += labels[labels != IGNORE].tolist()
    assert inputs == stream[:-1]
    assert targets == stream[1:]


def test_without_end_the_stream_goes_on_and_on(corpus: Corpus) -> None:
    endless = PackedDataset(corpus, seq_len=64, seed=3)
    stream = stream_of(corpus, 12, 3)
    for i in (0, 1, 8, 9, 10, 50, 100):
        tokens, labels = endless.sequence(i)
        start = endless.window(i) * 64
        assert tokens.tolist() == stream[start : start + 64]
        assert labels.tolist() == stream[start + 1 : start + 65]


def test_neighbours_of_the_text_are_served_apart(corpus: Corpus) -> None:
    """Windows of one document in one batch would make a batch of one text; each pass mixes them anew."""
    dataset = PackedDataset(corpus, seq_len=5, seed=3)
    size = dataset.sequences_per_epoch
    first, second = ([dataset.window(i) for i in range(b * size, (b + 1) * size)] for b in (0, 1))
    assert sorted(first) == list(range(size)) and sorted(second) == list(range(size, 2 * size))
    assert [w - size for w in second] != first
    assert sum(abs(b - a) == 1 for a, b in zip(first, first[1:], strict=False)) < 0.1 * size
    plain = PackedDataset(corpus, seq_len=5, seed=3, shuffle=False)
    assert [plain.window(i) for i in range(size)] == list(range(size))


def test_a_sequence_depends_on_its_number_alone(corpus: Corpus) -> None:
    numbers = np.random.default_rng(0).permutation(60).tolist()
    dataset = PackedDataset(corpus, seq_len=50, seed=1)
    straight = [PackedDataset(corpus, seq_len=50, seed=1).sequence(i) for i in range(60)]
    for i in numbers:
        assert np.array_equal(dataset.sequence(i), straight[i])


def test_each_epoch_has_a_new_order_and_seeds_differ(corpus: Corpus) -> None:
    first = stream_of(corpus, 2, 0)
    assert first[:599] != first[599:]
    assert sorted(first[:599]) == sorted(first[599:])
    a, b = (PackedDataset(corpus, seq_len=599, seed=seed).sequence(0)[0] for seed in (0, 1))
    assert a.tolist() != b.tolist()


def test_last_sequence_is_padded_with_labels_of_no_weight(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=100, shuffle=False, epochs=1)
    assert dataset.total_sequences == 6  # 598 targets
    tokens, labels = dataset.sequence(5)
    assert labels.tolist() == [*range(502, 600), IGNORE, IGNORE]
    assert tokens.tolist() == [*range(501, 600), corpus.pad_id]
    with pytest.raises(EndOfData, match=r"this text has 6 sequences in 1 epoch$"):
        dataset.sequence(6)


def test_counts(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=100, epochs=2)
    assert (dataset.documents, dataset.tokens_per_epoch, dataset.sequences_per_epoch) == (29, 599, 6)
    assert dataset.total_sequences == 12  # 1,197 targets
    assert PackedDataset(corpus, seq_len=100).total_sequences is None


def test_few_orders_are_kept(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=100)
    for i in range(100):
        dataset.sequence(i)
    assert len(dataset._orders) <= 3 and len(dataset._windows) <= 2


@pytest.mark.parametrize(("key", "value"), [("seq_len", 0), ("epochs", 0)])
def test_impossible_sizes(corpus: Corpus, key: str, value: int) -> None:
    with pytest.raises(DataError, match=f"training.{key}: 0"):
        PackedDataset(corpus, **{"seq_len": 4, key: value})


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": t, "timestamp": "", "url": ""}) + "\n" for t in texts))
    return str(path)


def test_documents_begin_with_bos_and_end_with_eos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerPlan())
    path = write(tmp_path / "c4.jsonl", ["In the beginning", "", "God created <|end_of_text|>"])
    plan = DataPlan(dataset="c4", path=path, seq_len=4, shuffle=False)
    corpus = build_dataset(plan, tokenizer, tokenizer.vocab_size).corpus
    assert corpus.tokens.dtype == np.uint16
    documents = [corpus.tokens[a:b].tolist() for a, b in zip(corpus.offsets, corpus.offsets[1:], strict=False)]
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert documents[0] == [bos, *tokenizer.encode("In the beginning"), eos]
    assert documents[1] == [bos, eos]
    assert documents[2].count(eos) == 1
    assert tokenizer.decode(documents[2][1:-1]) == "God created <|end_of_text|>"


def test_large_vocabularies_get_wide_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerPlan())
    plan = DataPlan(dataset="c4", path=write(tmp_path / "a.jsonl", ["a b c"]), seq_len=4)
    assert build_dataset(plan, tokenizer, 65_536).corpus.tokens.dtype == np.uint16
    assert build_dataset(plan, tokenizer, 128_256).corpus.tokens.dtype == np.uint32


def test_fingerprint_follows_text_and_tokenizer_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerPlan())
    plan = DataPlan(dataset="c4", path=write(tmp_path / "a.jsonl", ["one", "two"]), seq_len=4)

    def fingerprint(plan: DataPlan, tokenizer: Tokenizer = tokenizer) -> str:
        return build_dataset(plan, tokenizer, tokenizer.vocab_size).fingerprint

    first = fingerprint(plan)
    assert fingerprint(replace(plan, path=write(tmp_path / "renamed.json", ["one", "two"]))) == first
    assert fingerprint(replace(plan, seq_len=8, seed=5, shuffle=False, epochs=2)) == first
    others = [["one", "twp"], ["two", "one"], ["onetwo"], ["one", "two", ""], ["on", "etwo"]]
    found = {fingerprint(replace(plan, path=write(tmp_path / "b.jsonl", texts))) for texts in others}
    assert len(found | {first}) == 6
    ranks = read_ranks(BUNDLED_TOKENIZER)
    assert fingerprint(plan, TiktokenTokenizer(ranks, SPECIAL_TOKENS[:128])) != first


def test_settings_say_the_rest(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=16, seed=2, shuffle=False, epochs=3)
    assert dataset.settings == {"seq_len": 16, "seed": 2, "shuffle": False, "epochs": 3}


def test_plans_reach_the_data() -> None:
    tokenizer = load_tokenizer(TokenizerPlan())
    validation = build_validation_dataset(ValidationPlan(seq_len=128), tokenizer, tokenizer.vocab_size)
    assert (validation.seq_len, validation.shuffle, validation.epochs) == (128, False, 1)
    with pytest.raises(DataError, match="^validation.dataset_path: /nowhere does not exist"):
        build_validation_dataset(ValidationPlan(path="/nowhere"), tokenizer, tokenizer.vocab_size)
    training = build_dataset(DataPlan(seq_len=96, seed=4, epochs=2), tokenizer, tokenizer.vocab_size)
    assert training.settings == {"seq_len": 96, "seed": 4, "shuffle": True, "epochs": 2}
    assert training.tokens_per_epoch > 10 * validation.tokens_per_epoch


def test_the_example_in_the_docs_runs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert names["first"].tokens.shape == names["second"].labels.shape == (4, 512)


def test_long_reading_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("titanlite.data.corpus.SAY_EVERY", -1.0)
    monkeypatch.setattr("titanlite.data.corpus.logger.handlers", [])  # whatever an earlier test has left there
    monkeypatch.setattr("titanlite.data.corpus.logger.propagate", True)
    tokenizer = load_tokenizer(TokenizerPlan())
    path = write(tmp_path / "a.jsonl", ["one", "two"])
    with caplog.at_level("INFO"):
        build_dataset(DataPlan(dataset="c4", path=path, seq_len=4), tokenizer, tokenizer.vocab_size)
    assert [r.getMessage() for r in caplog.records] == [
        f"reading text: {n} documents, 0 MB so far; now in {path}, file 1 of 1" for n in (1, 2)
    ]
