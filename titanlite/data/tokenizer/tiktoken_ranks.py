"""Byte-pair tokenizers from tiktoken rank files, with the split pattern and special tokens of
Llama 3.

A rank file holds one entry per line: the token's bytes in base64, a space, its rank. It says
nothing of the pattern and the special tokens, which follow the last rank. So published files of
other models are known by their ranks, and refused. Meta's file gives 128,000 + 256 ids, the bundled
one 2,048 + 256 = 36 x 64.
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

#: SHA-256 of published files → whose they are.
PUBLISHED = {
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": "Llama 3",
    "546bb5a4d20aac0ceb97fd162015c9df70964b5184b7910b8cbdee66aed99e12": "Llama 3",
    "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed": "Llama 4",
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": "GPT-2 (r50k_base)",
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": "GPT-3 (p50k_base)",
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": "GPT-4 (cl100k_base)",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": "GPT-4o (o200k_base)",
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": "Qwen",
    "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103": "Kimi K2",
    "5a493598071550244b2ee7f26118f3edec2150b9dfa967929a99052ac83fe716": "GLM-4",
}

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
        """`ranks` maps bytes to 0 … len(ranks) - 1, every single byte among them."""
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


def load_ranks(content: bytes, path: Path, family: str) -> TiktokenTokenizer:
    """Return the tokenizer of a rank file.

    Unpublished ranks are Llama 3's. Raises DataError for another family, and for published ranks of
    other models.
    """
    ranks = parse_ranks(content, path)
    digest = hashlib.sha256()
    for token, rank in ranks.items():
        digest.update(b"%s %d\n" % (base64.b64encode(token), rank))
    owner = PUBLISHED.get(digest.hexdigest(), "Llama 3" if family == "llama3" else "")
    if owner != "Llama 3":
        whose = f"are those of {owner}" if owner else "are not published"
        raise DataError(
            f"model.tokenizer_path: {path}: its ranks {whose}. A tiktoken file holds neither the "
            "pattern that splits text nor special tokens, which titanlite knows of Llama 3; give "
            "the tokenizer.json of the model"
        )
    return TiktokenTokenizer(ranks)


def spans_of(encoding: tiktoken.Encoding, ids: list[int]) -> list[tuple[int, int]]:
    """Return where the bytes of each token begin and end in their text."""
    ends = list(accumulate(map(len, encoding.decode_tokens_bytes(ids))))
    return list(zip([0, *ends], ends, strict=False))


def safe_segments(text: str, most: int = _MAX_ENCODE_CHARS) -> list[str]:
    """Cut `text`, if it is unusually long, into pieces that are safe for tiktoken.

    They have at most `most` characters.
    """
    if len(text) <= _MAX_RUN_CHARS:
        return [text]
    cuts = {0, len(text), *range(most, len(text), most)}
    for run in re.finditer(r"\S+|\s+", text):
        cuts.update(range(run.start() + _MAX_RUN_CHARS, run.end(), _MAX_RUN_CHARS))
    ordered = sorted(cuts)
    return [text[start:end] for start, end in zip(ordered, ordered[1:], strict=False)]


def parse_ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """Parse a tiktoken file. Raises DataError with path and line if it is not whole."""
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
