"""Text in, batches out: sources, tokenizers, the global order of sequences, loaders.

Names are looked up when they are first used, so that importing this package loads neither torch nor tiktoken.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.data.background import Prefetcher, ValidationPrefetcher
    from titanlite.data.errors import DataError, EndOfData
    from titanlite.data.loader import Batch, TrainLoader, ValidationLoader, add_hashes, batch_hash
    from titanlite.data.packing import PackedDataset, build_dataset, build_validation_dataset
    from titanlite.data.tokenizer import Tokenizer, load_tokenizer

_HOME = {
    "DataError": "errors",
    "EndOfData": "errors",
    "Batch": "loader",
    "TrainLoader": "loader",
    "ValidationLoader": "loader",
    "ValidationPrefetcher": "background",
    "add_hashes": "loader",
    "batch_hash": "loader",
    "PackedDataset": "packing",
    "Prefetcher": "background",
    "build_dataset": "packing",
    "build_validation_dataset": "packing",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}

__all__ = [
    "Batch",
    "DataError",
    "EndOfData",
    "PackedDataset",
    "Prefetcher",
    "Tokenizer",
    "TrainLoader",
    "ValidationLoader",
    "ValidationPrefetcher",
    "add_hashes",
    "batch_hash",
    "build_dataset",
    "build_validation_dataset",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
