"""Folders of token files, written by the definitions of their formats."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_hexdigest

from tests.support.texts import TOKENIZER
from titanlite.data.prepared_tokens import fingerprint_of
from titanlite.data.token_paths import INDEX, KIND

SIZE = TOKENIZER.vocab_size
LENGTHS = [[2 + (i * 17) % 39 for i in range(15)], [], [40, 3, 3, 2, 97]]


def write_prepared(folder: Path, lengths: list[list[int]] = LENGTHS, masked: int = 0) -> Path:
    """Write a folder by the format's definition; token t of the corpus has id t + 1.

    masked: of each document.
    """
    folder.mkdir()
    parts = []
    at = 0
    for number, documents in enumerate(lengths):
        offsets = np.cumsum([0, *documents], dtype="<i8")
        size = int(offsets[-1])
        content = {
            "tokens": np.arange(at + 1, at + 1 + size, dtype="<u2").tobytes(),
            "offsets": offsets.tobytes(),
        }
        if masked:
            targets = np.ones(size, dtype=bool)
            for begin in offsets[:-1]:
                targets[begin : begin + masked] = False
            content["targets"] = np.packbits(targets, bitorder="little").tobytes()
        for suffix, data in content.items():
            (folder / f"part-{number}.{suffix}").write_bytes(data)
        part = {"name": f"part-{number}", "tokens": size, "documents": len(documents)}
        sizes = {suffix: len(data) for suffix, data in content.items()}
        hashes = {suffix: f"xxh3:{xxh3_128_hexdigest(data)}" for suffix, data in content.items()}
        sources = [[number, 0, 5]]
        parts.append({**part, "bytes": sizes, "checksums": hashes, "sources": sources})
        at += size
    index = {"format": KIND, "version": 1, "dtype": "<u2", "tokenizer": TOKENIZER.fingerprint}
    index |= {"max_id": at, "tokenizer_path": None, "vocab_size": SIZE, "parts": parts}
    index |= {"options": {"text_key": "text"}, "files": [f"{n}.jsonl" for n in range(len(lengths))]}
    (folder / INDEX).write_text(json.dumps({**index, "fingerprint": fingerprint_of(index)}))
    return folder


def write_megatron(
    stem: Path,
    documents: list[list[int]],
    code: int = 8,
    dtype: str = "<u2",
    ids: list[int] | None = None,
) -> Path:
    """Write `.bin` and `.idx` as Megatron-LM's IndexedDatasetBuilder does; documents: lengths of
    their sequences. ids: None: 1, 2, 3, …
    """
    lengths = np.array([n for document in documents for n in document], dtype="<i4")
    tokens = np.array(ids or np.arange(1, lengths.sum() + 1)).astype(dtype)
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * tokens.dtype.itemsize
    bounds = np.cumsum([0, *map(len, documents)], dtype="<i8")
    head = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QB", 1, code)
        + struct.pack("<QQ", len(lengths), len(bounds))
    )
    stem.with_suffix(".bin").write_bytes(tokens.tobytes())
    arrays = lengths.tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes()
    stem.with_suffix(".idx").write_bytes(head + arrays)
    return stem.with_suffix(".bin")
