"""Texts, tokens and files of them, of known content."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from titanlite.config.data_sections import Data
from titanlite.config.sections import Training
from titanlite.data.dataset_builder import TextReader
from titanlite.data.sequences import PackedDataset
from titanlite.data.tokenize_files import Corpus
from titanlite.data.tokenizer import load_tokenizer


def make_corpus(lengths: list[int]) -> Corpus:
    """Documents of these lengths; every token of the corpus has an id of its own, so each can be
    traced.
    """
    total = sum(lengths)
    return Corpus(
        tokens=np.arange(1, total + 1, dtype=np.uint16),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        pad_id=0,
        fingerprint="0" * 64,
        files=(Path("none"),),
    )


def write_texts(path: Path, texts: list[str], raw: dict[int, str] | None = None) -> Path:
    """Write records of `texts`; raw: lines by number, from 1, that replace a record."""
    lines = [
        (raw or {}).get(n, json.dumps({"text": text})) for n, text in enumerate(texts, start=1)
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def write_files(folder: Path, *names: str) -> Path:
    """Write files of one record each, whose text is the name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            parquet = pytest.importorskip("pyarrow.parquet")
            pyarrow = pytest.importorskip("pyarrow")
            parquet.write_table(pyarrow.table({"text": [name]}), path)
        else:
            path.write_text(json.dumps({"text": name}) + "\n" if ".json" in name else name)
    return folder


CLONE = [
    "README.md",
    "LICENSE.txt",
    ".git/a.jsonl",
    ".gitattributes",
    "dataset_infos.json",
    "data/_SUCCESS",
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
    "data/test-00000-of-00001.parquet",
]
TOKENIZER = load_tokenizer()


def write_records(folder: Path, files: int = 3, records: int = 20) -> Path:
    folder.mkdir()
    for n in range(files):
        texts = [f"file {n} record {i} " + "word " * (i % 7) for i in range(records)]
        write_texts(folder / f"{n}.jsonl", texts)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows_of(path: Path, epochs: int | None = None) -> PackedDataset:
    training = Training(dataset_path=str(path), seq_len=8, epochs=epochs)
    found = TextReader(Data(), TOKENIZER, 2304).train(training)
    assert isinstance(found, PackedDataset)
    return found


#: Llama 3's template, and ChatML with the marks of `transformers` around the assistant's turns.
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 "
    "%}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if "
    "add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
