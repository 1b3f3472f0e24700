"""Mistral's tekken.json: byte pairs for tiktoken, behind a block of special tokens.

The file has `config` (the pattern that splits text, the sizes of vocabulary and block, a version),
`vocab` (tokens by rank, in base64) and, in newer files, `special_tokens`. The special tokens have
the first ids, and a token's id is its rank plus their number. Ranks beyond the vocabulary's size
are not used. So `mistral-common` reads the file, and its ids are those here.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.tokenizer.base import Tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import safe_segments, spans_of
from titanlite.utils import parse_json

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
_LAST_UNLISTED = 7


class TekkenTokenizer(Tokenizer):
    """The ids of `mistral-common`. Text never becomes a special token, nor what looks like one."""

    named_by = "Mistral"

    def __init__(self, content: bytes, path: Path) -> None:
        """content: of the file at `path`.

        Raises DataError if it is no whole tekken.json or has no BOS and EOS.
        """
        file = _File(content, f"model.tokenizer_path: {path}")
        self.special_tokens = {name: number for number, name in enumerate(file.special_tokens)}
        for name in (BOS, EOS):
            if name not in self.special_tokens:
                raise file.error(f"special_tokens has no {name!r}")
        self.bos_id = self.special_tokens[BOS]
        self.eos_id = self.special_tokens[EOS]
        self.vocab_size = file.vocab_size
        self.pattern = file.pattern
        #: Bytes of each token → its rank, the id less `first_id`.
        self.ranks = file.ranks
        #: Special tokens, which stand before all others.
        self.first_id = len(self.special_tokens)
        try:
            self._encoding = tiktoken.Encoding(
                name="tekken", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens={}
            )
        except ValueError as error:
            raise file.error(f"config.pattern is no pattern that tiktoken takes: {error}") from None
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


class _File:
    """The entries of a tekken.json, checked.

    where: the file, for messages. Raises DataError.
    """

    def __init__(self, content: bytes, where: str) -> None:
        self.where = where
        try:
            parsed = parse_json(content)
        except ValueError as error:
            message = f"it is JSON that is damaged or cut short ({error})"
            raise self.error(message) from None
        if not isinstance(parsed, dict):
            raise self.error("it holds no JSON object")
        config = self._entry(parsed, "config", dict)
        self.pattern = str(self._entry(config, "pattern", str, "config."))
        self.vocab_size = int(self._entry(config, "default_vocab_size", int, "config."))
        count = int(self._entry(config, "default_num_special_tokens", int, "config."))
        vocabulary = self._entry(parsed, "vocab", list)
        used = self.vocab_size - count
        if count < 0 or not 256 <= used <= len(vocabulary):
            raise self.error(
                f"config.default_vocab_size is {self.vocab_size} with {count} special tokens, and "
                f"vocab has {len(vocabulary)} tokens"
            )
        self.special_tokens = self._special_names(parsed, config, count)
        self.ranks: dict[bytes, int] = {}
        for rank, item in enumerate(vocabulary[:used]):
            self.ranks[self._token(item, rank)] = rank

    def error(self, message: str) -> DataError:
        return DataError(
            f"{self.where} is no tekken.json as Mistral writes it: {message}; copy the file again"
        )

    def _entry(self, table: dict[str, Any], name: str, kind: type, before: str = "") -> Any:
        value = table.get(name)
        if type(value) is not kind:
            shown = "missing" if value is None else f"{value!r:.40}"
            raise self.error(f"{before}{name} is {shown}")
        return value

    def _token(self, item: Any, rank: int) -> bytes:
        """Return the bytes of the token at a place in `vocab`."""
        given = item if isinstance(item, dict) else {}
        encoded = given.get("token_bytes")
        if given.get("rank") != rank or not isinstance(encoded, str):
            raise self.error(f"vocab[{rank}] is {item!r:.80}, expected rank {rank} and token_bytes")
        try:
            token = base64.b64decode(encoded, validate=True)
        except ValueError:
            raise self.error(f"vocab[{rank}] has token_bytes {encoded!r:.40}, no base64") from None
        if rank < 256 and token != bytes([rank]):
            raise self.error(f"vocab[{rank}] is {token!r:.40}, and the first 256 are the bytes")
        if not token or token in self.ranks:
            raise self.error(f"vocab[{rank}] is {token!r:.40}, which is empty or stands twice")
        return token

    def _special_names(
        self, parsed: dict[str, Any], config: dict[str, Any], count: int
    ) -> list[str]:
        """Return the names of the special tokens by id; those that the file does not name have
        numbers.
        """
        if parsed.get("special_tokens") is None:
            names = list(_UNLISTED)
            version = str(config.get("version"))
            number = re.fullmatch(r"v(\d+)", version)
            if number is None or int(number[1]) > _LAST_UNLISTED:
                raise self.error(f"special_tokens is missing, and config.version is {version!r}")
        else:
            names = []
            for place, item in enumerate(self._entry(parsed, "special_tokens", list)):
                given = item if isinstance(item, dict) else {}
                name = given.get("token_str")
                if given.get("rank") != place or not isinstance(name, str):
                    message = f"special_tokens[{place}] is {item!r:.80}, expected rank {place}"
                    raise self.error(f"{message} and token_str")
                names.append(name)
        names += [f"<SPECIAL_{number}>" for number in range(len(names), count)]
        if len(names) > count or len(set(names)) != len(names):
            raise self.error(
                f"special_tokens has {len(names)} names, {len(set(names))} of them different, and "
                f"config.default_num_special_tokens is {count}"
            )
        return names
