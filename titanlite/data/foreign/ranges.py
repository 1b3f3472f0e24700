"""Bytes and numbers of a file, local or behind a URL.

A local file is mapped. Of a remote file each read asks for its range alone, with the retries of
`titanlite.data.remote`. Ranges in a mixed order are fetched at the same time, once they are known.
Reads that continue where the last one ended fetch more ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.skip_ranges import merged
from titanlite.data.token_parts import map_array

if TYPE_CHECKING:
    from titanlite.data.remote import Identity, RemoteReader
    from titanlite.data.threads import Pool

#: Bytes that are fetched ahead for reads in order.
_AHEAD = 1 << 20
#: Requests at the same time, of all files.
_REQUESTS = 16


#: A file of known size, and numbers of it, of which slices are read.
ByteFile: TypeAlias = "LocalFile | RemoteFile"
Numbers: TypeAlias = "NDArray[Any] | RemoteNumbers"


def open_bytes(
    name: str, size: int, patience: float = 0.0, identity: Identity | None = None
) -> ByteFile:
    """Return a file by its path or URL.

    size: bytes. patience: see `retried`. identity: of the remote file that is meant; one that was
    put in its place is refused.
    """
    if is_url(name):
        return RemoteFile(name, size, patience, identity)
    return LocalFile(Path(name), size)


class LocalFile:
    """A file that is mapped into memory."""

    is_remote: ClassVar[bool] = False

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.identity: Identity | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self, begin: int, count: int) -> bytes:
        """Return bytes [begin, begin + count); fewer at the end of the file."""
        with open(self.path, "rb", buffering=0) as stream:
            stream.seek(begin)
            return stream.read(count)

    def numbers(self, dtype: Any, count: int, first_byte: int = 0) -> NDArray[Any]:
        """Return `count` numbers from `first_byte` on."""
        return map_array(self.path, dtype, count, first_byte)


class RemoteFile:
    """A file behind a URL, read by ranges.

    Raises DataError, after the patience of `retried`, where it cannot be read, and where it is
    another file than before.
    """

    is_remote: ClassVar[bool] = True

    def __init__(
        self, url: str, size: int, patience: float, identity: Identity | None = None
    ) -> None:
        self.url = url
        self.size = size
        self.patience = patience
        self._lock = threading.Lock()
        #: What was read last, and its first byte.
        self._begin = 0
        self._bytes = b""
        #: What is on its way, by its first byte and its end.
        self._coming: dict[tuple[int, int], Future[bytes]] = {}
        self._idle: list[RemoteReader] = []
        self.identity = identity

    @property
    def name(self) -> str:
        """The URL without what is secret in it, for messages."""
        return public_name(self.url)

    def prepare(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch bytes [begin, end) of each span in threads; they wait for `read`.

        What was prepared before is dropped.
        """
        pool = _pool()
        with self._lock:
            for future in self._coming.values():
                future.cancel()
            wanted = [span for span in merged(spans) if not self._holds(*span)]
            self._coming = {span: pool.submit(self._fetch, *span) for span in wanted}

    def read(self, begin: int, count: int) -> bytes:
        end = min(begin + count, self.size)
        with self._lock:
            if not self._holds(begin, end):
                self._begin, self._bytes = self._block(begin, end)
            return self._bytes[begin - self._begin : end - self._begin]

    def _holds(self, begin: int, end: int) -> bool:
        return self._begin <= begin <= end <= self._begin + len(self._bytes)

    def _block(self, begin: int, end: int) -> tuple[int, bytes]:
        """Return bytes that hold [begin, end), and the first byte of them."""
        exact = self._coming.get((begin, end))
        if exact is not None:
            return begin, exact.result()
        for span, future in self._coming.items():
            if span[0] <= begin and end <= span[1]:
                return span[0], future.result()
        # Neighbouring rows share a token.
        if self._begin < begin <= self._begin + len(self._bytes):
            end = min(max(end, begin + _AHEAD), self.size)
        return begin, self._fetch(begin, end)

    def _fetch(self, begin: int, end: int) -> bytes:
        """Read bytes [begin, end) from the server; several threads may do so."""
        try:
            reader = self._idle.pop()
        except IndexError:
            reader = self._open()
        found = bytearray(max(end - begin, 0))
        view = memoryview(found)
        at = 0
        reader.seek(begin)
        while at < len(view):
            count = reader.readinto(view[at:])
            if not count:
                raise DataError(f"{self.name} ends at byte {begin + at:,} of {self.size:,}")
            at += count
        self._idle.append(reader)
        return bytes(found)

    def _open(self) -> RemoteReader:
        from titanlite.data.remote import FileChangedError, RemoteReader, check_url

        check_url("a file of tokens", self.url)
        reader = RemoteReader(self.url, self.patience, self.identity)
        self.identity = reader.identity
        if reader.identity is not None and reader.identity[0] not in (None, self.size):
            raise FileChangedError(f"{self.name} has changed since it was listed")
        return reader

    def numbers(self, dtype: Any, count: int, first_byte: int = 0) -> RemoteNumbers:
        return RemoteNumbers(self, np.dtype(dtype), count, first_byte)


@cache
def _pool() -> Pool:
    from titanlite.data.threads import Pool

    return Pool(_REQUESTS, "titanlite-ranges")


class RemoteNumbers:
    """Numbers of a file behind a URL: a slice is read when it is asked for."""

    def __init__(self, file: RemoteFile, dtype: np.dtype[Any], count: int, first_byte: int) -> None:
        self._file = file
        self._dtype = dtype
        self._count = count
        self._first_byte = first_byte

    def __getitem__(self, span: slice) -> NDArray[Any]:
        begin, end, _ = span.indices(self._count)
        first, last = self.bytes_of(begin, end)
        return np.frombuffer(self._file.read(first, last - first), self._dtype)

    def bytes_of(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first byte and the end of numbers [begin, end)."""
        item = self._dtype.itemsize
        return self._first_byte + begin * item, self._first_byte + end * item

    def prepare(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch numbers [begin, end) of each span at the same time, before they are asked for."""
        self._file.prepare([self.bytes_of(*span) for span in spans])
