"""A text that is read in no time: the first documents of the bundled one."""

from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path

import titanlite

_SHARDS = Path(titanlite.__file__).resolve().parent / "data" / "assets" / "train"
DOCUMENTS = 40


def write_text(folder: Path) -> Path:
    """Write it below `folder`, as a file for training.dataset_path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.jsonl"
    with gzip.open(min(_SHARDS.glob("*.gz")), "rt", encoding="utf-8") as shard:
        path.write_text("".join(islice(shard, DOCUMENTS)), encoding="utf-8")
    return path
