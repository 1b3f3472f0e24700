"""gzip and zstd around the text of a file."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any, BinaryIO

from titanlite.data import DataError
from titanlite.utils import pip_install

_GZIP = b"\x1f\x8b"
#: A frame, or one to skip, with which pzstd begins.
_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60)))
_BUFFER = 1 << 18


class DamagedError(Exception):
    """A library's reader finds the content damaged or truncated."""


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
        return io.BufferedReader(_Zstd(whole, name), _BUFFER)
    return whole


class _Zstd(io.RawIOBase):
    """Reads successive zstd frames; the library's own reader misses a truncated one."""

    def __init__(self, file: BinaryIO, name: Path | str) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError(
                f"{name}: reading zstd needs the package zstandard: {pip_install('zstandard')}"
            ) from None
        self._file = file
        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame = self._new()
        #: Whether the file may end here.
        self._at_end = True
        #: Bytes of the file that are not decompressed, and of the content that are not read.
        self._rest = b""
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            piece = self._rest or self._file.read(_BUFFER)
            if not piece:
                if self._at_end:
                    return 0
                raise EOFError("the zstd frame has no end")
            try:
                self._out = memoryview(self._frame.decompress(piece))
            except self._error as error:
                raise DamagedError(str(error)) from error
            self._rest = self._frame.unused_data
            self._at_end = self._frame.eof
            if self._at_end:
                self._frame = self._new()
        size = min(len(buffer), len(self._out))
        buffer[:size] = self._out[:size]
        self._out = self._out[size:]
        return size
