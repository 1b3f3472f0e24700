"""The content of a file that is compressed with zstd."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO

from titanlite.data import DamagedError, DataError
from titanlite.utils import pip_install


class ZstdReader(io.RawIOBase):
    """Reads successive zstd frames; the library's own reader misses a truncated one.

    piece: bytes that are read at once.
    """

    def __init__(self, file: BinaryIO, name: Path | str, piece: int) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError(
                f"{name}: reading zstd needs the package zstandard: {pip_install('zstandard')}"
            ) from None
        self._file = file
        self._piece = piece
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
            piece = self._rest or self._file.read(self._piece)
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
