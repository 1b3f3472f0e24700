"""Token files of other programs, written by the definitions of their formats.

`iter_document_indices` of ai2-olmo-core 3.0.0 read the same documents, and `IndexedDataset` of
megatron-core 0.16.1 wrote and read them. All agreed with the documents of titanlite.

llm.c's header follows its dev/data/data_common.py, which modded-nanogpt's files share.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.support.token_folders import TOKENIZER, write_megatron

#: Magic number, version and type.
LLMC = {"gpt-2": (20240520, 1, "<u2"), "llama-3": (20240801, 7, "<u4")}


def make_documents(count: int = 40) -> list[list[int]]:
    """Return documents of BOS, ids and EOS, of 2 to 60 tokens."""
    rng = np.random.default_rng(0)
    return [
        [TOKENIZER.bos_id, *rng.integers(0, 2000, rng.integers(0, 59)).tolist(), TOKENIZER.eos_id]
        for _ in range(count)
    ]


def joined(documents: Sequence[Sequence[int]]) -> list[int]:
    return [token for document in documents for token in document]


def write_raw(file: Path, ids: Sequence[int], dtype: str = "<u2") -> Path:
    """Write ids and nothing else, as Dolma's `.npy` and nanoGPT's `.bin`."""
    file.write_bytes(np.array(ids, dtype).tobytes())
    return file


def write_llmc(file: Path, ids: Sequence[int], model: str = "gpt-2") -> Path:
    """Write 256 int32 and the ids."""
    magic, version, dtype = LLMC[model]
    header = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    file.write_bytes(header + np.array(ids, dtype).tobytes())
    return file


def _numpy(folder: Path, documents: Sequence[Sequence[int]]) -> Path:
    np.save(folder / "a.npy", np.array(joined(documents), np.uint16))
    return folder / "a.npy"


#: Name of a form → writes documents into an empty folder, and returns the file.
FORMS: dict[str, Callable[[Path, Sequence[Sequence[int]]], Path]] = {
    "Dolma": lambda folder, docs: write_raw(folder / "a.npy", joined(docs)),
    "nanoGPT": lambda folder, docs: write_raw(folder / "train.bin", joined(docs)),
    "llm.c, GPT-2": lambda folder, docs: write_llmc(folder / "a_train_000001.bin", joined(docs)),
    "llm.c, Llama 3": lambda folder, docs: write_llmc(folder / "a.bin", joined(docs), "llama-3"),
    "datatrove": lambda folder, docs: write_raw(folder / "a.ds", joined(docs)),
    "numpy": _numpy,
    "Megatron-LM": lambda folder, docs: write_megatron(
        folder / "a", [[len(document)] for document in docs], ids=joined(docs)
    ),
}
