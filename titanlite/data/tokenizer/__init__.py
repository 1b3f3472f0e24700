"""Tokenizers of three kinds, told apart by what is in the file.

tiktoken rank files (Llama 3), sentencepiece models (Llama 2) and Hugging Face's tokenizer.json all become a `Tokenizer`
with the ids that the library of that name gives.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Literal

from titanlite.config.plans import TokenizerPlan
from titanlite.data.errors import DataError
from titanlite.data.tokenizer.base import Tokenizer

__all__ = ["BUNDLED_SENTENCEPIECE", "BUNDLED_TOKENIZER", "Kind", "Tokenizer", "kind_of", "load_tokenizer"]

logger = logging.getLogger("titanlite")

_ASSETS = Path(__file__).parents[1] / "assets"
BUNDLED_TOKENIZER = _ASSETS / "tokenizer.tiktoken"
BUNDLED_SENTENCEPIECE = _ASSETS / "tokenizer.model"
_BUNDLED = {"tiktoken": BUNDLED_TOKENIZER, "sentencepiece": BUNDLED_SENTENCEPIECE}

Kind = Literal["tiktoken", "sentencepiece", "tokenizer.json"]

#: In a folder, the first of these that is there.
_IN_A_FOLDER = ("tokenizer.json", "tokenizer.model")

_EXPECTED = "a tiktoken rank file, a sentencepiece model or a Hugging Face tokenizer.json"


def load_tokenizer(plan: TokenizerPlan) -> Tokenizer:
    """The tokenizer of `plan.path`, or the bundled one of the kind `plan.bundled`.

    Of a folder the tokenizer.json is read, else the tokenizer.model. Raises DataError naming the file, and what to do,
    if there is none, it is damaged, or its BOS and EOS are not known.
    """
    path = _BUNDLED[plan.bundled] if plan.path is None else _file(Path(plan.path))
    content = _read(path)
    kind = kind_of(content, path)
    named_by = "the file"
    tokenizer: Tokenizer
    if kind == "tiktoken":
        from titanlite.data.tokenizer.tiktoken_ranks import TiktokenTokenizer, parse_ranks

        tokenizer, named_by = TiktokenTokenizer(parse_ranks(content, path)), "Llama 3"
    elif kind == "sentencepiece":
        from titanlite.data.tokenizer.sentencepiece_model import SentencePieceTokenizer

        tokenizer = SentencePieceTokenizer(content, path)
    else:
        from titanlite.data.tokenizer.hf_json import JsonTokenizer

        tokenizer = json_tokenizer = JsonTokenizer(content, path)
        named_by = json_tokenizer.named_by
    if plan.path is not None:
        logger.info(
            f"tokenizer: {path} ({kind}), {tokenizer.vocab_size:,} ids; "
            f"BOS {tokenizer.bos_id} and EOS {tokenizer.eos_id} by {named_by}"
        )
    return tokenizer


def kind_of(content: bytes, path: Path) -> Kind:
    """What kind of tokenizer file `content` is, whole or damaged. Raises DataError, naming `path`, if it is none."""
    where = f"model.tokenizer_path: {path}"
    start = content[:4096].lstrip()
    if not content.strip():
        raise DataError(f"{where} is empty; copy the tokenizer again")
    if start.startswith(b"version https://git-lfs"):
        raise DataError(f"{where} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`")
    if start.startswith(b"<"):
        raise DataError(f"{where} is a web page, perhaps of a failed download; expected {_EXPECTED}")
    if start.startswith((b"{", b"[")):
        return "tokenizer.json"
    # A sentencepiece model begins with its first piece: field 1, the length, and in it field 1, the piece's name.
    if re.match(rb"\x0a[\x00-\x7f]\x0a[\x00-\x7f]", content):
        return "sentencepiece"
    if b"\0" in start:
        raise DataError(f"{where} is a binary file of another kind; expected {_EXPECTED}")
    return "tiktoken"


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [path / name for name in _IN_A_FOLDER if (path / name).is_file()]
    if found:
        if len(found) > 1:
            logger.info(f"tokenizer: {path} holds {' and '.join(_IN_A_FOLDER)}; the first is read")
        return found[0]
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".tiktoken", ".model", ".json"))
    raise DataError(
        f"model.tokenizer_path: the folder {path} holds no {' or '.join(_IN_A_FOLDER)}; give the file itself"
        + (f": {', '.join(others)}" if others else "")
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"model.tokenizer_path: {path} does not exist; give the path of {_EXPECTED}, "
            "or leave the key out for the bundled tokenizer"
        ) from None
    except OSError as error:
        raise DataError(f"model.tokenizer_path: {path} cannot be read: {error.strerror}") from error
