"""One lane of a stream (see `titanlite.data.stream`): its text in order, as rows."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.daemon_threads import Pool
from titanlite.data.epoch_order import epoch_order
from titanlite.data.records import Record
from titanlite.data.rows import Row, Window, make_row
from titanlite.data.state_checks import StateError
from titanlite.data.text_files import TextFiles
from titanlite.data.tokenize_files import targets_of

#: Characters of text that are tokenized at once.
_CHUNK = 1 << 18
#: Documents of a block where they are not mixed.
_UNMIXED_BLOCK = 256
#: Counts and places before the latest rows that a lane keeps, to go back to.
_PASSED = 1 << 12
#: Gives each lane its own order.
_LANE_KEY = 0x9E3779B1

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
#: Returns ids and mask of a record, see `titanlite.data.tokenize_files.encode_record`.
Encode = Callable[[Record], tuple[Ids, Mask]]

_T = TypeVar("_T")


@dataclass(frozen=True)
class StreamText:
    """The files of a stream, and how their documents become rows.

    `description` of tokenizer and encoding is for the fingerprint. `buffer` counts documents mixed
    together, over all lanes.
    """

    shards: TextFiles
    encode: Encode
    description: str
    seq_len: int
    pad_id: int
    seed: int = 0
    shuffle: bool = True
    buffer: int = 10_000
    mask_documents: bool = False


class Place(NamedTuple):
    """A lane's place: before a token of a document of a block, by number."""

    epoch: int = 0
    #: Number of the shard in the lane's order of this epoch, and the row of it where the block
    #: begins.
    shard: int = 0
    row: int = 0
    document: int = 0
    offset: int = 0


class ServedRow(NamedTuple):
    """A row, and its documents as of `Rows.documents_in`."""

    row: Row
    documents: list[tuple[str, int]]


class _Document(NamedTuple):
    ids: Ids
    targets: Mask
    place: Place
    name: str


class _Share(NamedTuple):
    shard: int
    part: int
    parts: int


class _Block(NamedTuple):
    place: Place
    records: list[Record]


class _Ahead(Generic[_T]):
    """Takes items of an iterator, while a pool prepares the next one."""

    def __init__(self, items: Iterator[_T], pool: Pool | None) -> None:
        self._items = items
        self._pool = pool
        self._wait = self._start()

    def take(self) -> _T:
        item = self._wait()
        self._wait = self._start()
        return item

    def _start(self) -> Callable[[], _T]:
        if self._pool is None:
            return partial(next, self._items)
        return self._pool.submit(next, self._items).result


