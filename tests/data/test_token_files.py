"""Token files: the rows of prepared folders, of Megatron's files and of numpy's, each token a
target once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.token_folders import LENGTHS, SIZE, TOKENIZER, write_megatron, write_prepared
from titanlite.config.data_sections import Data
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.dataset_builder import TextReader
from titanlite.data.epoch_order import Permutation, epoch_key
from titanlite.data.rows import IGNORE, FilePlace
from titanlite.data.sequences import PackedDataset
from titanlite.data.token_files import open_tokens
from titanlite.data.token_paths import INDEX, is_tokens
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, load_tokenizer

TOTAL = sum(map(sum, LENGTHS))


def numbers_in(rows: PackedDataset, index: int) -> list[int]:
    return [number for number, _ in rows.documents_in(index)]


def rows_of(path: Path, seq_len: int = 7, **settings: Any) -> PackedDataset:
    return PackedDataset(open_tokens(str(path), TOKENIZER, SIZE), seq_len=seq_len, **settings)


# The order


def test_the_order_never_changes():
    """A run resumed with a later version must read on where it stopped."""
    places = map(Permutation(10, epoch_key(0, 1)), range(10))
    assert list(places) == [6, 8, 3, 4, 2, 5, 1, 9, 7, 0]
    assert Permutation(10**12, epoch_key(7, 3))(10**11) == 633123525162


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 4099])
def test_each_place_has_its_own_element(count):
    for epoch in range(3):
        place_of = Permutation(count, epoch_key(1, epoch))
        assert sorted(map(place_of, range(count))) == list(range(count))


# Rows


def test_documents_are_found_by_number(tmp_path):
    rows = rows_of(write_prepared(tmp_path / "a"), shuffle=False, mask_documents=True, epochs=2)
    lengths = [length for part in LENGTHS for length in part]
    owner = np.tile(np.repeat(np.arange(20), lengths), 2)
    for n in range(rows.total_sequences or 0):
        seen = owner[n * 7 : n * 7 + 8]
        borders = np.diff(seen) != 0
        assert numbers_in(rows, n) == [seen[0], *seen[1:][borders]]
        assert (rows.sequence(n).labels[: len(borders)][borders] == IGNORE).all()
    files = rows.corpus
    assert (files.documents, files.size) == (20, TOTAL)
    assert np.diff(files.offsets).tolist() == lengths
    assert files.place_of(14) == FilePlace("0.jsonl", 20)
    assert files.place_of(15) == FilePlace("2.jsonl", 6)


# Files


def test_megatron_documents_are_of_several_sequences(tmp_path):
    bin_file = write_megatron(tmp_path / "c4", [[3, 2], [4], [], [1, 1, 1]], code=4, dtype="<i4")
    for name in (bin_file, bin_file.with_suffix(".idx"), bin_file.with_suffix(""), tmp_path):
        assert is_tokens(str(name))
        rows = rows_of(name, seq_len=3, shuffle=False, epochs=1)
        found = np.concatenate([rows.sequence(n).tokens for n in range(4)])
        assert found.tolist() == list(range(1, 13))
        assert np.diff(rows.corpus.offsets).tolist() == [5, 4, 0, 3]
        assert [numbers_in(rows, n) for n in range(4)] == [[0], [0, 1], [1, 2, 3], [3]]
    bin_file.write_bytes(bin_file.read_bytes()[:-4])
    with pytest.raises(DataError, match="c4.idx: the sequences do not lie end to end in c4.bin"):
        rows_of(bin_file)
    bin_file.with_suffix(".idx").write_bytes(b"PK\x03\x04" * 20)
    with pytest.raises(DataError, match="c4.idx: no index of Megatron-LM"):
        rows_of(bin_file)


def test_a_change_of_foreign_files_changes_the_fingerprint(tmp_path):
    found = set()
    for place, value in ((0, 1), (0, 5), (99, 5)):
        ids = np.ones(100, dtype=np.uint16)
        ids[place] = value
        np.save(tmp_path / "a.npy", ids)
        found.add(rows_of(tmp_path / "a.npy").fingerprint)
    assert len(found) == 3


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    folder = write_prepared(tmp_path / "a")
    too_high = f"holds the id {TOTAL}, which is outside the model's vocabulary of {TOTAL}"
    with pytest.raises(DataError, match=too_high):
        open_tokens(str(folder), TOKENIZER, TOTAL)
    other = load_tokenizer(str(BUNDLED_SENTENCEPIECE))
    prints = (
        f"tokenizer {TOKENIZER.fingerprint[:16]} .*, and this config has {other.fingerprint[:16]}"
    )
    with pytest.raises(DataError, match=prints):
        open_tokens(str(folder), other, other.vocab_size)

    def build(**data):
        return TextReader(Data(**data), TOKENIZER, SIZE).train(
            Training(dataset_path=str(folder), seq_len=7)
        )

    with pytest.raises(
        DataError, match="data.text_key: 'body' has no effect on .*, which is prepared with 'text'"
    ):
        build(text_key="body")
    tokens = folder / "part-0.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(DataError, match="part-0.tokens has 5.. bytes instead of 5.."):
        build()
    (folder / INDEX).unlink()
    with pytest.raises(
        DataError,
        match="a is no finished folder of prepared tokens: it has no index.json",
    ):
        build()
