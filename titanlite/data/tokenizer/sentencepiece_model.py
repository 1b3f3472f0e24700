"""sentencepiece models, as Llama 2 has."""

from __future__ import annotations

import hashlib
from pathlib import Path

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from sentencepiece.sentencepiece_pb2 import SentencePieceText  # type: ignore[attr-defined]

from titanlite.data import DataError
from titanlite.data.tokenizer.base import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """The library's ids with the model's own options (normalisation, dummy prefix, byte fallback).

    Text never becomes a control piece such as `<s>`. User-defined pieces are found in text and are
    no `special_tokens`. Decoding returns the text but for normalisation and a first space.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        """Raises DataError if it is not a whole model with BOS and EOS."""
        key = f"model.tokenizer_path: {path}"
        try:
            # The library takes a file that ends between two pieces for a small model with other
            # settings.
            # protobuf, which reads the file's parts, is a requirement of tensorboard.
            parsed = ModelProto.FromString(content)
            if not (parsed.HasField("trainer_spec") and parsed.HasField("normalizer_spec")):
                raise ValueError("its settings, which stand at the end, are missing")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (ValueError, RuntimeError, DecodeError) as error:
            raise DataError(
                f"{key} is a sentencepiece model that is damaged or cut short ({error}); copy the "
                "file again"
            ) from error
        self.vocab_size = self._processor.vocab_size()
        self.bos_id, self.eos_id = self._processor.bos_id(), self._processor.eos_id()
        for name, token_id in (("bos", self.bos_id), ("eos", self.eos_id)):
            if token_id < 0:
                raise DataError(
                    f"{key} has no {name.upper()} piece, and each document begins with BOS and "
                    f"ends with EOS. Give a sentencepiece model trained with {name}_id"
                )
        self.special_tokens = {
            self._processor.id_to_piece(i): i
            for i in range(self.vocab_size)
            if self._processor.is_control(i)
        }
        self.fingerprint = hashlib.sha256(b"sentencepiece " + content).hexdigest()

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        content = self._processor.encode(text, out_type="serialized_proto")
        pieces = SentencePieceText.FromString(content).pieces
        return [piece.id for piece in pieces], [(piece.begin, piece.end) for piece in pieces]

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)
