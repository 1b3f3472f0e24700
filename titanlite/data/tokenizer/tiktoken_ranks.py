"""Byte-pair tokenizers from tiktoken rank files, with Llama 3's split pattern and special tokens.

A rank file holds one entry per line: the token's bytes in base64, a space, its rank. Llama 3's 256
special tokens follow the last rank. So Meta's own file gives 128,000 + 256 ids, the bundled one
2,048 + 256 = 36 x 64.
"""

from __future__ import annotations

import base64
import hashlib
import re
from itertools import accumulate
from pathlib import Path

import numpy as np
import tiktoken
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.tokenizer.base import Tokenizer

#: Llama 3 splits text by this pattern before it merges bytes.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"

#: Llama 3's special tokens in the order of their ids.
SPECIAL_TOKENS: tuple[str, ...] = (
    BOS,
    EOS,
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)

# tiktoken's regex engine recurses over a piece, and its merge is worse than linear in a piece's
# length.
# So longer texts, and longer runs without (or only of) white space, are cut before.
_MAX_ENCODE_CHARS = 400_000
_MAX_RUN_CHARS = 25_000


class TiktokenTokenizer(Tokenizer):
    """Llama 3's tokenizer over any ranks. Text never becomes a special token."""

    named_by = "Llama 3"

    def __init__(
        self, ranks: dict[bytes, int], special_tokens: tuple[str, ...] = SPECIAL_TOKENS
    ) -> None:
        """`ranks`: each token's bytes to its rank, 0 … len(ranks) - 1, every single byte among
        them.
        """
        specials = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
        self._encoding = tiktoken.Encoding(
            name="titanlite", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self.special_tokens = specials
        self.vocab_size = len(ranks) + len(specials)
        self.bos_id = specials[BOS]
        self.eos_id = specials[EOS]
        digest = hashlib.sha256(SPLIT_PATTERN.encode())
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d " % (rank, len(token)) + token)
        for name, token_id in specials.items():
            digest.update(b"%d %s " % (token_id, name.encode()))
        self.fingerprint = digest.hexdigest()

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for segment in safe_segments(text):
            ids += self._encoding.encode_ordinary(segment)
        return ids

    def _encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self._encode(text)
        return ids, spans_of(self._encoding, ids)

    def _encode_array(self, text: str) -> NDArray[np.integer]:
        segments = safe_segments(text)
        return np.concatenate(
            [self._encoding.encode_to_numpy(s, disallowed_special=()) for s in segments]
        )

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


def spans_of(encoding: tiktoken.Encoding, ids: list[int]) -> list[tuple[int, int]]:
    """Return where the bytes of each token begin and end in their text."""
    ends = list(accumulate(map(len, encoding.decode_tokens_bytes(ids))))
    return list(zip([0, *ends], ends, strict=False))


def safe_segments(text: str, most: int = _MAX_ENCODE_CHARS) -> list[str]:
    """Cut `text` into pieces that are safe for tiktoken; one piece, unless it is unusually long.

    most: characters of a piece, also where no run is too long.
    """
    if len(text) <= _MAX_RUN_CHARS:
        return [text]
    cuts = {0, len(text), *range(most, len(text), most)}
    for run in re.finditer(r"\S+|\s+", text):
        cuts.update(range(run.start() + _MAX_RUN_CHARS, run.end(), _MAX_RUN_CHARS))
    ordered = sorted(cuts)
    return [text[start:end] for start, end in zip(ordered, ordered[1:], strict=False)]


def parse_ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """Parse the `content` of a tiktoken file.

    Raises DataError with path and line if it is another or incomplete.
    """
    ranks: dict[bytes, int] = {}
    key = f"model.tokenizer_path: {path}"
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except ValueError:
            found = line[:60].decode(errors="replace")
            raise DataError(
                f"{key}, line {number}: expected a base64 token, a space and its rank, found "
                f"{found!r}. "
                "This is not a tiktoken file, or it is damaged"
            ) from None
        if rank != len(ranks) or token in ranks:
            problem = (
                f"the token {token!r} has rank {rank}, expected a new token of rank {len(ranks)}"
            )
            raise DataError(f"{key}, line {number}: {problem}; the file is damaged")
        ranks[token] = rank
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise DataError(
            f"{key}: the byte {absent[0]:#04x} has no token ({len(absent)} of 256 missing), "
            "so some texts could not be encoded. The file is damaged or cut short"
        )
    return ranks
