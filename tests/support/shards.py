"""Files of a stream, as they lie on servers and hubs."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np

from titanlite.data.formats import Columns, Record
from titanlite.data.lanes import StreamText
from titanlite.data.stream import StreamRows
from titanlite.data.text_files import TextFiles

RANDOM = random.Random(1)
#: They hardly compress: each file has more than 100 KB.
TEXTS = [f"text {i} {RANDOM.randbytes(RANDOM.randrange(300)).hex()}" for i in range(1000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
CARD = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: "en/c4-train.*.json.gz"}
  - {split: validation, path: "en/c4-validation.*.json.gz"}
---
"""


def write_c4(root: Path, shards: int) -> None:
    """Write `TEXTS` as a repository in the form of allenai/c4."""
    folder = root / "datasets/allenai/c4/en"
    folder.mkdir(parents=True)
    (folder.parent / "README.md").write_text(CARD)
    lines = LINES.splitlines()
    size = len(TEXTS) // shards
    for k in range(shards):
        content = gzip.compress(b"\n".join(lines[k * size : (k + 1) * size]))
        (folder / f"c4-train.{k:05}-of-{shards:05}.json.gz").write_bytes(content)
    (folder / "c4-validation.00000-of-00001.json.gz").write_bytes(
        gzip.compress(LINES[: LINES.index(b"\n")])
    )


SEQ = 8


def encode(record: Record) -> tuple[np.ndarray, int]:
    """BOS 1, five tokens of the document's number, EOS 2: each token tells its document."""
    number = int(record.text)
    return np.array([1, *[number + 10] * (number % 5 + 1), 2]), np.zeros(0, dtype=bool)


def write_shards(folder: Path, sizes: list[int]) -> list[str]:
    """Write files of so many documents; their texts count on over all files."""
    first = 0
    names = []
    for number, size in enumerate(sizes):
        path = folder / f"part-{number:02}.jsonl.gz"
        lines = "".join(json.dumps({"text": str(first + i)}) + "\n" for i in range(size))
        path.write_bytes(gzip.compress(lines.encode()))
        names.append(str(path))
        first += size
    return names


def make_stream(names: list[str], **options) -> StreamRows:
    defaults = {
        "seq_len": SEQ,
        "pad_id": 0,
        "seed": 3,
        "buffer": 12,
        "lanes": 4,
        "description": "test",
    }
    given = {**defaults, **options}
    of_rows = {name: given.pop(name) for name in ("lanes", "ranks", "workers") if name in given}
    text = StreamText(TextFiles(tuple(names), Columns()), encode, **given)
    return StreamRows(text, **of_rows)


def first_rows(rows: StreamRows, count: int) -> list[list[int]]:
    return [rows.sequence(i).tokens.tolist() for i in range(count)]
