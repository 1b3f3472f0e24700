"""A small tekken.json, written by the book of the format."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from titanlite.data.tokenizer import BUNDLED_TOKENIZER
from titanlite.data.tokenizer.tiktoken_ranks import parse_ranks

#: The pattern of Mistral's files of 2024.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Special tokens of the file, and tokens that the vocabulary takes of those in it.
SPECIALS = 30
USED = 1500


def tokens() -> list[bytes]:
    """All tokens of the file by rank, the bytes first."""
    ranks = parse_ranks(BUNDLED_TOKENIZER.read_bytes(), BUNDLED_TOKENIZER)
    longer = [token for token in ranks if len(token) > 1]
    return [bytes([byte]) for byte in range(256)] + longer


def content(special_tokens: list[str] | None = None, version: str = "v3") -> dict[str, Any]:
    """The file's content; without special tokens as of 2024."""
    vocabulary = []
    for rank, token in enumerate(tokens()):
        text = None
        if not token.decode(errors="replace").count("\ufffd"):
            text = token.decode()
        encoded = base64.b64encode(token).decode()
        vocabulary.append({"rank": rank, "token_bytes": encoded, "token_str": text})
    found = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(vocabulary),
            "default_vocab_size": USED + SPECIALS,
            "default_num_special_tokens": SPECIALS,
            "version": version,
        },
        "vocab": vocabulary,
    }
    if special_tokens is not None:
        found["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True}
            for rank, name in enumerate(special_tokens)
        ]
    return found


def write(path: Path, **changes: Any) -> Path:
    """Write the file with other entries; of None: without that entry."""
    changed = {**content(), **changes}
    kept = {name: value for name, value in changed.items() if value is not None}
    path.write_text(json.dumps(kept))
    return path
