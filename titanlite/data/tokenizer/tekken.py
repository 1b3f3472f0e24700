"""Mistral's tekken.json: byte pairs for tiktoken, behind a block of special tokens.

The file has `config` (the pattern that splits text, the sizes of vocabulary and block, a version),
`vocab` (tokens by rank, in base64) and, in newer files, `special_tokens`. The special tokens have
the first ids, and a token's id is its rank plus their number. Ranks beyond the vocabulary's size
are not used. So `mistral-common` reads the file, and its ids are those here.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from msgspec import Struct
from msgspec.json import decode
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.tokenizer.base import Tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import safe_segments, spans_of

BOS = "<s>"
EOS = "</s>"
#: The special tokens of files that list none, versions up to 7, by id.
_UNLISTED = (
    "<unk>",
    BOS,
    EOS,
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
_UNLISTED_VERSIONS = [f"v{number}" for number in range(1, 8)]


class TekkenTokenizer(Tokenizer):
    """The ids of `mistral-common`. Text never becomes a special token, nor what looks like one."""

    named_by = "Mistral"

    def __init__(self, content: bytes, path: Path) -> None:
        """content: of the file at `path`.

        Raises DataError if it is no whole tekken.json or has no BOS and EOS.
        """
        try:
            file = decode(content, type=_File)
            names = file.special_names()
            #: Bytes of each token → its rank, the id less `first_id`.
            self.ranks = file.ranks()
            self.pattern = file.config.pattern
            self._encoding = tiktoken.Encoding(
                name="tekken", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens={}
            )
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"model.tokenizer_path: {path} is no tekken.json as Mistral writes it, or is cut "
                f"short: {error}; copy the file again"
            ) from None
        self.special_tokens = {name: number for number, name in enumerate(names)}
        self.bos_id = self.special_tokens[BOS]
        self.eos_id = self.special_tokens[EOS]
        self.vocab_size = file.config.default_vocab_size
        #: Special tokens, which stand before all others.
        self.first_id = len(names)
        digest = hashlib.sha256(b"tekken " + self.pattern.encode())
        for name, number in self.special_tokens.items():
            digest.update(b"%d %s " % (number, name.encode()))
        for token, rank in self.ranks.items():
            digest.update(b"%d %d " % (rank, len(token)) + token)
        self.fingerprint = digest.hexdigest()

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode_array(text).tolist()
        return ids

    def _encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self._encode(text)
        return ids, spans_of(self._encoding, [token_id - self.first_id for token_id in ids])

    def _encode_array(self, text: str) -> NDArray[np.integer]:
        # No other cuts than those of endless runs: `mistral-common` makes none.
        parts = [
            self._encoding.encode_to_numpy(segment, disallowed_special=())
            for segment in safe_segments(text, most=sys.maxsize)
        ]
        return np.concatenate(parts).astype(np.int64) + self.first_id

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode([token_id - self.first_id for token_id in ids])


class _Config(Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: Any = None


class _Token(Struct):
    rank: int
    #: In base64.
    token_bytes: bytes


class _Special(Struct):
    rank: int
    token_str: str


class _File(Struct):
    """A tekken.json."""

    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None

    def ranks(self) -> dict[bytes, int]:
        """Return the bytes of each token that is used → its rank. Raises ValueError."""
        config = self.config
        used = config.default_vocab_size - config.default_num_special_tokens
        if config.default_num_special_tokens < 0 or not 256 <= used <= len(self.vocab):
            raise ValueError(
                f"config.default_vocab_size is {config.default_vocab_size} with "
                f"{config.default_num_special_tokens} special tokens, and vocab has "
                f"{len(self.vocab)} tokens"
            )
        found: dict[bytes, int] = {}
        for rank, token in enumerate(self.vocab[:used]):
            name = token.token_bytes
            if token.rank != rank or rank < 256 and name != bytes([rank]):
                raise ValueError(
                    f"vocab[{rank}] is {token}, expected rank {rank}, and bytes as the first 256"
                )
            if not name or name in found:
                raise ValueError(f"vocab[{rank}] is {name!r:.40}, which is empty or stands twice")
            found[name] = rank
        return found

    def special_names(self) -> list[str]:
        """Return the names of the special tokens by id; those that the file does not name have
        numbers. Raises ValueError.
        """
        count = self.config.default_num_special_tokens
        names = list(_UNLISTED)
        if self.special_tokens is not None:
            names = [token.token_str for token in self.special_tokens]
            if [token.rank for token in self.special_tokens] != list(range(len(names))):
                raise ValueError("special_tokens are not in the order of their ranks, from 0")
        elif self.config.version not in _UNLISTED_VERSIONS:
            raise ValueError(
                f"special_tokens is missing, and config.version is {self.config.version!r}"
            )
        names += [f"<SPECIAL_{number}>" for number in range(len(names), count)]
        if len(names) > count or len({*names}) != len(names) or not {BOS, EOS} <= {*names}:
            raise ValueError(
                f"special_tokens has {len(names)} names, {len({*names})} of them different, and "
                f"config.default_num_special_tokens is {count}; expected {BOS!r} and {EOS!r} among "
                "them"
            )
        return names
