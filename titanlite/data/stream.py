"""Training sequences of text that is read while training: any size, one order, exact resume.

Sequence i belongs to lane i mod V. A lane owns a share of the shards (files), and reads them in an
order computed from (seed, epoch). It reads a block of documents, mixes it by a computed order, and
cuts the documents' tokens into windows, as `packing` does. So sequence i does not depend on the
number of ranks. A rank reads only the lanes of its sequences if that number divides V.

A lane's place is six numbers. To resume there, a lane reads its shard again up to the block:
compressed text has no way to skip. Epochs are those of a lane: lanes with less text begin theirs
sooner. `titanlite.data.lanes` has one lane.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.data import DataError
from titanlite.data.daemon_threads import Pool
from titanlite.data.file_stamps import FileStamps
from titanlite.data.lanes import Lane, LaneReader, Place, ServedRow, StreamText
from titanlite.data.rows import FilePlace, Row, Rows, make_row
from titanlite.data.state_checks import check_stream
from titanlite.data.text_files import TextFiles
from titanlite.data.tokenize_files import PACKING, encode_record, workers_of
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.data.dataset_builder import Order, TextReader

#: Threads that read.
_READERS = 8
#: Seconds that the end of the process waits for a read.
_READ_SECONDS = 30.0
#: Bytes of rows that stay after they were served. A save, the log of documents, and a step that is
#: repeated, ask for them again.
_KEPT_BYTES = 64 << 20
#: Bytes of a token of a kept row: token, label, number of its document.
_TOKEN_BYTES = 20
#: Least number of lanes, so that a few ranks more or less do not share lanes.
_LANES = 8
#: Sequences that a lane passes over at most: to read more takes days.
_FURTHEST = 1 << 24


class StreamRows(Rows):
    """Sequences of a stream by global index, without an end.

    Asking for them in order is fast, going back is not.

    Args:
        lanes: V; None: chosen for `ranks` and kept in the state.
        shared_lanes: V of the other streams of a mixture, where `lanes` is None.
        workers: threads that tokenize; 0: the one that asks does it.
    """

    total_sequences: None = None
    lanes: int

    def __init__(
        self,
        text: StreamText,
        *,
        lanes: int | None = None,
        shared_lanes: int | None = None,
        ranks: int = 1,
        workers: int = 0,
    ) -> None:
        self.text = text
        self.seq_len = text.seq_len
        self.listing = text.shards.listing
        self.given_lanes = lanes
        self.lanes = lanes or shared_lanes or default_lanes(ranks, len(text.shards.names))
        self._fingerprint = text.shards.fingerprint(text.description)
        self._readers = Pool(_READERS, "titanlite-read", at_exit=_READ_SECONDS)
        self._encoders = Pool(workers, "titanlite-encode") if workers else None
        self._open: dict[int, Lane] = {}
        #: Lane → count of its rows, and its place after them, where the lane is not open.
        self._places: dict[int, tuple[int, Place]] = {}
        #: The latest rows by index.
        self._kept: OrderedDict[int, ServedRow] = OrderedDict()
        #: A save asks from the main thread, the loader from its own.
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def settings(self) -> dict[str, Any]:
        text = self.text
        settings: dict[str, Any] = {
            "seq_len": text.seq_len,
            "seed": text.seed,
            "shuffle": text.shuffle,
            "epochs": None,
            "buffer": text.buffer,
        }
        if self.given_lanes is not None:
            settings["lanes"] = self.given_lanes
        if text.mask_documents:
            settings["mask_documents"] = True
        return settings

    def describe(self) -> str:
        files = counted(len(self.text.shards.names), "files")
        lanes = counted(self.lanes, "lanes")
        return f"{files}, read while training in {lanes}, {self.text.buffer:,} documents at a time"

    def sequence(self, index: int) -> Row:
        """Return sequence `index`. Raises DataError if its text cannot be read."""
        return self._served(index).row

    def padding(self) -> Row:
        text = self.text
        return make_row((), text.seq_len, text.pad_id, text.mask_documents)

    def documents_in(self, index: int) -> list[tuple[str, int]]:
        return self._served(index).documents

    def place_of(self, document: str) -> FilePlace:
        file, _, record = document.rpartition(":")
        return FilePlace(file, int(record))

    def state_dict(self) -> dict[str, Any]:
        """Return number, row count and place of each lane that this rank has read."""
        with self._lock:
            places = dict(self._places)
            for number, lane in self._open.items():
                places[number] = lane.count, lane.place
        return {
            "lanes": self.lanes,
            "revision": self.text.shards.revision,
            "cursors": [
                [number, count, *place] for number, (count, place) in sorted(places.items())
            ],
        }

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the furthest place of each lane over all ranks."""
        cursors: dict[int, list[Any]] = {}
        for state in states:
            for cursor in state["cursors"]:
                number = cursor[0]
                cursors[number] = max(cursor, cursors.get(number, cursor))
        return {**states[0], "cursors": [cursors[number] for number in sorted(cursors)]}

    def load_state_dict(
        self,
        state: dict[str, Any],
        position: int = 0,
        phases: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Continue from these places. Raises DataError if they cannot be of this stream."""
        check_stream(state, self.lanes, len(self.text.shards.names))
        lanes = state.get("lanes", self.lanes)
        if self.given_lanes not in (None, lanes):
            raise DataError(
                f"data.lanes: the checkpoint's order has {lanes} lanes, not {self.given_lanes}"
            )
        self.close()
        self.lanes = lanes
        # An earlier version fitted documents into rows, and counted rows: their block begins again.
        fitted = {"document": 0, "offset": 0} if "packing" in state else {}
        self._places = {
            number: (count, Place(*place)._replace(**fitted))
            for number, count, *place in state.get("cursors", ())
        }
        self.text = replace(self.text, shards=self.text.shards.at(state.get("revision", "")))

    def close(self) -> None:
        """Give up what was read ahead; asking again reads it again."""
        with self._lock:
            for number in list(self._open):
                self._shut(number)
            self._kept.clear()

    def _served(self, index: int) -> ServedRow:
        # Without a wait for the thread that reads ahead.
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        number = index % self.lanes
        count = index // self.lanes
        with self._lock:
            if index in self._kept:
                return self._kept[index]
            lane = self._lane_before(number, count)
            ahead = count - lane.count
            if ahead > _FURTHEST:
                raise lane.reader.outside(
                    f"the next sequence, {index:,}, lies {ahead:,} of its sequences ahead"
                )
            try:
                # Ranks that share a lane leave rows of it out.
                while lane.count <= count:
                    served = lane.next_row()
                    self._kept[number + (lane.count - 1) * self.lanes] = served
                    if len(self._kept) > max(_KEPT_BYTES // _TOKEN_BYTES // self.seq_len, 1):
                        self._kept.popitem(last=False)
            except BaseException:
                self._shut(number)
                raise
            return served

    def _lane_before(self, number: int, count: int) -> Lane:
        """Return a lane at the nearest known place, `count` rows or before."""
        lane = self._open.get(number)
        if lane is not None and lane.count <= count:
            return lane
        known = [(0, Place()), self._places.get(number, (0, Place()))]
        if lane is not None:
            known += lane.passed
        nearest = max(place for place in known if place[0] <= count)
        reader = LaneReader(self.text, number, self.lanes, self._readers, self._encoders)
        self._open[number] = Lane(reader, *nearest)
        return self._open[number]

    def _shut(self, number: int) -> None:
        lane = self._open.pop(number)
        self._places[number] = lane.count, lane.place


def default_lanes(ranks: int, shards: int) -> int:
    """Return a multiple of the data-parallel ranks, no more than shards if possible.

    With enough shards it is at least `_LANES`: then a few more or fewer ranks need not read others'
    lanes.
    """
    wanted = -(-_LANES // ranks)
    return ranks * max(min(wanted, shards // ranks), 1)


def open_stream(reader: TextReader, files: TextFiles, order: Order) -> StreamRows:
    """Return the sequences of files that are read while training."""
    data = reader.data
    tokenizer = reader.tokenizer
    text = StreamText(
        files,
        lambda record: encode_record(record, tokenizer, reader.vocab_size),
        description=f"{PACKING}, {tokenizer.fingerprint}",
        pad_id=tokenizer.eos_id,
        buffer=data.shuffle_buffer,
        **order._asdict(),
    )
    rows = StreamRows(
        text,
        lanes=data.lanes,
        shared_lanes=reader.lanes,
        ranks=reader.ranks,
        workers=workers_of(data.num_workers),
    )
    if files.stamps:
        rows.stamps = FileStamps(files.names, files.stamps)
    return rows
