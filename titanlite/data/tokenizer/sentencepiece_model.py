"""sentencepiece models, as Llama 2 has."""

from __future__ import annotations

import hashlib
from pathlib import Path

import sentencepiece

from titanlite.data import DataError
from titanlite.data.tokenizer import Tokenizer

# Fields of sentencepiece's ModelProto after the pieces: how to merge them, and how to normalise text.
_TRAINER_SPEC, _NORMALIZER_SPEC = 2, 3


class SentencePieceTokenizer(Tokenizer):
    """The library's ids with the model's own options (normalisation, dummy prefix, byte fallback) and no others.

    Text never becomes a control piece such as `<s>`. User-defined pieces are found in text, as the library always does:
    they stand for text, and are not among `special_tokens`. Decoding a document returns its text, except for a first
    space (the dummy prefix looks the same) and for changes by normalisation.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        """content: of the file at `path`. Raises DataError if it is not a whole model with BOS and EOS."""
        key = f"model.tokenizer_path: {path}"
        try:
            fields = protobuf_fields(content)
            if not {_TRAINER_SPEC, _NORMALIZER_SPEC} <= fields:
                raise ValueError("its settings, which stand at the end, are missing")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (ValueError, RuntimeError) as error:
            raise DataError(
                f"{key} is a sentencepiece model that is damaged or cut short ({error}); copy the file again"
            ) from error
        self.vocab_size = self._processor.vocab_size()
        self.bos_id, self.eos_id = self._processor.bos_id(), self._processor.eos_id()
        for name, token_id in (("bos", self.bos_id), ("eos", self.eos_id)):
            if token_id < 0:
                raise DataError(
                    f"{key} has no {name.upper()} piece, and each document begins with BOS and ends with EOS; "
                    f"give a sentencepiece model trained with {name}_id"
                )
        self.special_tokens = {
            self._processor.id_to_piece(i): i for i in range(self.vocab_size) if self._processor.is_control(i)
        }
        self.fingerprint = hashlib.sha256(b"sentencepiece " + content).hexdigest()

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


def protobuf_fields(content: bytes) -> set[int]:
    """Return the numbers of the top fields of a protobuf message. Raises ValueError if it is not whole.

    The library's own reader takes a file that ends between two pieces for a small model with other settings.
    """
    found: set[int] = set()
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        if tag & 7 != 2:  # every field of a model is a message
            raise ValueError(f"an unknown field at byte {at}")
        length, at = _varint(content, at)
        at += length
        if at > len(content):
            raise ValueError(f"it has {len(content):,} bytes and should go on to {at:,}")
        found.add(tag >> 3)
    return found


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the base-128 number at byte `at`, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            raise ValueError(f"it ends within a number at byte {at:,}")
        value |= (content[at] & 0x7F) << shift
        at += 1
        if content[at - 1] < 0x80:
            return value, at
    raise ValueError(f"a number without end at byte {at:,}")
