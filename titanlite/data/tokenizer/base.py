"""Interface of all kinds of tokenizers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError

#: Names of special tokens that end a turn of a conversation.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot|>",
    "<|eom|>",
    "<|return|>",
    "<|call|>",
    "<|END_OF_TURN_TOKEN|>",
)


class Tokenizer(ABC):
    """Text to token ids and back.

    `vocab_size` is one more than the highest id. `special_tokens` maps names of tokens without text
    to ids. `fingerprint` is the hex sha256 of all that decides the ids.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    special_tokens: dict[str, int]
    fingerprint: str
    #: Source of the names of BOS and EOS.
    named_by = "the file"
    #: Folder of the files beside it, if that is known. A chat template is one of them.
    folder: str | None = None

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end a text: EOS, and those that end a turn."""
        named = [self.special_tokens[one] for one in _END_OF_TURN if one in self.special_tokens]
        return list(dict.fromkeys([self.eos_id, *named]))

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the ids of `text`.

        Names of special tokens in it are plain text; lone surrogates become U+FFFD.
        """
        ids = self._encode(text if text.isascii() else whole_characters(text))
        if bos:
            ids.insert(0, self.bos_id)
        if eos:
            ids.append(self.eos_id)
        return ids

    def encode_document(self, text: str) -> NDArray[np.int64]:
        """Return BOS, the ids of `text` and EOS [ids]. Threads may call it at once."""
        ids = self._encode_array(text if text.isascii() else whole_characters(text))
        return np.concatenate([[self.bos_id], ids, [self.eos_id]], dtype=np.int64)

    def encode_rendered(self, text: str) -> tuple[list[int], NDArray[np.int64]]:
        """Return the ids of a rendered conversation, and their characters' begin and end [tokens,
        2].

        Names of special tokens are tokens, as in `apply_chat_template`.
        """
        names = sorted(self.special_tokens, key=len, reverse=True)
        ids: list[int] = []
        spans = [np.zeros((0, 2), dtype=np.int64)]
        done = 0
        for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
            size = len(part.encode())
            if part in self.special_tokens:
                found, places = [self.special_tokens[part]], [(0, size)]
            else:
                found, places = self._encode_spans(part)
            ids += found
            spans.append(done + np.array(places, dtype=np.int64).reshape(-1, 2))
            done += size
        starts = (np.frombuffer(text.encode(), dtype=np.uint8) & 0xC0) != 0x80
        # Characters in the first n bytes. A token that is a part of a character spans it.
        characters = np.concatenate([[0], np.cumsum(starts), [len(text) + 1]])
        begins, ends = np.concatenate(spans).T
        return ids, np.stack([characters[begins + 1] - 1, characters[ends]], axis=1)

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
                    f"vocabulary of {self.vocab_size}. Decode with the tokenizer that made the ids"
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

    def _encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids as `_encode`, and where the bytes of each begin and end."""
        raise NotImplementedError

    def _encode_array(self, text: str) -> NDArray[np.integer]:
        return np.array(self._encode(text), dtype=np.int64)

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids that are in the vocabulary and not special."""


def whole_characters(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
