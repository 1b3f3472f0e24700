"""Token files of other programs: the same batches from each form, documents, types, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.foreign_tokens import (
    FORMS,
    joined,
    make_documents,
    write_llmc,
    write_raw,
)
from tests.support.token_folders import SIZE, TOKENIZER, write_megatron
from titanlite.config.data_sections import Data, DataSource
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.batch_hash import step_hash
from titanlite.data.dataset_builder import TextReader
from titanlite.data.rows import Rows
from titanlite.data.token_files import TokenFiles, TokenKeys, open_tokens
from titanlite.data.token_paths import is_tokens

BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id
BATCH = 12


def opened(path: Path | str, **keys: Any) -> TokenFiles:
    return open_tokens(str(path), TOKENIZER, SIZE, keys=TokenKeys(**keys))


def built(path: Path | str, **data: Any) -> Rows:
    training = Training(dataset_path=str(path), seq_len=32)
    return TextReader(Data(**data), TOKENIZER, SIZE).train(training)


def hashes(rows: Rows) -> list[str | None]:
    return [step_hash(rows, step * BATCH, BATCH) for step in range(6)]


def lengths(files: TokenFiles) -> list[int]:
    return np.diff(files.offsets).tolist()


# The same tokens


@pytest.mark.parametrize("packing", ["split", "best-fit"])
def test_the_same_tokens_give_the_same_batches_in_every_form(tmp_path, packing):
    documents = make_documents()
    ids = joined(documents)
    found: dict[str, list[str | None]] = {}
    for name, write in FORMS.items():
        folder = tmp_path / name
        folder.mkdir()
        path = write(folder, documents)
        found[name] = hashes(built(path, packing=packing, mask_documents=True))
        assert found[name] == found["Dolma"], name
        rows = built(path, shuffle=False)
        for at in range(0, 320, 32):
            row = rows.sequence(at // 32)
            assert row.tokens.tolist() == ids[at : at + 32], name
            assert row.labels.tolist() == ids[at + 1 : at + 33], name
    assert len(found) == 7
    assert len(set(found["Dolma"])) == 6


def test_a_folder_and_a_pattern_are_read_in_the_order_of_names(tmp_path):
    documents = make_documents(30)
    whole = write_raw(tmp_path / "whole.bin", joined(documents))
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in (2, 0, 1):
        write_raw(folder / f"x_{number}.bin", joined(documents[10 * number : 10 * number + 10]))
    (folder / "notes.md").write_text("about")
    expected = hashes(built(whole, mask_documents=True))
    rows = built(folder, mask_documents=True)
    assert hashes(rows) == expected
    assert rows.listing is not None
    assert "3 files of tokens in .bin" in rows.listing.describe()
    assert "passed over: notes.md (other kinds of files)" in rows.listing.describe()
    assert hashes(built(folder / "x_*.bin", mask_documents=True)) == expected


# Documents


def test_documents_end_after_eos_and_at_the_end_of_a_file(tmp_path):
    write_raw(tmp_path / "a.bin", [5, 6, EOS, EOS, 7, EOS, 8])
    write_raw(tmp_path / "b.bin", [9, EOS])
    files = opened(tmp_path)
    assert (
        files.describe()
        == f"9 tokens per epoch, from token files, cut into documents after id {EOS}"
    )
    assert lengths(files) == [3, 1, 2, 1, 2]
    assert files.begins_in(1, 8).tolist() == [1, 3, 4, 6, 7]
    assert files.place_of(3) == (str(tmp_path / "a.bin"), 4)
    assert files.place_of(4) == (str(tmp_path / "b.bin"), 1)


def test_documents_begin_with_the_id_that_begins_the_first_file(tmp_path):
    """llm.c and its kin write the end-of-text id before each document, and cut files anywhere."""
    write_raw(tmp_path / "a.bin", [BOS, 6, 7, BOS, 8, 9])
    write_raw(tmp_path / "b.bin", [10, BOS, 5])
    assert lengths(opened(tmp_path)) == [3, 3, 1, 2]
    write_llmc(tmp_path / "c.bin", [6, 7, BOS, 8, 9])
    assert lengths(opened(tmp_path / "c.bin")) == [2, 3]
    write_llmc(tmp_path / "d.bin", [6, 7, EOS, 8, 9])
    assert lengths(opened(tmp_path / "d.bin")) == [2, 3]


def test_a_scan_in_groups_finds_the_same_documents(tmp_path, monkeypatch):
    documents = make_documents(30)
    path = write_raw(tmp_path / "a.bin", joined(documents))
    expected = [len(document) for document in documents]
    for group in (1, 2, 7, 64):
        monkeypatch.setattr("titanlite.data.foreign.raw._TOKENS", group)
        assert lengths(opened(path)) == expected


def test_masks_of_datatrove_are_refused(tmp_path):
    path = write_raw(tmp_path / "a.ds", [5, EOS, 6, 7, EOS])
    assert lengths(opened(path)) == [2, 3]
    (tmp_path / "a.ds.loss").write_bytes(bytes(5))
    for place in (path, tmp_path):
        with pytest.raises(DataError, match="a.ds.loss masks tokens, which is not read"):
            opened(place)


def test_the_way_of_cutting_is_part_of_the_order_where_it_matters(tmp_path):
    raw = write_raw(tmp_path / "a.bin", [5, 6, EOS, 7, EOS])
    indexed = write_megatron(tmp_path / "m", [[3], [2]], ids=[5, 6, EOS, 7, EOS])
    assert built(raw, mask_documents=True).settings["documents"] == f"after id {EOS}"
    assert built(raw, packing="best-fit").settings["documents"] == f"after id {EOS}"
    assert "documents" not in built(raw).settings
    assert "documents" not in built(indexed, mask_documents=True).settings


# Types


def test_a_type_that_is_guessed_is_said(tmp_path, logged):
    path = write_raw(tmp_path / "a.npy", [5, 6, EOS] * 10)
    opened(path, dtype="uint16")
    opened(write_llmc(tmp_path / "a.bin", [5, 6]))
    assert logged() == ""
    opened(path)
    assert "a.npy does not tell the type of its ids. They are read as uint16" in logged()
    assert "(data.token_dtype names another type)" in logged()


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_wider_ids_are_not_read_as_ids_and_zeros(tmp_path, dtype):
    ids = joined(make_documents())
    path = write_raw(tmp_path / "a.npy", ids, dtype)
    with pytest.raises(DataError, match="a.npy has no header, and its ids could be uint16 or uint"):
        opened(path)
    files = opened(path, dtype=dtype)
    assert files.read(0, files.size).tolist() == ids
    source = DataSource(path=str(path), token_dtype=dtype)
    rows = TextReader(Data(shuffle=False), TOKENIZER, SIZE).open(source, "data.source[0]", 8, None)
    assert rows.sequence(0).tokens.tolist() == ids[:8]


def test_ids_beyond_the_vocabulary_name_file_place_and_key(tmp_path):
    ids = joined(make_documents())
    path = write_raw(tmp_path / "a.bin", [*ids[:100], SIZE, *ids])
    with pytest.raises(
        DataError,
        match=rf"token 100 \(from 0\): id {SIZE} is outside the model's vocabulary of {SIZE}. "
        ".*or set data.token_dtype if they are not uint16",
    ):
        opened(path)
    many = np.full(4_000_000, 5, "<i4")
    many[100_000] = -1
    np.save(tmp_path / "many.npy", many)
    files = opened(tmp_path / "many.npy")  # the samples at the start have missed it
    with pytest.raises(DataError, match=r"token 100,000 \(from 0\): id -1 is outside"):
        files.read(99_990, 100_010)


def test_a_vocabulary_over_65536_means_four_bytes(tmp_path):
    class Large:
        vocab_size = 100_278
        bos_id = eos_id = 100_257

    def large(path):
        return open_tokens(str(path), Large(), Large.vocab_size)  # type: ignore[arg-type]

    ids = [5, 90_000, Large.eos_id, 70_000, 8, Large.eos_id]
    path = write_raw(tmp_path / "a.npy", ids, "<u4")
    assert large(path).read(0, 6).tolist() == ids
    with pytest.raises(DataError, match="a.npy, token 0 .* if they are not uint32"):
        large(write_raw(path, [50_000, 60_000, 7, 8], "<u2"))


def test_a_type_that_says_nothing_new_is_refused(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one two")
    source = DataSource(path=str(text), token_dtype="uint16")
    with pytest.raises(DataError, match=r"data.source\[1\].token_dtype: .* is text"):
        TextReader(Data(), TOKENIZER, SIZE).open(source, "data.source[1]", 8, None)
    mixture = Data(source=[DataSource(path=str(text))], token_dtype="uint16")
    with pytest.raises(DataError, match="data.token_dtype: no source is of token files"):
        TextReader(mixture, TOKENIZER, SIZE).train(Training(seq_len=8))


# Bad input


@pytest.mark.parametrize(
    ("content", "dtype", "message"),
    [
        ([], "<u2", "a.bin is empty; copy it again, or remove it"),
        (
            [5, 0, 6, 0, 7],
            "u1",
            "a.bin has 5 bytes, which are no whole number of ids of 2 bytes .uint16.. It was cut",
        ),
        # Headers of llm.c: its magic number, a version and the number of tokens.
        (
            [20240520, 1, 3, *[0] * 253, 5],
            "<i4",
            "a.bin has 1,028 bytes instead of 1,030 for 3 tokens of uint16; copy it again",
        ),
        (
            [20240520, 2, 4, *[0] * 253, 5, 5],
            "<i4",
            "a.bin is llm.c's, of version 2; expected version 1",
        ),
    ],
    ids=["empty", "half a token", "llm.c, cut", "llm.c, version 2"],
)
def test_bad_files_are_named(tmp_path, content, dtype, message):
    with pytest.raises(DataError, match=message):
        opened(write_raw(tmp_path / "a.bin", content, dtype))


def test_fractions_and_missing_files_are_named(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(9))
    with pytest.raises(
        DataError, match=r"a.npy: expected one row of whole numbers, found float64 of shape \(9,\)"
    ):
        opened(tmp_path / "a.npy")
    with pytest.raises(
        DataError, match=r"\*.ds does not exist; give a token file, a pattern or a folder"
    ):
        opened(tmp_path / "*.ds")


def test_folders_of_several_kinds_or_splits_are_refused(tmp_path):
    for number in (1, 2):
        write_llmc(tmp_path / f"fineweb_train_{number:06d}.bin", [5, 6, 7])
    write_llmc(tmp_path / "fineweb_val_000000.bin", [8, 9])
    (tmp_path / "meta.pkl").write_bytes(b"never opened")
    with pytest.raises(DataError, match="several splits"):
        opened(tmp_path)
    assert opened(tmp_path, split="train").size == 6
    assert opened(tmp_path, split="validation").size == 2
    assert opened(tmp_path / "fineweb_train_*.bin").size == 6
    write_raw(tmp_path / "fineweb_train_1.npy", [5, 6])
    with pytest.raises(DataError, match="several kinds"):
        opened(tmp_path, split="train")


def test_which_paths_are_of_token_files(tmp_path):
    for name in ("a.bin", "b.npy", "c.ds", "x*.bin"):
        assert is_tokens(str(tmp_path / name))
    for url in ("https://host/a.bin?sig=1", "s3://b/x/*.npy", "hf://datasets/o/n/a.ds"):
        assert is_tokens(url)
        with pytest.raises(DataError, match="are read from a disk, not from [a-z0-9]+:/"):
            opened(url)
    assert not is_tokens("s3://bucket/folder/")
    assert not is_tokens("https://host/a.jsonl?x=a.bin")
    write_raw(tmp_path / "part-0.npy", [5])
    (tmp_path / "part-0.csv.gz").write_bytes(b"Dolma's list of documents")
    assert is_tokens(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert not is_tokens(str(tmp_path))
