"""Tokenizers of three kinds; the content of the file decides which.

There are tiktoken rank files (Llama 3), sentencepiece models (Llama 2) and Hugging Face's
tokenizer.json. Each becomes a `Tokenizer` with the ids of the library of that name.
"""

from __future__ import annotations

from titanlite.config.dataset_registry import BUNDLED_TOKENIZER_NAME as BUNDLED
from titanlite.data.tokenizer.base import Tokenizer
from titanlite.data.tokenizer.load_local import (
    BUNDLED_SENTENCEPIECE,
    BUNDLED_TOKENIZER,
    FOLDER_FILES,
    Kind,
    bundled,
    find_file,
    kind_of,
    load_file,
    load_local,
)

__all__ = [
    "BUNDLED_SENTENCEPIECE",
    "BUNDLED_TOKENIZER",
    "FOLDER_FILES",
    "Kind",
    "Tokenizer",
    "find_file",
    "kind_of",
    "load_tokenizer",
]


def load_tokenizer(path: str = BUNDLED, family: str = "llama3") -> Tokenizer:
    """Load the tokenizer at `path`; "bundled" is sentencepiece for llama2, else tiktoken.

    In a folder it reads tokenizer.json, else tokenizer.model. Raises DataError if it is missing,
    damaged, or without known BOS and EOS.
    """
    if path == BUNDLED:
        return load_file(bundled(family), family)[0]
    return load_local(path, family)