@dataclass(frozen=True)
class LaneReader:
    """Reads the documents of lane `number` of `lanes`.

    Threads of `readers` read; those of `encoders`, or the caller, tokenize. They run generators,
    one call at a time.
    """

    text: StreamText
    number: int
    lanes: int
    readers: Pool
    encoders: Pool | None

    def outside(self, reason: str) -> StateError:
        return StateError(
            f"lane {self.number} of the stream cannot continue from its place in the checkpoint: "
            f"{reason}. The files have changed since then, or the checkpoint is damaged. "
            'checkpoint.exclude_from_loading = ["dataloader"] begins the text again'
        )

    def rows(self, start: Place) -> Iterator[tuple[ServedRow, Place]]:
        """Yield rows, each with the place after it; the last target of a row begins the next
        one.
        """
        text = self.text
        chunks = _Ahead(self.documents(start), self.encoders)
        #: Documents that are not served to the end, and served tokens of the first of them.
        queue: deque[_Document] = deque()
        served = start.offset
        while True:
            while not queue:
                queue += chunks.take()
            if served >= len(queue[0].ids):
                # The text has changed since the checkpoint.
                served = 0
            left = text.seq_len + 1
            while sum(len(document.ids) for document in queue) - served < left:
                queue += chunks.take()
            parts: list[_Document] = []
            while True:
                document = queue[0]
                end = min(len(document.ids), served + left)
                ids = document.ids[served:end]
                parts.append(document._replace(ids=ids, targets=document.targets[served:end]))
                left -= len(ids)
                if not left:
                    break
                queue.popleft()
                served = 0
            served = end - 1
            lengths = np.array([len(part.ids) for part in parts])
            window = Window(
                ids=np.concatenate([part.ids for part in parts]),
                targets=np.concatenate([part.targets for part in parts]),
                begins=np.cumsum(lengths) - lengths,
            )
            row = make_row([window], text.seq_len, text.pad_id, text.mask_documents)
            documents = [(part.name, len(part.ids)) for part in parts]
            yield ServedRow(row, documents), document.place._replace(offset=served)

    def documents(self, start: Place) -> Iterator[list[_Document]]:
        """Yield tokenized documents in order, some at a time."""
        blocks = _Ahead(self._blocks(start), self.readers)
        first = start.document
        while True:
            block = blocks.take()
            place = block.place
            key = (place.epoch << 40) ^ (place.shard << 24) ^ place.row
            order = self._order(len(block.records), key)
            chunk: list[_Document] = []
            size = 0
            for index in range(first, len(order)):
                record = block.records[order[index]]
                ids, mask = self.text.encode(record)
                targets = targets_of([0, len(ids)], [mask])
                name = f"{record.file}:{record.number}"
                chunk.append(_Document(ids, targets, place._replace(document=index), name))
                size += len(record.text)
                if size > _CHUNK or index == len(order) - 1:
                    yield chunk
                    chunk = []
                    size = 0
            first = 0

    def _blocks(self, start: Place) -> Iterator[_Block]:
        text = self.text
        epoch = start.epoch
        shard = start.shard
        row = start.row
        has_records = row > 0 or shard > 0
        while True:
            shares = self._shares(epoch)
            for place in range(shard, len(shares)):
                for block in self._blocks_of_shard(shares[place], Place(epoch, place, row)):
                    has_records = True
                    yield block
                row = 0
            if not has_records:
                files = ", ".join(text.shards.names[share.shard] for share in shares[:3])
                raise DataError(
                    f"no records in {files}: a lane of the stream is empty. Set data.streaming = "
                    "false, or data.lanes lower, which counts for training text"
                )
            epoch += 1
            shard = 0
            has_records = False

    def _blocks_of_shard(self, share: _Share, start: Place) -> Iterator[_Block]:
        """Raises StateError for a place behind the shard's end."""
        text = self.text
        size = _UNMIXED_BLOCK
        if text.shuffle:
            size = max(text.buffer // self.lanes, 1)
        all_records = text.shards.records(share.shard, start.row)
        own = (record for record in all_records if record.number % share.parts == share.part)
        place = start
        while records := list(itertools.islice(own, size)):
            yield _Block(place, records)
            place = place._replace(row=records[-1].number)
        if start.row and place == start:
            name = text.shards.names[share.shard]
            raise self.outside(f"{name} has no record {start.row + 1} for it")

    def _shares(self, epoch: int) -> list[_Share]:
        text = self.text
        count = len(text.shards.names)
        if count < self.lanes:
            # Lanes share a shard, and each of them reads all of it.
            part, shard = divmod(self.number, count)
            parts = len(range(shard, self.lanes, count))
            return [_Share(shard, part, parts)]
        # The same shards in each epoch: lanes do not end theirs at the same time.
        order = epoch_order(count, text.seed, 0, text.shuffle)
        own = order[self.number :: self.lanes].tolist()
        return [_Share(own[place], 0, 1) for place in self._order(len(own), epoch)]

    def _order(self, count: int, epoch: int) -> list[int]:
        seed = self.text.seed ^ (self.number + 1) * _LANE_KEY
        return epoch_order(count, seed, epoch, self.text.shuffle).tolist()


class Lane:
    """The rows of a lane, in order, after `count` rows."""

    def __init__(self, reader: LaneReader, count: int, start: Place) -> None:
        self.reader = reader
        #: Rows of the lane before the next one.
        self.count = count
        #: The place of the next row.
        self.place = start
        #: Counts and places before the latest rows, to go back to.
        self.passed: deque[tuple[int, Place]] = deque(maxlen=_PASSED)
        self._rows = reader.rows(start)

    def next_row(self) -> ServedRow:
        self.passed.append((self.count, self.place))
        row, self.place = next(self._rows)
        self.count += 1
        return row
