"""Tokenizers from local files, whose content decides the kind, and the bundled ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from titanlite.config.dataset_registry import BUNDLED_TOKENIZER_NAME, fetch_hint
from titanlite.data import DataError
from titanlite.data.tokenizer.base import Tokenizer
from titanlite.utils import logger

_ASSETS = Path(__file__).parents[1] / "assets"
BUNDLED_TOKENIZER = _ASSETS / "tokenizer.tiktoken"
BUNDLED_SENTENCEPIECE = _ASSETS / "tokenizer.model"

Kind = Literal["tiktoken", "sentencepiece", "tokenizer.json"]

#: The names that are read in a folder, the first that exists.
FOLDER_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")

_EXPECTED = "a tiktoken rank file, a sentencepiece model or a Hugging Face tokenizer.json"


def bundled(family: str) -> Path:
    """Return the bundled tokenizer of a family of models."""
    return BUNDLED_SENTENCEPIECE if family == "llama2" else BUNDLED_TOKENIZER


def tokenizer_path(path: str, family: str) -> str:
    """Return where a run's tokenizer is, as manifests keep it."""
    if path == BUNDLED_TOKENIZER_NAME:
        path = str(bundled(family))
    return str(Path(path).resolve())


def load_local(path: str, family: str = "llama3") -> Tokenizer:
    """Load the tokenizer of a file or a folder. Raises as `load_tokenizer`."""
    file = find_file(Path(path))
    tokenizer, kind = load_file(file, family)
    tokenizer.folder = str(file.parent)
    if Path(path).is_dir():
        tokenizer.folder = str(Path(path))
    logger.info(
        f"tokenizer: {file} ({kind}), {tokenizer.vocab_size:,} ids; "
        f"BOS {tokenizer.bos_id} and EOS {tokenizer.eos_id} by {tokenizer.named_by}"
    )
    return tokenizer


def load_file(file: Path, family: str) -> tuple[Tokenizer, Kind]:
    """Load a tokenizer's file and tell its kind."""
    content = _read(file)
    kind = kind_of(content, file)
    if kind == "tiktoken":
        from titanlite.data.tokenizer.tiktoken_ranks import load_ranks

        return load_ranks(content, file, family), kind
    if kind == "sentencepiece":
        from titanlite.data.tokenizer.sentencepiece_model import SentencePieceTokenizer

        return SentencePieceTokenizer(content, file), kind
    from titanlite.data.tokenizer.hf_json import JsonTokenizer

    return JsonTokenizer(content, file), kind


def kind_of(content: bytes, path: Path) -> Kind:
    """Return a tokenizer file's kind, also if it is damaged. Raises DataError for others."""
    where = f"model.tokenizer_path: {path}"
    start = content[:4096].lstrip()
    if not content.strip():
        raise DataError(f"{where} is empty; copy the tokenizer again")
    if start.startswith(b"version https://git-lfs"):
        raise DataError(
            f"{where} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`"
        )
    if start.startswith((b"{", b"[")):
        return "tokenizer.json"
    # A sentencepiece model begins with its first piece: field 1, the length, and in it field 1, the
    # piece's name.
    if re.match(rb"\x0a[\x00-\x7f]\x0a[\x00-\x7f]", content):
        return "sentencepiece"
    return "tiktoken"


def find_file(path: Path) -> Path:
    """Return a tokenizer's file, perhaps in a folder. Raises DataError."""
    if not path.is_dir():
        return path
    for name in FOLDER_FILES:
        if (path / name).is_file():
            return path / name
    raise DataError(
        f"model.tokenizer_path: the folder {path} holds no {' or '.join(FOLDER_FILES)}; give the "
        "file itself"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        hint = fetch_hint(str(path))
        raise DataError(f"model.tokenizer_path: {path} does not exist; {hint}") from None
    except OSError as error:
        raise DataError(f"model.tokenizer_path: {path} cannot be read: {error.strerror}") from error
