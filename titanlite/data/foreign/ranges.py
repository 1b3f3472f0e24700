"""Bytes and numbers of a file, local or behind a URL.

A local file is mapped. Of a remote file each read asks for its range alone, with the retries of
`titanlite.data.remote`. Reads that continue where the last one ended fetch more ahead.
"""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.token_parts import map_array

#: Bytes that are fetched ahead for reads in order.
_AHEAD = 1 << 20


class Numbers(Protocol):
    """Numbers of a file, of which slices are read."""

    def __getitem__(self, span: slice) -> NDArray[Any]: ...


class ByteFile(Protocol):
    """A file of known size. `name`: for messages, without what is secret in a URL."""

    is_remote: ClassVar[bool]
    size: int

    @property
    def name(self) -> str: ...

    def read(self, begin: int, count: int) -> bytes:
        """Return bytes [begin, begin + count); fewer at the end of the file."""
        ...

    def numbers(self, dtype: Any, count: int, first_byte: int = 0) -> Numbers:
        """Return `count` numbers from `first_byte` on."""
        ...


def open_bytes(name: str, size: int, patience: float = 0.0) -> ByteFile:
    """Return a file by its path or URL. size: bytes. patience: see `retried`."""
    if is_url(name):
        return RemoteFile(name, size, patience)
    return LocalFile(Path(name), size)


class LocalFile:
    """A file that is mapped into memory."""

    is_remote: ClassVar[bool] = False

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self, begin: int, count: int) -> bytes:
        with open(self.path, "rb", buffering=0) as stream:
            stream.seek(begin)
            return stream.read(count)

    def numbers(self, dtype: Any, count: int, first_byte: int = 0) -> NDArray[Any]:
        return map_array(self.path, dtype, count, first_byte)


class RemoteFile:
    """A file behind a URL, read by ranges from several threads.

    Raises DataError, after the patience of `retried`, where it cannot be read.
    """

    is_remote: ClassVar[bool] = True

    def __init__(self, url: str, size: int, patience: float) -> None:
        self.url = url
        self.size = size
        self.patience = patience
        self._lock = threading.Lock()
        #: What was fetched last, and its first byte.
        self._begin = 0
        self._bytes = b""

    @property
    def name(self) -> str:
        return public_name(self.url)

    @cached_property
    def _stream(self) -> Any:
        from titanlite.data.remote import open_file

        return open_file(self.url, self.patience).raw

    def read(self, begin: int, count: int) -> bytes:
        end = min(begin + count, self.size)
        with self._lock:
            known_end = self._begin + len(self._bytes)
            if not self._begin <= begin <= end <= known_end:
                follows = begin == known_end and begin > 0
                most = max(end, begin + _AHEAD) if follows else end
                self._bytes = self._fetch(begin, min(most, self.size))
                self._begin = begin
            return self._bytes[begin - self._begin : end - self._begin]

    def _fetch(self, begin: int, end: int) -> bytes:
        found = bytearray(max(end - begin, 0))
        view = memoryview(found)
        at = 0
        self._stream.seek(begin)
        while at < len(view):
            count = self._stream.readinto(view[at:])
            if not count:
                raise DataError(
                    f"{self.name} ends at byte {begin + at:,}, and it had {self.size:,} bytes when "
                    "it was listed; copy it again, or start the run anew"
                )
            at += count
        return bytes(found)

    def numbers(self, dtype: Any, count: int, first_byte: int = 0) -> RemoteNumbers:
        return RemoteNumbers(self, np.dtype(dtype), count, first_byte)


class RemoteNumbers:
    """Numbers of a file behind a URL: a slice is read when it is asked for."""

    def __init__(self, file: RemoteFile, dtype: np.dtype[Any], count: int, first_byte: int) -> None:
        self._file = file
        self._dtype = dtype
        self._count = count
        self._first_byte = first_byte

    def __getitem__(self, span: slice) -> NDArray[Any]:
        begin, end, _ = span.indices(self._count)
        item = self._dtype.itemsize
        piece = self._file.read(self._first_byte + begin * item, (end - begin) * item)
        return np.frombuffer(piece, self._dtype)
