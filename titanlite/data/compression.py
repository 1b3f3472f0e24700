"""gzip and zstd around the text of a file."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

_GZIP = b"\x1f\x8b"
#: A frame, or one to skip, with which pzstd begins.
_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60)))
_BUFFER = 1 << 18


def is_compressed(head: bytes) -> bool:
    """Return whether the first bytes are those of gzip or zstd."""
    return head.startswith((_GZIP, *_ZSTD))


def decompressed(file: Any, name: Path | str) -> io.BufferedReader[Any]:
    """Return the content of an open file, decompressed if need be."""
    whole = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file, _BUFFER)
    head = whole.peek(4)
    if head.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=whole), _BUFFER)
    if head.startswith(_ZSTD):
        from titanlite.data.zstd_reader import ZstdReader

        return io.BufferedReader(ZstdReader(whole, name, _BUFFER), _BUFFER)
    return whole
