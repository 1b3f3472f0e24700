"""Tokenizers of three kinds; the content of the file decides which.

tiktoken rank files (Llama 3), sentencepiece models (Llama 2) and Hugging Face's tokenizer.json all
become a `Tokenizer` with the ids of the library of that name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from titanlite.config.text_names import fetch_hint
from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.utils import logger

_ASSETS = Path(__file__).parents[1] / "assets"
BUNDLED_TOKENIZER = _ASSETS / "tokenizer.tiktoken"
BUNDLED_SENTENCEPIECE = _ASSETS / "tokenizer.model"

Kind = Literal["tiktoken", "sentencepiece", "tokenizer.json"]

#: The names that are read in a folder, the first that exists.
FOLDER_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")

_EXPECTED = "a tiktoken rank file, a sentencepiece model or a Hugging Face tokenizer.json"


class Tokenizer(ABC):
    """Text to token ids and back.

    `vocab_size` is one more than the highest id, special tokens included; `special_tokens` maps the
    names of tokens that stand for no text to their ids; `fingerprint` is the hex sha256 of
    everything in the file that decides the ids.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    special_tokens: dict[str, int]
    fingerprint: str
    #: What names BOS and EOS.
    named_by = "the file"
    #: Path or URL of the folder of the files beside it, if that is known: a chat template is one of
    #: them.
    folder: str | None = None

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the ids of `text`.

        Names of special tokens in it are plain text; lone surrogates become U+FFFD.
        """
        ids = self._encode(text if text.isascii() else _whole_characters(text))
        if bos:
            ids.insert(0, self.bos_id)
        if eos:
            ids.append(self.eos_id)
        return ids

    def encode_document(self, text: str) -> NDArray[np.int64]:
        """Return BOS, the ids of `text` and EOS as an array [ids].

        Several threads may call it at once.
        """
        ids = self._encode_array(text if text.isascii() else _whole_characters(text))
        return np.concatenate([[self.bos_id], ids, [self.eos_id]], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens by name; bytes that are not UTF-8 become U+FFFD.

        Raises DataError for an id outside the vocabulary.
        """
        names = {token_id: name for name, token_id in self.special_tokens.items()}
        parts: list[str] = []
        run: list[int] = []
        for position, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                raise DataError(
                    f"token id {token_id} at position {position} is outside the tokenizer's "
                    f"vocabulary of {self.vocab_size}; decode with the tokenizer that made the ids"
                )
            if token_id in names:
                # Some kinds drop the first space of a text: each document is decoded by itself.
                parts += [self._decode(run), names[token_id]]
                run = []
            else:
                run.append(int(token_id))
        return "".join([*parts, self._decode(run)])

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Return a new list of the ids of valid Unicode, without BOS and EOS."""

    def _encode_array(self, text: str) -> NDArray[np.integer]:
        """Return the ids as an array. Kinds that can do it without a list need a third of
        the time.
        """
        return np.array(self._encode(text), dtype=np.int64)

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids that are in the vocabulary and not special."""


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def load_tokenizer(path: str | None = None, family: str = "llama3") -> Tokenizer:
    """Load the tokenizer at `path`; None: a bundled one, sentencepiece for the family llama2, else
    tiktoken.

    In a folder it reads the tokenizer.json, else the tokenizer.model. Raises DataError with the
    file and the remedy if there is none, it is damaged, or its BOS and EOS are not known. A URL
    names a file, or with a slash at its end a folder.
    """
    if path is not None and is_url(path):
        from titanlite.data.tokenizer.files import load_url

        return load_url(path)
    bundled = BUNDLED_SENTENCEPIECE if family == "llama2" else BUNDLED_TOKENIZER
    file = bundled if path is None else find_file(Path(path))
    content = _read(file)
    kind = kind_of(content, file)
    tokenizer: Tokenizer
    if kind == "tiktoken":
        from titanlite.data.tokenizer.tiktoken_ranks import TiktokenTokenizer, parse_ranks

        tokenizer = TiktokenTokenizer(parse_ranks(content, file))
    elif kind == "sentencepiece":
        from titanlite.data.tokenizer.sentencepiece_model import SentencePieceTokenizer

        tokenizer = SentencePieceTokenizer(content, file)
    else:
        from titanlite.data.tokenizer.hf_json import JsonTokenizer

        tokenizer = JsonTokenizer(content, file)
    if path is not None:
        tokenizer.folder = str(Path(path) if Path(path).is_dir() else file.parent)
        logger.info(
            f"tokenizer: {file} ({kind}), {tokenizer.vocab_size:,} ids; "
            f"BOS {tokenizer.bos_id} and EOS {tokenizer.eos_id} by {tokenizer.named_by}"
        )
    return tokenizer


def kind_of(content: bytes, path: Path) -> Kind:
    """Return the kind of tokenizer file, whole or damaged.

    Raises DataError, naming `path`, for any other file.
    """
    where = f"model.tokenizer_path: {path}"
    start = content[:4096].lstrip()
    if not content.strip():
        raise DataError(f"{where} is empty; copy the tokenizer again")
    if start.startswith(b"version https://git-lfs"):
        raise DataError(
            f"{where} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`"
        )
    if start.startswith(b"<"):
        raise DataError(
            f"{where} is a web page, perhaps of a failed download; expected {_EXPECTED}"
        )
    if start.startswith((b"{", b"[")):
        return "tokenizer.json"
    # A sentencepiece model begins with its first piece: field 1, the length, and in it field 1, the
    # piece's name.
    if re.match(rb"\x0a[\x00-\x7f]\x0a[\x00-\x7f]", content):
        return "sentencepiece"
    if b"\0" in start:
        raise DataError(f"{where} is a binary file of another kind; expected {_EXPECTED}")
    return "tiktoken"


def find_file(path: Path) -> Path:
    """Return the file of a tokenizer, which a folder may hold. Raises DataError."""
    if not path.is_dir():
        return path
    found = [path / name for name in FOLDER_FILES if (path / name).is_file()]
    if found:
        if len(found) > 1:
            names = " and ".join(str(file.relative_to(path)) for file in found)
            logger.info(f"tokenizer: {path} holds {names}; the first is used")
        return found[0]
    others = sorted(
        file.name for file in path.iterdir() if file.suffix in (".tiktoken", ".model", ".json")
    )
    raise DataError(
        (
            f"model.tokenizer_path: the folder {path} holds no {' or '.join(FOLDER_FILES)}; give "
            "the file itself"
        )
        + (f": {', '.join(others)}" if others else "")
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        hint = (
            fetch_hint(str(path))
            or f"give the path of {_EXPECTED}, or leave the key out for the bundled tokenizer"
        )
        raise DataError(f"model.tokenizer_path: {path} does not exist; {hint}") from None
    except OSError as error:
        raise DataError(f"model.tokenizer_path: {path} cannot be read: {error.strerror}") from error
