"""Rows of parquet and arrow files, by pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from titanlite.data import DamagedError, DataError
from titanlite.data.file_kinds import Format
from titanlite.data.records import Columns, strings_of
from titanlite.utils import pip_install

_BUFFER = 1 << 18
#: Rows of a table that become Python objects at once.
_BATCH = 128


def table_rows(
    content: io.BufferedReader[Any], kind: Format, name: Path | str, columns: Columns, start: int
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield number, text and perhaps prompt of the rows from `start` on."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{name}: reading {kind} needs the package pyarrow: {pip_install('pyarrow')}"
        ) from None
    try:
        batches = _parquet(content, columns, start) if kind == "parquet" else _arrow(content)
        for before, batch in batches:
            columns.check(batch.schema.names, f"{name}")
            for first in range(max(start - before, 0), batch.num_rows, _BATCH):
                part = batch.slice(first, _BATCH)
                yield from _rows_of(part, before + first + 1, columns, name)
    except pyarrow.lib.ArrowException as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        # pyarrow's own, for pages that cannot be decompressed.
        if type(error) is OSError and error.errno is None:
            raise DamagedError(str(error)) from error
        raise


def _rows_of(
    part: Any, begin: int, columns: Columns, name: Path | str
) -> Iterator[tuple[int, Sequence[Any]]]:
    wanted = [*columns.wanted]
    try:
        records = part.select(wanted).to_pylist()
    except ValueError as error:
        # Bytes that are not UTF-8, or fields within a column of one name.
        rows = f"rows {begin} to {begin + part.num_rows - 1}"
        raise DataError(f"{name}, {rows}: {error}") from error
    for number, record in enumerate(records, begin):
        yield number, strings_of(record, columns, f"{name}, row {number}")


def _parquet(content: BinaryIO, columns: Columns, start: int) -> Iterator[tuple[int, Any]]:
    """Yield (rows before, batch), without the row groups that end before `start`."""
    from pyarrow.parquet import ParquetFile

    # Read by pages: a whole column of a row group may be gigabytes.
    table = ParquetFile(
        content, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
    )
    read = None
    if {*columns.wanted} <= {*table.schema_arrow.names}:
        read = [*columns.wanted]
    before = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if before + rows > start:
            seen = before
            for batch in table.iter_batches(_BATCH, [group], read, use_threads=False):
                yield seen, batch
                seen += batch.num_rows
        before += rows


def _arrow(content: io.BufferedReader[Any]) -> Iterator[tuple[int, Any]]:
    from pyarrow import ipc

    if content.peek(6).startswith(b"ARROW1"):
        reader = ipc.open_file(content)
        batches = map(reader.get_batch, range(reader.num_record_batches))
        stream = None
    else:
        stream = _Watched(content)
        batches = ipc.open_stream(stream)
    before = 0
    for batch in batches:
        yield before, batch
        before += batch.num_rows
    if stream is not None and stream.is_at_end:
        raise DamagedError("the stream has no end mark, which its writer sets as it is closed")


class _Watched:
    """Notes that its reader met the end, since pyarrow takes that for the end mark."""

    closed = False

    def __init__(self, content: io.BufferedReader[Any]) -> None:
        self._content = content
        self.is_at_end = False

    def read(self, size: int) -> bytes:
        piece = self._content.read(size)
        self.is_at_end = len(piece) < size
        return piece
