"""Training sequences of text that is read while training: any size, one order, exact resume.

Sequence i belongs to lane i mod V. A lane owns a share of the shards (files), and reads them in an
order computed from (seed, epoch). It reads a block of documents, mixes it by a computed order, and
cuts the documents' tokens into windows, as `packing` does. So sequence i does not depend on the
number of ranks, and a rank reads only the lanes of its sequences if that number divides V.

A lane's place is six numbers. To go on from it, a lane reads its shard again up to the block:
compressed text has no way to skip. Epochs are those of a lane: lanes with less text begin theirs
sooner.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.best_fit import BestFitDataset
from titanlite.data.corpus import PACKING, Corpus, encode_record, targets_of, workers_of
from titanlite.data.formats import Record
from titanlite.data.packing import Window, make_row
from titanlite.data.permutation import epoch_order
from titanlite.data.rows import FilePlace, Row, Rows
from titanlite.data.shards import Shards
from titanlite.data.sources import TextFiles
from titanlite.data.state import StateError
from titanlite.data.stream_state import check_stream
from titanlite.data.threads import Pool
from titanlite.utils import counted, logger

if TYPE_CHECKING:
    from titanlite.data.text import Order, TextReader

#: Characters of text that are tokenized at once, and threads that read.
_CHUNK, _READERS = 1 << 18, 8
#: Bytes of windows that stay after they were served: a save and a step that is repeated ask for
#: them again. Tokens of windows whose documents' names stay, for the log of documents.
_KEPT_BYTES, _NAMED_TOKENS = 64 << 20, 32 << 20
#: Least number of lanes, so that a few ranks more or less do not share lanes.
_LANES = 8
#: Sequences that a lane passes over at most: to read more takes days.
_FURTHEST = 1 << 24
#: Gives each lane its own order.
_LANE_KEY = 0x9E3779B1

Ids = NDArray[np.int64]


class Place(NamedTuple):
    """Where a lane stands: before a token of a document of a block, by their numbers."""

    epoch: int = 0
    #: Number of the shard in the lane's order of this epoch, and the row of it where the block
    #: begins.
    shard: int = 0
    row: int = 0
    document: int = 0
    offset: int = 0


class _Document(NamedTuple):
    ids: Ids
    #: Whether each token is a target.
    targets: NDArray[np.bool_]
    place: Place
    #: File and number of its record.
    name: str


class _Served(NamedTuple):
    row: Row
    #: See `Rows.documents_in`.
    documents: list[tuple[str, int]]


class _Packed(NamedTuple):
    """A row of a block that is packed. `place.document` counts these rows."""

    served: _Served
    place: Place


class StreamRows(Rows):
    """Sequences of a stream by global index, without an end.

    Asking for them in order is fast, going back is not.

    Args:
        shards: the files.
        encode: tokenizes a record, see `encode_record`.
        description: of tokenizer and encoding, for the fingerprint.
        seed, shuffle: of the order of shards and documents.
        buffer: documents that are mixed together, over all lanes.
        lanes: V; None: chosen for `ranks` and kept in the state.
        shared_lanes: V of the other streams of a mixture, where `lanes` is None.
        workers: threads that tokenize; 0: the one that asks does it.
        mask_documents: rows tell the document of each token.
        best_fit: documents are fitted whole into rows, those of a block together (see
            `titanlite.data.best_fit`).
    """

    total_sequences: None = None
    lanes: int

    def __init__(
        self,
        shards: Shards,
        encode: Callable[[Record], tuple[Ids, NDArray[np.bool_]]],
        *,
        description: str,
        seq_len: int,
        pad_id: int,
        seed: int = 0,
        shuffle: bool = True,
        buffer: int = 10_000,
        lanes: int | None = None,
        shared_lanes: int | None = None,
        ranks: int = 1,
        workers: int = 0,
        mask_documents: bool = False,
        best_fit: bool = False,
    ) -> None:
        self.best_fit = best_fit
        self.shards, self.encode, self.seq_len, self.pad_id = shards, encode, seq_len, pad_id
        self.seed, self.shuffle, self.buffer, self.mask_documents = (
            seed,
            shuffle,
            buffer,
            mask_documents,
        )
        self._fingerprint = shards.fingerprint(description)
        self.listing = shards.listing
        self.given_lanes = lanes
        self.lanes = lanes or shared_lanes or default_lanes(ranks, len(shards.names))
        self.readers = Pool(_READERS, "titanlite-read", at_exit=30.0)
        self.encoders = Pool(workers, "titanlite-encode") if workers else None
        self._open: dict[int, _Lane] = {}
        self._places: dict[int, tuple[int, Place]] = {}
        self._kept: OrderedDict[int, _Served] = OrderedDict()
        self._named: OrderedDict[int, list[tuple[str, int]]] = OrderedDict()
        #: A save asks from the main thread, the loader from its own.
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide sequence i, besides fingerprint and a number of lanes that is in
        the state.
        """
        given = {} if self.given_lanes is None else {"lanes": self.given_lanes}
        order = {
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": None,
        }
        masks = {"mask_documents": True} if self.mask_documents else {}
        packing = {"packing": "best-fit"} if self.best_fit else {}
        return {**order, "buffer": self.buffer, **given, **masks, **packing}

    def describe(self) -> str:
        """Return the size of the text in words."""
        files = counted(len(self.shards.names), "files")
        packing = ", best-fit" * self.best_fit
        lanes = f"{counted(self.lanes, 'lanes')}, {self.buffer:,} documents at a time"
        return f"{files}, read while training in {lanes}{packing}"

    def sequence(self, index: int) -> Row:
        """Return sequence `index`. Raises DataError if its text cannot be read."""
        return self._window(index).row

    def padding(self) -> Row:
        return make_row((), self.seq_len, self.pad_id, self.mask_documents)

    def documents_in(self, index: int) -> list[tuple[str, int]]:
        """Return file and record of the documents of sequence `index`, and the tokens of each."""
        return self._named.get(index) or self._window(index).documents

    def place_of(self, document: str) -> FilePlace:
        file, _, record = document.rpartition(":")
        return FilePlace(file, int(record))

    def state_dict(self) -> dict[str, Any]:
        """Return the places of the lanes that this rank has read, each with its number and count of
        windows.
        """
        with self._lock:
            places = {
                **self._places,
                **{number: (lane.count, lane.place) for number, lane in self._open.items()},
            }
        cursors = [[number, count, *place] for number, (count, place) in sorted(places.items())]
        packing = {"packing": "best-fit"} if self.best_fit else {}
        return {
            "lanes": self.lanes,
            "revision": self.shards.revision,
            "cursors": cursors,
            **packing,
        }

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all ranks: of each lane the place furthest on."""
        cursors: dict[int, list[Any]] = {}
        for cursor in (cursor for state in states for cursor in state["cursors"]):
            cursors[cursor[0]] = max(cursor, cursors.get(cursor[0], cursor))
        return {**states[0], "cursors": [cursors[number] for number in sorted(cursors)]}

    def load_state_dict(
        self,
        state: dict[str, Any],
        position: int = 0,
        phases: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Go on from these places; {}: from the start.

        Raises DataError if they cannot be of this stream.
        """
        check_stream(state, self.lanes, len(self.shards.names))
        lanes = state.get("lanes", self.lanes)
        places = {
            number: (count, Place(*place)) for number, count, *place in state.get("cursors", ())
        }
        if self.given_lanes not in (None, lanes):
            raise DataError(
                f"data.lanes: the checkpoint's order has {lanes} lanes, not {self.given_lanes}"
            )
        if ("packing" in state) != self.best_fit:  # it counts documents or packed rows
            places = {
                n: (count, place._replace(document=0, offset=0))
                for n, (count, place) in places.items()
            }
        self.close()
        self.lanes, self._places = lanes, places
        self.shards = self.shards.at(state.get("revision", ""))

    def close(self) -> None:
        """Give up what was read ahead; asking again reads it again."""
        with self._lock:
            for number in list(self._open):
                self._shut(number)
            self._kept.clear()
            self._named.clear()

    def _window(self, index: int) -> _Served:
        if (
            kept := self._kept.get(index)
        ) is not None:  # without a wait for the thread that reads ahead
            return kept
        number, count = index % self.lanes, index // self.lanes
        with self._lock:
            if index in self._kept:
                return self._kept[index]
            lane = self._open.get(number)
            if lane is None or lane.count > count:
                lane = self._reopen(number, count, lane)
            if count - lane.count > _FURTHEST:
                raise lane.outside(
                    f"the next sequence, {index:,}, lies {count - lane.count:,} of its sequences "
                    "ahead"
                )
            try:
                while lane.count <= count:  # ranks that share a lane leave windows out
                    window = lane.next_window()
                    found = index + (lane.count - 1 - count) * self.lanes
                    self._kept[found], self._named[found] = window, window.documents
                    if len(self._kept) > max(_KEPT_BYTES // 20 // self.seq_len, 1):
                        self._kept.popitem(last=False)
                    if len(self._named) > max(_NAMED_TOKENS // self.seq_len, 1):
                        self._named.popitem(last=False)
            except BaseException:
                self._shut(number)
                raise
            return window

    def _shut(self, number: int) -> None:
        lane = self._open.pop(number)
        self._places[number] = lane.count, lane.place

    def _reopen(self, number: int, count: int, lane: _Lane | None) -> _Lane:
        """Return a lane that stands at `count` windows or before: at the nearest place that is
        known.
        """
        known = [
            (0, Place()),
            self._places.get(number, (0, Place())),
            *(lane.passed if lane else ()),
        ]
        start = max(place for place in known if place[0] <= count)
        self._open[number] = _Lane(self, number, *start)
        return self._open[number]


class _Lane:
    """A lane from a place on: its rows in order.

    The generators run in other threads, one call at a time.
    """

    def __init__(self, rows: StreamRows, number: int, count: int, place: Place) -> None:
        self.rows, self.number, self.count = rows, number, count
        #: Counts and places before the latest windows, to go back to.
        self.passed: deque[tuple[int, Place]] = deque(maxlen=1 << 12)
        self._chunks: Iterator[list[Any]] = (
            self._packed_blocks if rows.best_fit else self._documents
        )(place)
        self._next = self._ahead()
        #: Rows that are packed, or documents that are not served to the end. Of the first,
        #: `_served` tokens are.
        self._queue: deque[Any] = deque()
        self._served, self._start = place.offset, place

    @property
    def place(self) -> Place:
        if not self._queue:
            return self._start
        place: Place = self._queue[0].place
        return place._replace(offset=self._served)

    def next_window(self) -> _Served:
        """Return the next row. Of split rows the last target begins the next one."""
        self.passed.append((self.count, self.place))
        served = self._packed() if self.rows.best_fit else self._split()
        self.count += 1
        return served

    def outside(self, reason: str) -> StateError:
        """Return the error for a place that the files do not have."""
        return StateError(
            f"lane {self.number} of the stream cannot go on from its place in the checkpoint: "
            f"{reason}. The files have "
            "changed since then, or the checkpoint is damaged. checkpoint.exclude_from_loading = "
            '["dataloader"] begins the text again'
        )

    def _warn(self, place: str, then: str) -> None:
        """Report a place within a file that is not there."""
        logger.warning(
            f"lane {self.number} of the stream should go on with {place}, and goes on with "
            f"{then}: text or data.buffer have changed since the checkpoint, or it is damaged"
        )

    def _packed(self) -> _Served:
        while not self._queue:
            self._fetch()
        served, place = self._queue.popleft()
        self._start = place._replace(document=place.document + 1)
        return served

    def _split(self) -> _Served:
        while not self._queue:
            self._fetch()
        if self._served >= len(
            self._queue[0].ids
        ):  # the text has changed, or the checkpoint is damaged
            self._warn(
                f"token {self._served} of a document of {len(self._queue[0].ids)}",
                "the document's begin",
            )
            self._served = 0
        missing = (
            self.rows.seq_len
            + 1
            + self._served
            - sum(len(document.ids) for document in self._queue)
        )
        while missing > 0:
            missing -= sum(len(document.ids) for document in self._fetch())
        parts, begin, missing = (
            list[tuple[_Document, int, int]](),
            self._served,
            self.rows.seq_len + 1,
        )
        for document in self._queue:
            end = min(len(document.ids), begin + missing)
            parts.append((document, begin, end))
            missing -= end - begin
            begin = 0
            if not missing:
                break
        while self._queue[0] is not parts[-1][0]:
            self._queue.popleft()
        self._served = parts[-1][2] - 1
        targets = np.concatenate([document.targets[begin:end] for document, begin, end in parts])
        tokens = np.concatenate([document.ids[begin:end] for document, begin, end in parts])
        lengths = np.array([end - begin for _, begin, end in parts])
        window = Window(tokens, targets, np.cumsum(lengths) - lengths)
        row = make_row([window], self.rows.seq_len, self.rows.pad_id, self.rows.mask_documents)
        return _Served(row, [(document.name, end - begin) for document, begin, end in parts])

    def _fetch(self) -> list[Any]:
        """Put the next documents, or packed rows, into the queue, and return them."""
        chunk = self._next()
        self._next = self._ahead()
        self._queue += chunk
        return chunk

    def _ahead(self) -> Callable[[], list[Any]]:
        """Start to tokenize the next documents, if there are threads for it; return a function that
        waits for them.
        """
        if self.rows.encoders is None:
            return partial(next, self._chunks)
        return self.rows.encoders.submit(next, self._chunks).result

    def _order(self, count: int, epoch: int) -> list[int]:
        """Return an order of the lane's own."""
        return epoch_order(
            count, self.rows.seed ^ (self.number + 1) * _LANE_KEY, epoch, self.rows.shuffle
        ).tolist()

    def _shards(self, epoch: int) -> list[tuple[int, int, int]]:
        """Return the lane's shards in order: (number, part, parts); it takes the rows with row mod
        parts = part.
        """
        rows, count = self.rows, len(self.rows.shards.names)
        if count >= rows.lanes:
            # The same shards in each epoch: lanes do not end theirs at the same time.
            own = epoch_order(count, rows.seed, 0, rows.shuffle)[self.number :: rows.lanes].tolist()
            return [(own[place], 0, 1) for place in self._order(len(own), epoch)]
        part, number = divmod(self.number, count)  # lanes share a shard: each reads all of it
        return [(number, part, len(range(number, rows.lanes, count)))]

    def _blocks(self, start: Place) -> Iterator[tuple[Place, list[Record]]]:
        """Yield blocks of documents, each with its place, from the one that begins at `start`."""
        rows = self.rows
        size = max(rows.buffer // rows.lanes, 1) if rows.shuffle else 256
        epoch, shard, row = start.epoch, start.shard, start.row
        seen = row > 0 or shard > 0
        while True:
            own = self._shards(epoch)
            for place in range(shard, len(own)):
                number, part, parts = own[place]
                records = (
                    record
                    for record in rows.shards.records(number, row)
                    if record.number % parts == part
                )
                asked = row if (epoch, place) == (start.epoch, start.shard) else 0
                while block := list(itertools.islice(records, size)):
                    seen, asked = True, 0
                    yield Place(epoch, place, row), block
                    row = block[-1].number
                if asked:
                    raise self.outside(
                        f"{rows.shards.names[number]} has no record {asked + 1} for it"
                    )
                row = 0
            if not seen:
                files = ", ".join(rows.shards.names[number] for number, _, _ in own[:3])
                raise DataError(
                    f"no records in {files}: a lane of the stream is empty; set data.streaming = "
                    "false, "
                    "or data.lanes lower, which counts for training text"
                )
            epoch, shard, seen = epoch + 1, 0, False

    def _packed_blocks(self, start: Place) -> Iterator[list[_Packed]]:
        """Yield rows that the documents of a block are fitted into, a block at a time."""
        rows, first, block = self.rows, start.document, list[_Document]()
        for chunk in self._documents(start._replace(document=0)):
            block += chunk
            if not chunk:  # the end of a block
                offsets = np.concatenate([[0], np.cumsum([len(one.ids) for one in block])])
                targets = np.concatenate([one.targets for one in block])
                corpus = Corpus(
                    np.concatenate([one.ids for one in block]),
                    offsets,
                    rows.pad_id,
                    "",
                    (),
                    targets,
                )
                order: Any = {"shuffle": False, "epochs": 1, "mask_documents": rows.mask_documents}
                fitted = BestFitDataset(corpus, seq_len=rows.seq_len, **order)
                if first > fitted.sequences_per_epoch:
                    self._warn(
                        f"row {first} of a block of {fitted.sequences_per_epoch}",
                        "the block behind it",
                    )
                yield [
                    _Packed(
                        _Served(
                            fitted.sequence(n),
                            [(block[d].name, tokens) for d, tokens in fitted.documents_in(n)],
                        ),
                        block[0].place._replace(document=n),
                    )
                    for n in range(first, fitted.sequences_per_epoch)
                ]
                first, block = 0, []

    def _documents(self, start: Place) -> Iterator[list[_Document]]:
        """Yield documents in order, tokenized, some at a time; and [] at the end of a block."""
        blocks, first = self._blocks(start), start.document
        ahead = self.rows.readers.submit(next, blocks)
        while True:
            place, records = ahead.result()
            ahead = self.rows.readers.submit(next, blocks)
            order = self._order(len(records), (place.epoch << 40) ^ (place.shard << 24) ^ place.row)
            if first and first >= len(
                order
            ):  # data.buffer was larger, or the checkpoint is damaged
                self._warn(f"document {first} of a block of {len(order)}", "the block behind it")
            chunk, size = list[_Document](), 0
            for index in range(first, len(order)):
                record = records[order[index]]
                ids, mask = self.rows.encode(record)
                targets = targets_of([0, len(ids)], [mask])
                chunk.append(
                    _Document(
                        ids,
                        targets,
                        place._replace(document=index),
                        f"{record.file}:{record.number}",
                    )
                )
                size += len(record.text)
                if size > _CHUNK or index == len(order) - 1:
                    yield chunk
                    chunk, size = [], 0
            yield []
            first = 0


def default_lanes(ranks: int, shards: int) -> int:
    """Return the number of lanes for so many data-parallel ranks: a multiple of it, no more than
    shards if possible.

    If there are shards enough, at least `_LANES`, so that a few ranks more or less need not read
    the lanes of others.
    """
    wanted = -(-_LANES // ranks)
    return ranks * max(min(wanted, shards // ranks), 1)


def open_stream(reader: TextReader, files: TextFiles, order: Order) -> StreamRows:
    """Return the sequences of files that are read while training."""
    data = reader.data
    tokenizer = reader.tokenizer
    return StreamRows(
        Shards.of(files),
        lambda record: encode_record(record, tokenizer, reader.vocab_size),
        description=f"{PACKING}, {tokenizer.fingerprint}",
        pad_id=tokenizer.eos_id,
        buffer=data.shuffle_buffer,
        lanes=data.lanes,
        shared_lanes=reader.lanes,
        ranks=reader.ranks,
        workers=workers_of(data.num_workers),
        best_fit=data.packing == "best-fit",
        **order._asdict(),
    )
