"""Bytes and numbers of a file, local or behind a URL.

A local file is mapped. Of a remote file each read asks for its range alone, with the retries of
`titanlite.data.remote`. Ranges in a mixed order are fetched at the same time, once they are known.
Reads that continue where the last one ended fetch more ahead.
"""

from __future__ import annotations

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


def open_bytes(name: str, size: int, patience: float = 0.0) -> ByteFile:
    """Return a file of `size` bytes by its path or URL. patience: see `retried`."""
    return RemoteFile(name, size, patience) if is_url(name) else LocalFile(Path(name), size)


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

    def __init__(self, url: str, size: int, patience: float) -> None:
        self.url = url
        self.size = size
        self.patience = patience
        #: The bytes [begin, end) that were asked for last.
        self._blocks: dict[tuple[int, int], Future[bytes]] = {}
        #: Readers that no thread uses.
        self._idle: list[RemoteReader] = []
        self._identity: Identity | None = None

    @property
    def name(self) -> str:
        """The URL without what is secret in it, for messages."""
        return public_name(self.url)

    def prepare(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch bytes [begin, end) of each span in threads; they wait for `read`.

        What was prepared before is dropped.
        """
        self._blocks = {span: _pool().submit(self._fetch, *span) for span in merged(spans)}

    def read(self, begin: int, count: int) -> bytes:
        """Return bytes [begin, begin + count); fewer at the end of the file."""
        end = min(begin + count, self.size)
        blocks = self._blocks
        for (first, last), block in blocks.items():
            if first <= begin and end <= last:
                return block.result()[begin - first : end - first]
        last = end
        # Neighbouring rows share a token.
        if any(before < begin <= after for before, after in blocks):
            last = min(max(end, begin + _AHEAD), self.size)
        found = _pool().submit(self._fetch, begin, last)
        self._blocks = {(begin, last): found}
        return found.result()[: end - begin]

    def _fetch(self, begin: int, end: int) -> bytes:
        """Read bytes [begin, end) from the server; several threads may do so."""
        try:
            reader = self._idle.pop()
        except IndexError:  # another thread may have taken the last one
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
        from titanlite.data import FileChangedError
        from titanlite.data.remote import RemoteReader, check_url

        check_url("a file of tokens", self.url)
        reader = RemoteReader(self.url, self.patience, self._identity)
        self._identity = reader.identity
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
