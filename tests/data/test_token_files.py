"""Token files: the rows of prepared folders, of Megatron's files and of numpy's, each token a
target once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.token_folders import LENGTHS, SIZE, TOKENIZER, write_megatron, write_prepared
from titanlite.config.data_sections import Data, DataSource
from titanlite.config.sections import Training
from titanlite.data import DataError, EndOfData
from titanlite.data.rows import IGNORE, FilePlace
from titanlite.data.sequences import PackedDataset, Permutation, epoch_key
from titanlite.data.text import TextReader, build_dataset
from titanlite.data.token_files import open_tokens
from titanlite.data.token_paths import INDEX, is_tokens
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, load_tokenizer

TOTAL = sum(map(sum, LENGTHS))


def numbers_in(rows: PackedDataset, index: int) -> list[int]:
    return [number for number, _ in rows.documents_in(index)]


def rows_of(path: Path, **settings: Any) -> PackedDataset:
    return PackedDataset(open_tokens(str(path), TOKENIZER, SIZE), **{"seq_len": 7, **settings})


# The order


def test_the_order_never_changes() -> None:
    """A run resumed with a later version must read on where it stopped."""
    assert [Permutation(10, epoch_key(0, 0))(i) for i in range(10)] == [
        6,
        9,
        8,
        2,
        0,
        1,
        7,
        3,
        5,
        4,
    ]
    assert [Permutation(10, epoch_key(0, 1))(i) for i in range(10)] == [
        6,
        8,
        3,
        4,
        2,
        5,
        1,
        9,
        7,
        0,
    ]
    assert [Permutation(10**12, epoch_key(7, 3))(i) for i in (0, 10**11)] == [
        364607967650,
        633123525162,
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 29, 1000, 4099])
def test_each_place_has_its_own_element(count: int) -> None:
    for epoch in range(3):
        assert sorted(map(Permutation(count, epoch_key(1, epoch)), range(count))) == list(
            range(count)
        )


def test_every_element_is_as_likely_at_every_place() -> None:
    """Chi-square over 2,000 keys, 12 elements at 12 places: 121 degrees of freedom, 99.99 % are
    below 184.
    """
    table = np.zeros((12, 12))
    for key in range(2000):
        for place in range(12):
            table[place, Permutation(12, epoch_key(key, 0))(place)] += 1
    expected = 2000 / 12
    assert ((table - expected) ** 2 / expected).sum() < 184


# Rows


@pytest.mark.parametrize("seq_len", [1, 7, 64, 599])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_token_is_a_target_once_per_epoch(
    tmp_path: Path, seq_len: int, shuffle: bool
) -> None:
    rows = rows_of(
        write_prepared(tmp_path / "a"), seq_len=seq_len, shuffle=shuffle, epochs=3, seed=3
    )
    stream = list(range(1, TOTAL + 1)) * 3
    assert rows.total_sequences is not None
    order = sorted(range(rows.total_sequences), key=rows.window)
    assert (order == list(range(rows.total_sequences))) == (
        not shuffle or rows.sequences_per_epoch == 1
    )
    inputs: list[int] = []
    targets: list[int] = []
    for row in map(rows.sequence, order):
        assert row.tokens.shape == row.labels.shape == (seq_len,)
        assert row.tokens.dtype == row.labels.dtype == np.int64
        inputs += row.tokens[row.labels != IGNORE].tolist()
        targets += row.labels[row.labels != IGNORE].tolist()
    assert (inputs, targets) == (stream[:-1], stream[1:])
    with pytest.raises(EndOfData, match=f"{rows.total_sequences:,} sequences? in 3 epochs$"):
        rows.sequence(rows.total_sequences)
    served = [[rows.window(e * rows.sequences_per_epoch + i) for i in range(20)] for e in range(2)]
    assert seq_len > 64 or (np.diff(served, axis=0) == rows.sequences_per_epoch).all() == (
        not shuffle
    )


def test_documents_are_found_by_number(tmp_path: Path) -> None:
    rows = rows_of(write_prepared(tmp_path / "a"), shuffle=False, mask_documents=True, epochs=2)
    ends = np.cumsum([length for part in LENGTHS for length in part])
    owner = np.searchsorted(ends, np.arange(2 * TOTAL) % TOTAL, side="right")
    epoch = np.arange(2 * TOTAL) // TOTAL
    for n in range(rows.total_sequences or 0):
        span = slice(n * 7, n * 7 + 8)
        expected = [
            pair[1]
            for pair in dict.fromkeys(zip(epoch[span].tolist(), owner[span].tolist(), strict=True))
        ]
        assert numbers_in(rows, n) == expected
        numbers = rows.sequence(n).documents
        assert numbers is not None
        assert numbers.dtype == np.int32
        changes = np.diff(owner[span][:7]) != 0
        borders = np.diff(owner[span]) != 0
        assert (rows.sequence(n).labels[: len(borders)][borders] == IGNORE).all()
        assert numbers[: len(changes) + 1].tolist() == [0, *np.cumsum(changes).tolist()]
    files = rows.corpus
    assert (files.documents, files.size) == (20, TOTAL)
    assert np.diff(files.offsets).tolist() == [n for part in LENGTHS for n in part]
    assert files.place_of(14) == FilePlace("0.jsonl", 20)
    assert files.place_of(15) == FilePlace("2.jsonl", 6)
    assert files.offsets[15:17].tolist() == [sum(LENGTHS[0]), sum(LENGTHS[0]) + 40]


def test_prompts_are_no_targets(tmp_path: Path) -> None:
    rows = rows_of(write_prepared(tmp_path / "a", masked=2), epochs=1)
    targets = [
        label
        for n in range(rows.total_sequences or 0)
        for label in rows.sequence(n).labels.tolist()
    ]
    starts = np.cumsum([0, *(length for part in LENGTHS for length in part)])[:-1]
    expected = set(range(2, TOTAL + 1)) - {int(start) + n for start in starts for n in (1, 2)}
    assert sorted(set(targets) - {IGNORE}) == sorted(expected)


# Files


def test_megatron_documents_are_of_several_sequences(tmp_path: Path) -> None:
    bin_file = write_megatron(tmp_path / "c4", [[3, 2], [4], [], [1, 1, 1]], code=4, dtype="<i4")
    for name in (bin_file, bin_file.with_suffix(".idx"), bin_file.with_suffix(""), tmp_path):
        assert is_tokens(str(name))
        rows = rows_of(name, seq_len=3, shuffle=False, epochs=1)
        assert [rows.sequence(n).tokens.tolist() for n in range(4)] == [
            [1, 2, 3],
            [4, 5, 6],
            [7, 8, 9],
            [10, 11, 12],
        ]
        assert np.diff(rows.corpus.offsets).tolist() == [5, 4, 0, 3]
        assert [numbers_in(rows, n) for n in range(4)] == [[0], [0, 1], [1, 2, 3], [3]]
    cut = bin_file.read_bytes()
    bin_file.write_bytes(cut[:-4])
    with pytest.raises(DataError, match="c4.idx: the sequences do not lie end to end in c4.bin"):
        rows_of(bin_file)
    bin_file.with_suffix(".idx").write_bytes(b"PK\x03\x04" * 20)
    with pytest.raises(DataError, match="c4.idx: no index of Megatron-LM"):
        rows_of(bin_file)


def test_each_npy_file_is_one_document(tmp_path: Path) -> None:
    np.save(tmp_path / "1.npy", np.arange(10, dtype=np.uint32))
    np.save(tmp_path / "2.npy", np.arange(10, 15, dtype=np.int64))
    rows = rows_of(tmp_path, seq_len=7, shuffle=False, epochs=1)
    assert rows.sequence(1).tokens.tolist() == list(range(7, 14))
    assert (rows.corpus.documents, rows.documents_in(1)) == (2, [(0, 3), (1, 5)])
    np.save(tmp_path / "3.npy", np.zeros((2, 3)))
    with pytest.raises(
        DataError,
        match=r"3.npy: expected one row of whole numbers, found float64 of shape \(2, 3\)",
    ):
        rows_of(tmp_path)


def test_text_beside_arrays_and_indexes_of_other_programs_stays_text(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(10))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "a.jsonl.idx").write_bytes(b"")
    assert not is_tokens(str(tmp_path / "a.jsonl"))
    assert not is_tokens(str(tmp_path))
    for name in ("a.jsonl", "a.jsonl.idx"):
        (tmp_path / name).unlink()
    assert is_tokens(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert not is_tokens(str(tmp_path))
    source = DataSource(path=str(tmp_path), format="text")
    (tmp_path / "a.parquet").rename(tmp_path / "a.txt")
    rows = TextReader(Data(), TOKENIZER, SIZE).open(source, "data.source[0]", 7, None)
    assert rows.describe() == "1 document, 6 tokens per epoch"


def test_an_impossible_id_names_file_and_place(tmp_path: Path) -> None:
    ids = np.ones(3_000_000, dtype=np.int32)
    ids[1_500] = -1
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(
        DataError,
        match=r"a.npy, token 1,500 \(from 0\): id -1 is outside the model's vocabulary of 2304",
    ):
        rows_of(tmp_path / "a.npy")
    ids[1_500] = 1
    ids[9_000] = SIZE
    np.save(tmp_path / "a.npy", ids)
    rows = rows_of(tmp_path / "a.npy", shuffle=False)  # the sample at the start has missed it
    with pytest.raises(DataError, match=r"a.npy, token 9,000 \(from 0\): id 2304"):
        rows.sequence(9_000 // 7)
    with pytest.raises(
        DataError, match=f"holds the id {TOTAL}, which is outside the model's vocabulary of {TOTAL}"
    ):
        open_tokens(str(write_prepared(tmp_path / "a")), TOKENIZER, TOTAL)


def test_a_change_of_foreign_files_changes_the_fingerprint(tmp_path: Path) -> None:
    found = set()
    for change in ({}, {0: 5}, {99: 5}):
        ids = np.ones(100, dtype=np.uint16)
        for place, value in change.items():
            ids[place] = value
        np.save(tmp_path / "a.npy", ids)
        found.add(rows_of(tmp_path / "a.npy").fingerprint)
    assert len(found) == 3


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "a")
    other = load_tokenizer(str(BUNDLED_SENTENCEPIECE))
    prints = (
        f"tokenizer {TOKENIZER.fingerprint[:16]} .*, and this config has {other.fingerprint[:16]}"
    )
    with pytest.raises(DataError, match=prints):
        open_tokens(str(folder), other, other.vocab_size)

    def build(**data: Any) -> Any:
        return build_dataset(
            Training(dataset_path=str(folder), seq_len=7), Data(**data), TOKENIZER, SIZE
        )

    assert build(text_key="text").sequence(0).tokens.shape == (7,)
    with pytest.raises(
        DataError, match="data.text_key: 'body' has no effect on .*, which is prepared with 'text'"
    ):
        build(text_key="body")
    tokens = folder / "part-0.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(DataError, match="part-0.tokens has 5.. bytes instead of 5.."):
        build()
    tokens.unlink()
    with pytest.raises(DataError, match="part-0.tokens cannot be read: No such file"):
        build()
    index = json.loads((folder / INDEX).read_text())
    index["parts"][0]["tokens"] += 1
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        DataError,
        match="index.json is damaged .it does not fit its fingerprint.; remove the folder",
    ):
        build()
    (folder / INDEX).unlink()
    with pytest.raises(
        DataError,
        match="a is no finished folder of prepared tokens: it has no index.json",
    ):
        build()
